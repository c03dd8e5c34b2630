"""Sizes of the slabs in host memory and in checkpoints, computed from the sizes of a model's units."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_lm.constants import PACKED_ALIGNMENT
from horizon_lm.planning.model_sizes import ModelSizes
from horizon_lm.planning.planned_optimizer import ADAMW, MOMENT_BYTES, PlannedOptimizer
from horizon_lm.slabs import WHOLE, Shard, UnitCuts, scale_at, slab_elements, used_bytes

WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
_LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
SAVED_BYTES = {name: streamed + _LOW_HALF_BYTES[name] for name, streamed in WEIGHT_BYTES.items()}  # of both


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings that determine the host memory of a run.

    Attributes:
        precision, moments: as in a run's settings.
        optimizer: the optimizer of the run.
        grad_bytes: bytes per element of the gradient store.
        update_in_backward: there is no gradient store.
        rows: maximum number of distinct table rows read by a step.
        boundary: bytes of one block's input for the whole batch.
        offloaded: number of boundaries in host memory.
        frozen_base: only units with trainable parameters have low halves, and are in checkpoints.
        shard: the range of each slab that this rank owns.
    """

    precision: str
    moments: str = "float32"
    optimizer: PlannedOptimizer = ADAMW
    grad_bytes: int = 2
    update_in_backward: bool = False
    rows: int = 0
    boundary: int = 0
    offloaded: int = 0
    frozen_base: bool = False
    shard: Shard = WHOLE


def host_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> Mapping[str, int]:
    """Return the host memory of a run in bytes, by kind.

    Args:
        sizes: sizes of the model.
        trained: sizes of the trainable parameters.
        settings: settings of the run.
    """
    has_masters = _has_masters(trained, settings)
    kinds: Counter[str] = Counter()
    for each in _by_precision(sizes, trained, settings):
        kinds.update(_slab_bytes(*each, has_masters))
    kinds["boundaries"] = settings.offloaded * settings.boundary
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _by_precision(
    sizes: ModelSizes, trained: ModelSizes, settings: HostSettings
) -> list[tuple[ModelSizes, ModelSizes, HostSettings]]:
    """Return ``sizes, trained, settings`` of the weights in the precision of the run and, if there are any, of those in float32."""
    own = (sizes, trained, settings)
    if sizes.in_float32 is None:
        return [own]
    assert trained.in_float32 is not None
    return [own, (sizes.in_float32, trained.in_float32, replace(settings, precision="float32", grad_bytes=4))]


def _slab_bytes(
    sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]
) -> dict[str, int]:
    """Return the bytes of all slabs by kind, and of those in which gradients land."""
    cuts = sizes.cuts(settings.shard)
    ranges = _trained_ranges(cuts, trained)
    kept = ranges
    if settings.update_in_backward:
        kept = ranges[:1] if trained.tied else []
    masters = [each for each, saved in zip(cuts, has_masters, strict=True) if saved]
    packed = [settings.shard.own(settings.shard.cuts(each.slab_bytes, PACKED_ALIGNMENT)) for each in sizes.packed]
    return {
        "weights": _own_bytes(cuts, WEIGHT_BYTES[settings.precision]),
        "packed_weights": used_bytes(packed, 1),
        "low_halves": _own_bytes(masters, _LOW_HALF_BYTES[settings.precision]),
        "grads": used_bytes(kept, settings.grad_bytes),
        "moments": _moments(cuts, trained, settings),
        "landing": _landing_slot_bytes(trained, ranges, settings) if settings.update_in_backward else 0,
    }


def checkpoint_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the slabs in a checkpoint. The arguments are those of `host_bytes`."""
    has_masters = _has_masters(trained, settings)
    of_all_ranks = replace(settings, shard=WHOLE)
    return sum(_saved_bytes(*each, has_masters) for each in _by_precision(sizes, trained, of_all_ranks))


def _saved_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]) -> int:
    """Return the bytes of the slabs in a checkpoint, of weights in one precision."""
    per_weight = (WEIGHT_BYTES[settings.precision], _LOW_HALF_BYTES[settings.precision])
    units = zip(sizes.units, has_masters, strict=True)
    saved = [UnitCuts(tensors) for tensors, is_saved in units if is_saved]
    weights = sum(_own_bytes(saved, itemsize) for itemsize in per_weight)
    return weights + _moments(sizes.cuts(settings.shard), trained, settings)


def largest_file_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the largest file of a checkpoint, which holds a rank's range of a unit. The arguments are those of
    `host_bytes`.
    """
    has_masters = _has_masters(trained, settings)
    files = (size for each in _by_precision(sizes, trained, settings) for size in _file_bytes(*each, has_masters))
    return max(files) // settings.shard.count


def _file_bytes(
    sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]
) -> list[int]:
    """Return the bytes of each unit's weights and moments in a checkpoint."""
    moments = zip(*(held.units for held in settings.optimizer.moments_of(trained)), strict=True)
    units = zip(sizes.units, has_masters, moments, strict=True)
    return [
        (SAVED_BYTES[settings.precision] * slab_elements(tensors) if is_saved else 0)
        + MOMENT_BYTES[settings.moments] * sum(map(slab_elements, held))
        for tensors, is_saved, held in units
    ]


def _has_masters(trained: ModelSizes, settings: HostSettings) -> list[bool]:
    """Return whether each unit has low halves and is in checkpoints: all but those of a frozen base."""
    others = trained.units if trained.in_float32 is None else trained.in_float32.units
    return [
        bool(sum(part) + sum(other)) or not settings.frozen_base
        for part, other in zip(trained.units, others, strict=True)
    ]


def _moments(cuts: Sequence[UnitCuts], trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of this rank's range of all moments."""
    total = 0
    for held in settings.optimizer.moments_of(trained):
        ranges = _trained_ranges(cuts, held)
        scales = _scales(held, ranges) if settings.moments == "8bit" else []
        total += used_bytes(ranges, MOMENT_BYTES[settings.moments]) + used_bytes(scales, 4)
    return total


def _own_bytes(cuts: Iterable[UnitCuts], itemsize: int) -> int:
    """Return the bytes of the pages that hold this rank's ranges of the weights of these units."""
    return used_bytes((each.own for each in cuts), itemsize)


def _trained_ranges(cuts: Sequence[UnitCuts], trained: ModelSizes) -> list[slice]:
    """Return this rank's range of the gradients of each unit."""
    return [
        each.shard.own(each.restricted(part)) if any(part) else slice(0, 0)
        for each, part in zip(cuts, trained.units, strict=True)
    ]


def _scales(trained: ModelSizes, ranges: Sequence[slice]) -> list[slice]:
    """Return this rank's range of the scales of one 8-bit moment, for each unit."""
    rows = [trained.hidden] + [None] * (len(trained.units) - 1)
    return [
        slice(scale_at(tensors, own.start, row), scale_at(tensors, own.stop, row))
        for tensors, own, row in zip(trained.units, ranges, rows, strict=True)
    ]


def _landing_slot_bytes(trained: ModelSizes, ranges: Sequence[slice], settings: HostSettings) -> int:
    """Return the bytes of the landing slots: two for blocks, one for each other unit. A tied table has a gradient slab
    instead.
    """
    lengths = [own.stop - own.start for own in ranges]
    num_blocks = len(trained.blocks)
    elements = 2 * max(lengths[1 : 1 + num_blocks]) + lengths[2 + num_blocks]  # of blocks, and outer parameters
    if not trained.tied:
        elements += lengths[1 + num_blocks]  # of the head
        elements += (settings.rows + 1) * trained.hidden if trained.table else 0
    return elements * settings.grad_bytes
