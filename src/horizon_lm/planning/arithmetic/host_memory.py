"""Sizes of the slabs in host memory and in checkpoints, from the layout of a model."""

from collections.abc import Collection, Mapping
from functools import lru_cache

from horizon_lm.common.optimizers import MOMENT_BYTES
from horizon_lm.common.quantities import page_aligned
from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit
from horizon_lm.memory.layout.buffers import landing_numels
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.moments import MomentLayout
from horizon_lm.memory.layout.ranks import WHOLE
from horizon_lm.memory.layout.units import FLOAT32, StorageLayout
from horizon_lm.planning.arithmetic.step import Step

WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
_LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
SAVED_BYTES = {name: streamed + _LOW_HALF_BYTES[name] for name, streamed in WEIGHT_BYTES.items()}  # of both halves


def host_bytes(step: Step) -> Mapping[str, int]:
    """Return the host memory of a run in bytes, by kind."""
    settings, layout = step.settings, step.tiled.model
    grads = list(layout.slabs())
    if settings.update_in_backward:  # gradients go through landing slots, except for a tied table's
        grads = list(layout.units[EMBED].of_weights) if layout.tied else []
    masters = _units_with_masters(step)
    kinds = {
        "weights": sum(slab.own_bytes(WEIGHT_BYTES[_precision(slab, step)]) for slab in layout.slabs()),
        "packed_weights": sum(slabs.packed.own_bytes(1) for slabs in layout.units.values()),
        "low_halves": sum(
            slab.own_bytes(_low_half_bytes(slab, step)) for slab in layout.slabs() if slab.unit in masters
        ),
        "grads": sum(slab.own_grad_bytes(_grad_bytes(slab, step)) for slab in grads),
        "moments": _bytes_of_moments(step, layout),
        "landing": _landing_slot_bytes(step) if settings.update_in_backward else 0,
        "boundaries": sum(map(step.boundary_of, step.waiting)),
    }
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def checkpoint_bytes(step: Step) -> int:
    """Return the bytes of all slabs in a checkpoint, of which each rank writes its range."""
    layout, total = step.outline.layout, 0
    for unit in _units_with_masters(step):
        for slab in layout.units[unit].of_weights:
            # The two halves of a weight are in slabs of their own.
            for itemsize in (WEIGHT_BYTES[_precision(slab, step)], _low_half_bytes(slab, step)):
                total += page_aligned(slab.layout.numel * itemsize)
    return total + _bytes_of_moments(step, layout.on(WHOLE))


# At most, for each tensor of a slab: its lines in the header of a file, with one for padding, and in the manifest.
_HEADER_BYTES, _MANIFEST_BYTES = 384, 384
_STATE_BYTES = 2**16  # of training_state.json and run.yaml, at most


def checkpoint_files_bytes(step: Step) -> int:
    """Return the bytes of a checkpoint beside its slabs, at most: headers, the manifest, and the state of the run."""
    settings, layout = step.settings, step.outline.layout
    per_moment = 2 if settings.moments == "8bit" else 1  # scales have tensors of their own
    num_moments, headers, num_tensors = len(step.moments) * per_moment, 0, 0
    for unit in _units_with_masters(step):
        for slab in layout.units[unit].of_weights:
            halves = 2 if _low_half_bytes(slab, step) else 1
            num_with_moments = len(slab.layout.entries) if slab.grad_layout.entries else 0
            num_in_file = len(slab.layout.entries) * halves + num_with_moments * num_moments
            headers += page_aligned(num_in_file * _HEADER_BYTES)
            num_tensors += num_in_file
    return headers * settings.shard.count + num_tensors * _MANIFEST_BYTES + _STATE_BYTES


def largest_file_bytes(step: Step) -> int:
    """Return the bytes of the largest file of a checkpoint. A file holds one rank's range of a slab, with its moments."""
    settings, layout = step.settings, step.outline.layout
    masters, moments = _units_with_masters(step), step.moments
    files = (
        (
            (WEIGHT_BYTES[_precision(slab, step)] + _low_half_bytes(slab, step)) * slab.layout.numel
            if slab.unit in masters
            else 0
        )
        + MOMENT_BYTES[settings.moments] * sum(slab.layout.restrict(names).numel for names in moments)
        for slab in layout.slabs()
    )
    return max(files) // settings.shard.count


def _precision(slab: StorageLayout, step: Step) -> str:
    return "float32" if slab.storage == FLOAT32 else step.settings.precision


def _low_half_bytes(slab: StorageLayout, step: Step) -> int:
    """Return the bytes of the low half of each weight in a slab: none in a unit that is not trained, if bfloat16 has all bits."""
    is_trained = step.outline.layout.units[slab.unit].grad_layout.numel > 0
    return _LOW_HALF_BYTES[_precision(slab, step)] if is_trained or not step.outline.in_bfloat16 else 0


def _grad_bytes(slab: StorageLayout, step: Step) -> int:
    return 4 if slab.storage == FLOAT32 else step.settings.grad_bytes


def _units_with_masters(step: Step) -> Collection[Unit]:
    """Return the units that have low halves and are saved in checkpoints: all of them, or only trained ones if the base is frozen."""
    layout = step.outline.layout
    if not step.outline.base_is_frozen:
        return layout.units
    # A unit's slab in float32 is saved with its other slab, if weights of either are trained.
    return [unit for unit, slabs in layout.units.items() if slabs.grad_layout.numel]


def _bytes_of_moments(step: Step, layout: ModelLayout[StorageLayout]) -> int:
    """Return the bytes of a rank's range of all moments; 8-bit moments with their scales."""
    return sum(_bytes_of_moment(layout, names, step.settings.moments) for names in step.moments)


@lru_cache(256)  # a plan tries many settings of the same few layouts
def _bytes_of_moment(layout: ModelLayout[StorageLayout], names: frozenset[str], kind: str) -> int:
    """Return the bytes of a rank's range of one moment of these parameters."""
    moments = (MomentLayout(slab, names, kind == "8bit") for slab in layout.slabs())
    return sum(moment.own_bytes(MOMENT_BYTES[kind]) for moment in moments)


def _landing_slot_bytes(step: Step) -> int:
    """Return the bytes of the landing slots, in which gradients wait for their update: all blocks share two, and each other unit has one. A
    table tied to the head has a gradient slab instead.
    """
    layout, grad_bytes = step.tiled.model, step.settings.grad_bytes
    units_of_slots = [[layout.units[unit] for unit in layout.blocks]] * 2
    units_of_slots += [[layout.units[unit]] for unit in (OUTER, *(() if layout.tied else (HEAD,)))]
    total = sum(plain * grad_bytes + float32 * 4 for plain, float32 in map(landing_numels, units_of_slots))
    if layout.trained_numel(EMBED) and not layout.tied:
        # A table has a slot for the rows that are read, and a row of zeros for all others.
        total += (step.table_rows + 1) * layout.hidden * grad_bytes
    return total
