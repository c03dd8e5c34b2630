"""Sizes of the slabs in host memory and in checkpoints, computed from the sizes of a model's units."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from horizon_lm.constants import PACKED_ALIGNMENT
from horizon_lm.planning.model_sizes import ModelSizes
from horizon_lm.planning.planned_optimizer import MOMENT_BYTES
from horizon_lm.planning.step import Step
from horizon_lm.slabs import WHOLE, UnitCuts, scale_at, slab_elements, used_bytes

WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
_LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
SAVED_BYTES = {name: streamed + _LOW_HALF_BYTES[name] for name, streamed in WEIGHT_BYTES.items()}  # of both
_SCALE_BYTES = 4  # of a scale of 8-bit moments


def host_bytes(step: Step) -> Mapping[str, int]:
    """Return the host memory of a run in bytes, by kind."""
    has_masters = _has_masters(step)
    kinds: Counter[str] = Counter()
    for each in _split_by_precision(step):
        kinds.update(_slab_bytes(each, has_masters))
    kinds["boundaries"] = step.waiting * step.boundary
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _split_by_precision(step: Step) -> list[Step]:
    """Return the steps whose slabs add up to those of this one: itself, and one of the weights kept in float32, if there are any."""
    outline = step.outline
    sizes, trained = outline.sizes.in_float32, outline.trained.in_float32
    if sizes is None:
        return [step]
    assert trained is not None
    in_float32 = replace(step.settings, precision="float32", grad_bytes=4)
    # The step's own sizes do not count the weights in float32 (`ModelSizes.in_float32`).
    return [step, Step(replace(outline, sizes=sizes, trained=trained), in_float32)]


def _slab_bytes(step: Step, has_masters: Sequence[bool]) -> dict[str, int]:
    """Return the bytes of all slabs and landing slots by kind, of weights in one precision. ``has_masters`` is of the whole model."""
    settings, sizes, trained = step.settings, step.outline.sizes, step.outline.trained
    cuts = sizes.cuts(settings.shard)
    ranges = _trained_ranges(cuts, trained)
    grads = ranges
    if settings.update_in_backward:  # they go through landing slots, but for those of a tied table, the first unit
        grads = ranges[:1] if trained.tied else []
    masters = [each for each, has_master in zip(cuts, has_masters, strict=True) if has_master]
    packed = [settings.shard.own(settings.shard.cuts(each.slab_bytes, PACKED_ALIGNMENT)) for each in sizes.packed]
    return {
        "weights": _own_bytes(cuts, WEIGHT_BYTES[settings.precision]),
        "packed_weights": used_bytes(packed, 1),
        "low_halves": _own_bytes(masters, _LOW_HALF_BYTES[settings.precision]),
        "grads": used_bytes(grads, settings.grad_bytes),
        "moments": _moments(step),
        "landing": _landing_slot_bytes(step, ranges) if settings.update_in_backward else 0,
    }


def checkpoint_bytes(step: Step) -> int:
    """Return the bytes of the slabs in a checkpoint, which all ranks write."""
    has_masters = _has_masters(step)
    of_all_ranks = replace(step, settings=replace(step.settings, shard=WHOLE))
    return sum(_saved_bytes(each, has_masters) for each in _split_by_precision(of_all_ranks))


def _saved_bytes(step: Step, has_masters: Sequence[bool]) -> int:
    """Return the bytes of the slabs in a checkpoint: weights in one precision, and their moments."""
    precision = step.settings.precision
    units = zip(step.outline.sizes.units, has_masters, strict=True)
    saved = [UnitCuts(tensors) for tensors, is_saved in units if is_saved]
    weights = sum(_own_bytes(saved, itemsize) for itemsize in (WEIGHT_BYTES[precision], _LOW_HALF_BYTES[precision]))
    return weights + _moments(step)


def largest_file_bytes(step: Step) -> int:
    """Return the bytes of the largest file of a checkpoint, which holds a rank's range of a unit."""
    has_masters = _has_masters(step)
    files = (num_bytes for each in _split_by_precision(step) for num_bytes in _file_bytes(each, has_masters))
    return max(files) // step.settings.shard.count


def _file_bytes(step: Step, has_masters: Sequence[bool]) -> list[int]:
    """Return the bytes of each unit's weights and moments in a checkpoint."""
    settings = step.settings
    # For each unit, the tensors that have each of the moments.
    moments = zip(*(each.units for each in settings.optimizer.moments_of(step.outline.trained)), strict=True)
    units = zip(step.outline.sizes.units, has_masters, moments, strict=True)
    return [
        (SAVED_BYTES[settings.precision] * slab_elements(tensors) if is_saved else 0)
        + MOMENT_BYTES[settings.moments] * sum(map(slab_elements, of_unit))
        for tensors, is_saved, of_unit in units
    ]


def _has_masters(step: Step) -> list[bool]:
    """Return whether each unit has low halves and is in checkpoints: all but those of a frozen base."""
    trained = step.outline.trained
    if not step.outline.base_is_frozen:
        return [True] * len(trained.units)
    of_each = [trained.units] if trained.in_float32 is None else [trained.units, trained.in_float32.units]
    return [any(map(any, of_unit)) for of_unit in zip(*of_each, strict=True)]


def _moments(step: Step) -> int:
    """Return the bytes of this rank's range of all moments; 8-bit moments with their scales."""
    settings, cuts = step.settings, step.outline.sizes.cuts(step.settings.shard)
    total = 0
    for with_moment in settings.optimizer.moments_of(step.outline.trained):
        ranges = _trained_ranges(cuts, with_moment)
        scales = _scales(with_moment, ranges) if settings.moments == "8bit" else []
        total += used_bytes(ranges, MOMENT_BYTES[settings.moments]) + used_bytes(scales, _SCALE_BYTES)
    return total


def _own_bytes(cuts: Iterable[UnitCuts], itemsize: int) -> int:
    """Return the bytes of the pages that hold this rank's ranges of these units, with elements of ``itemsize`` bytes."""
    return used_bytes((each.own for each in cuts), itemsize)


def _trained_ranges(cuts: Sequence[UnitCuts], trained: ModelSizes) -> list[slice]:
    """Return this rank's range of the gradients of each unit; an empty one if none of its tensors is trained."""
    return [
        each.shard.own(each.restricted(part)) if any(part) else slice(0, 0)
        for each, part in zip(cuts, trained.units, strict=True)
    ]


def _scales(trained: ModelSizes, ranges: Sequence[slice]) -> list[slice]:
    """Return this rank's range of the scales of one 8-bit moment, for each unit."""
    # The blocks of a table, the first unit, do not cross its rows, which are updated separately.
    rows = [trained.hidden] + [None] * (len(trained.units) - 1)
    return [
        slice(scale_at(tensors, own.start, row), scale_at(tensors, own.stop, row))
        for tensors, own, row in zip(trained.units, ranges, rows, strict=True)
    ]


def _landing_slot_bytes(step: Step, ranges: Sequence[slice]) -> int:
    """Return the bytes of the landing slots: two for blocks, one for each other unit. A tied table, and with it the head, has a gradient
    slab instead.
    """
    trained = step.outline.trained
    _table, *blocks, head, outer, _idle = (own.stop - own.start for own in ranges)
    elements = 2 * max(blocks) + outer
    if not trained.tied:
        elements += head
        # A table has a slot for the rows that are read, and a row of zeros for all others.
        elements += (step.table_rows + 1) * trained.hidden if trained.table else 0
    return elements * step.settings.grad_bytes
