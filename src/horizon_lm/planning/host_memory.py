"""Sizes of the slabs in host memory and in checkpoints, computed from the sizes of a model's units."""

from collections.abc import Callable, Collection, Mapping

from horizon_lm.constants import PACKED_ALIGNMENT
from horizon_lm.planning.model_sizes import ModelSizes, home_of, is_float32
from horizon_lm.planning.planned_optimizer import MOMENT_BYTES
from horizon_lm.planning.step import Step, StepSettings
from horizon_lm.quantities import page_aligned
from horizon_lm.ranges import length
from horizon_lm.slabs import WHOLE, UnitCuts, scale_at, slab_elements, used_bytes
from horizon_lm.units import EMBED, HEAD, OUTER, Unit, block

WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
_LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
SAVED_BYTES = {name: streamed + _LOW_HALF_BYTES[name] for name, streamed in WEIGHT_BYTES.items()}  # of both
_SCALE_BYTES = 4  # of a scale of 8-bit moments


def host_bytes(step: Step) -> Mapping[str, int]:
    """Return the host memory of a run in bytes, by kind."""
    settings, sizes, trained = step.settings, step.outline.sizes, step.outline.trained
    cuts = sizes.cuts(settings.shard)
    ranges = _trained_ranges(cuts, trained)
    grads = dict(ranges)
    if settings.update_in_backward:  # they go through landing slots, but for those of a tied table
        grads = {EMBED: ranges[EMBED]} if trained.tied else {}
    own = {unit: each.own for unit, each in cuts.items()}
    with_low_halves = {unit: own[unit] for unit in _units_with_masters(step)}
    packed = [settings.shard.own(settings.shard.cuts(each.slab_bytes, PACKED_ALIGNMENT)) for each in sizes.packed]
    kinds = {
        "weights": _used_bytes(own, lambda unit: WEIGHT_BYTES[_precision(unit, settings)]),
        "packed_weights": used_bytes(packed, 1),
        "low_halves": _used_bytes(with_low_halves, lambda unit: _LOW_HALF_BYTES[_precision(unit, settings)]),
        "grads": _used_bytes(grads, lambda unit: 4 if is_float32(unit) else settings.grad_bytes),
        "moments": _moments(step, cuts),
        "landing": _landing_slot_bytes(step, ranges) if settings.update_in_backward else 0,
        "boundaries": step.waiting * step.boundary,
    }
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _used_bytes(ranges: Mapping[Unit, slice], itemsize: Callable[[Unit], int]) -> int:
    """Return the bytes of the pages that hold these ranges of units. ``itemsize`` returns the bytes of a unit's elements."""
    return sum(used_bytes([used], itemsize(unit)) for unit, used in ranges.items())


def checkpoint_bytes(step: Step) -> int:
    """Return the bytes of the slabs in a checkpoint, which all ranks write."""
    sizes, total = step.outline.sizes, 0
    for unit in _units_with_masters(step):
        numel, precision = slab_elements(sizes.units[unit]), _precision(unit, step.settings)
        # The two halves of a weight are in slabs of their own.
        total += sum(page_aligned(numel * of_half[precision]) for of_half in (WEIGHT_BYTES, _LOW_HALF_BYTES))
    return total + _moments(step, sizes.cuts(WHOLE))


# At most, for each tensor of a slab: its lines in the header of a file, with one for padding, and in the manifest.
_HEADER_BYTES, _MANIFEST_BYTES = 384, 384
_STATE_BYTES = 2**16  # of training_state.json and run.yaml, at most


def checkpoint_files_bytes(step: Step) -> int:
    """Return the bytes of a checkpoint beside its slabs, at most: headers, the manifest, and the state of the run."""
    settings, trained, sizes = step.settings, step.outline.trained, step.outline.sizes
    per_moment = 2 if settings.moments == "8bit" else 1  # scales have tensors of their own
    num_moments, headers, num_tensors = len(settings.optimizer.moments_of(trained)) * per_moment, 0, 0
    for unit in _units_with_masters(step):
        halves = 2 if _LOW_HALF_BYTES[_precision(unit, settings)] else 1
        num = len(sizes.units[unit]) * halves + len(trained.units[unit]) * num_moments
        headers += page_aligned(num * _HEADER_BYTES)
        num_tensors += num
    return headers * settings.shard.count + num_tensors * _MANIFEST_BYTES + _STATE_BYTES


def largest_file_bytes(step: Step) -> int:
    """Return the bytes of the largest file of a checkpoint, which holds a rank's range of a unit."""
    settings, sizes = step.settings, step.outline.sizes
    masters, moments = _units_with_masters(step), settings.optimizer.moments_of(step.outline.trained)
    files = (
        (SAVED_BYTES[_precision(unit, settings)] * slab_elements(tensors) if unit in masters else 0)
        + MOMENT_BYTES[settings.moments] * sum(slab_elements(each.units[unit]) for each in moments)
        for unit, tensors in sizes.units.items()
    )
    return max(files) // settings.shard.count


def _precision(unit: Unit, settings: StepSettings) -> str:
    return "float32" if is_float32(unit) else settings.precision


def _units_with_masters(step: Step) -> Collection[Unit]:
    """Return the units with low halves, which are in checkpoints: all but those of a frozen base."""
    trained = step.outline.trained
    if not step.outline.base_is_frozen:
        return trained.units
    # The weights of a unit in float32 are saved with its others, if any of both are trained.
    return [unit for unit in trained.units if any(trained.tensors_of(home_of(unit)))]


def _moments(step: Step, cuts: Mapping[Unit, UnitCuts]) -> int:
    """Return the bytes of a rank's range of all moments; 8-bit moments with their scales. ``cuts`` has the cuts of the weights."""
    moments, total = step.settings.moments, 0
    for with_moment in step.settings.optimizer.moments_of(step.outline.trained):
        ranges = _trained_ranges(cuts, with_moment)
        scales = _scales(with_moment, ranges) if moments == "8bit" else []
        total += used_bytes(ranges.values(), MOMENT_BYTES[moments]) + used_bytes(scales, _SCALE_BYTES)
    return total


def _trained_ranges(cuts: Mapping[Unit, UnitCuts], trained: ModelSizes) -> dict[Unit, slice]:
    """Return a rank's range of the gradients of each unit; an empty one if none of its tensors is trained."""
    return {
        unit: each.shard.own(each.restricted(trained.units[unit])) if any(trained.units[unit]) else slice(0, 0)
        for unit, each in cuts.items()
    }


def _scales(trained: ModelSizes, ranges: Mapping[Unit, slice]) -> list[slice]:
    """Return the range of the scales of one 8-bit moment that belongs to each of these ranges of units."""
    found = []
    for unit, own in ranges.items():
        # The blocks of a table do not cross its rows, which are updated separately.
        tensors, row = trained.units[unit], trained.hidden if unit == EMBED else None
        found.append(slice(scale_at(tensors, own.start, row), scale_at(tensors, own.stop, row)))
    return found


def _landing_slot_bytes(step: Step, ranges: Mapping[Unit, slice]) -> int:
    """Return the bytes of the landing slots: two for blocks, one for each other unit. A tied table, and with it the head, has a gradient
    slab instead. ``ranges`` has this rank's range of the gradients of each unit, those in float32 apart.
    """
    trained = step.outline.trained
    lengths = {unit: length(own) for unit, own in ranges.items()}
    elements = _slot_elements(lengths, trained)
    if trained.units[EMBED] and not trained.tied:
        # A table has a slot for the rows that are read, and a row of zeros for all others.
        elements += (step.table_rows + 1) * trained.hidden
    in_float32 = {home_of(unit): numel for unit, numel in lengths.items() if is_float32(unit)}
    float32_elements = _slot_elements(in_float32, trained) if in_float32 else 0  # all units have such slabs, or none
    return elements * step.settings.grad_bytes + float32_elements * 4


def _slot_elements(lengths: Mapping[Unit, int], trained: ModelSizes) -> int:
    """Return the elements of the landing slots of all units but the table, from the elements of their gradients."""
    of_blocks = max(lengths[block(index)] for index in range(trained.num_blocks))
    return 2 * of_blocks + lengths[OUTER] + (0 if trained.tied else lengths[HEAD])
