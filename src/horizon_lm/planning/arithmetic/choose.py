"""Choose the settings that a run leaves open: the device micro-batch size, and what stays on the device.

None of them changes the examples of a step, or its result beyond the order of summation. Dropout masks are drawn per
micro-batch, so they depend on its size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from horizon_lm.common.constants import DEVICE_MARGIN
from horizon_lm.common.quantities import format_bytes
from horizon_lm.memory.layout.buffers import buffer_bytes
from horizon_lm.planning.arithmetic.device_memory import device_use, step_activations, weights_of_blocks
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.request import Limit, Machine, Request
from horizon_lm.planning.arithmetic.residency import Residency, choose_residency, fitting_boundaries, head_chunk_tokens
from horizon_lm.planning.arithmetic.step import Step, StepSettings

_ENOUGH_TOKENS = 32 * 1024  # maximum tokens of a device micro-batch; larger micro-batches are no faster


@dataclass(frozen=True, slots=True)
class Choice:
    """A step with all its settings. ``reasons`` explains the choices in sentences for the log."""

    step: Step
    reasons: tuple[str, ...]


def device_room(machine: Machine) -> int | None:
    """Return the device bytes available to a step, or None if device memory is host memory or has no limit."""
    if machine.on_host or not machine.device_limits:
        return None
    room = int(min(limit.bytes for limit in machine.device_limits) * (1 - DEVICE_MARGIN))
    return room - machine.reserved_bytes


def with_device_room(machine: Machine, room: int) -> Machine:
    """Return the machine with this `device_room`."""
    limit = (room + machine.reserved_bytes) / (1 - DEVICE_MARGIN)
    return replace(machine, device_limits=[Limit("less than a step ran out of", math.ceil(limit))])


def choose(outline: ModelOutline, request: Request, machine: Machine) -> Choice:
    """Choose the settings that a request leaves open.

    If no step fits, choose the smallest step; the budgets of the plan then show the deficit.
    """
    room = device_room(machine)
    step, batch_reason = _choose_micro_batch(outline, request, machine, room)
    residency, residency_reason = _choose_residency(step, request, room)
    step = replace(step, settings=step.settings.keeping(residency))
    return Choice(step, (batch_reason, residency_reason))


def _settings(outline: ModelOutline, request: Request, micro_batch: int | None, room: int | None) -> StepSettings:
    """Return the settings of a step with this micro-batch, in which as little stays on the device as the request allows.

    Args:
        outline, request: as in `choose`.
        micro_batch: sequences of a device micro-batch; None for the whole batch at once.
        room: as from `device_room`: bytes, which are negative if less than nothing is left; None for no limit.
    """
    spare = None if room is None else max(0, room)  # None: no limit
    # The compiled code of a whole block cannot be interrupted for its tiles.
    compiled = request.compiled and request.expert_tile is None
    chunk = head_chunk_tokens(spare, outline.layout.vocabulary, outline.compute_bytes, compiled)
    chosen: dict[str, Any] = {
        "device_micro_batch_size": micro_batch,
        "head_chunk_tokens": request.head_chunk_tokens or chunk,
        "compiled": compiled,
        # Without a limit, offloading activation checkpoints would free nothing that is short.
        **Residency(*request.requested_residency(outline.num_blocks, auto_on_device=room is None)).options(),
    }
    # The request's fields, with the chosen ones in their place.
    return StepSettings(**{each.name: getattr(request, each.name) for each in fields(request)} | chosen)


# Micro-batch


def _choose_micro_batch(
    outline: ModelOutline, request: Request, machine: Machine, room: int | None
) -> tuple[Step, str]:
    """Return a step with its micro-batch, and the reason as text.

    The micro-batch is the requested one or, if it is left open, the largest with which the step fits while as little as possible stays on
    the device. If none fits, it is the smallest.
    """
    if request.device_micro_batch_size:
        step = Step(outline, _settings(outline, request, request.device_micro_batch_size, room))
        return step, _describe_batch(step.settings)
    sizes = list(_micro_batch_sizes(outline, request, machine))
    for size in sizes:
        step = Step(outline, _settings(outline, request, size if size < request.rows else None, room))
        batch = _describe_batch(step.settings)
        if _fits(step, machine, room):
            return step, f"{batch}, the largest that fit" if size < sizes[0] else batch
    return step, f"{batch}, which does not fit"


def _describe_batch(settings: StepSettings) -> str:
    """Return a text about the number of examples of a step, and the sizes of its micro-batches."""
    per_device, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    factors = f"{per_device} × accumulation {accumulation}"
    if settings.num_ranks > 1:
        factors += f" × {settings.num_ranks} processes"
    batch = f"batch: {per_device * accumulation * settings.num_ranks} examples/step ({factors})"
    if settings.sequences > 1:
        batch += f" of {settings.sequences} sequences each"
    slices = settings.slices
    return batch + (", one micro-batch" if len(slices) == 1 else f", {len(slices)} micro-batches of {slices[0]}")


def _micro_batch_sizes(outline: ModelOutline, request: Request, machine: Machine) -> Iterator[int]:
    """Yield the sizes of micro-batches to try, largest first; only the batch size if the memory of activations is unknown."""
    if outline.whole_batch_only:
        yield request.rows
        return
    per_device = request.per_device_train_batch_size * request.sequences
    if outline.unknown:
        yield per_device
        return
    most = per_device if machine.on_host else max(1, _ENOUGH_TOKENS // outline.length)
    # The sizes that cut the rows into 1, 2, 3, ... micro-batches, each size once.
    sizes = dict.fromkeys(-(-request.rows // count) for count in range(1, request.rows + 1))
    yield from (size for size in sizes if size <= most)


def _fits(step: Step, machine: Machine, room: int | None) -> bool:
    """Return whether the memory of the step fits. The setting ``device_memory`` is compared by `Plan.buffers`, not here: a
    smaller micro-batch needs no fewer of them.
    """
    if not machine.on_host:
        return room is None or device_use(step).total <= room
    if not machine.host_limits:
        return True
    used = sum(host_bytes(step).values()) + device_use(step).total + machine.process_bytes
    return used <= min(limit.bytes for limit in machine.host_limits)


# Residency


def _choose_residency(step: Step, request: Request, room: int | None) -> tuple[Residency, str]:
    """Return what stays on the device, and the reason as text.

    Args:
        step: the step, with the residency that was requested or, where it is left open, as little as possible.
        request: the request, in which settings may be open.
        room: as from `device_room`.
    """
    num_blocks, requested = step.outline.num_blocks, step.settings.residency
    if step.outline.unknown:
        return requested, "residency on the device is decided with the first batch"
    if request.activation_checkpoints != "auto":
        return requested, _describe_residency(requested, num_blocks)
    if room is None:
        return requested, _describe_residency(requested, num_blocks, "device memory is host memory")
    # The ring for offloading activation checkpoints is counted among the buffers, although it is not needed if all checkpoints stay.
    buffers = sum(buffer_bytes(step.tiled, step.buffer_table, step.buffer_settings()).values())
    left = max(0, room - buffers - step.outline.shared.at(step.settings.rows) - step.image_bytes)
    why = f"{format_bytes(left)} of device memory available"
    needed, weights = step_activations(step), weights_of_blocks(step)
    if request.resident_blocks is not None or request.resident_graphs is not None:  # only the checkpoints are open
        boundaries = fitting_boundaries(num_blocks, requested.graphs, left, needed)
        found = replace(requested, boundaries=requested.graphs if boundaries is None else boundaries)
        return found, _describe_residency(found, num_blocks, why)
    found = choose_residency(left, weights, needed)
    # Resident weights are buffers of the engine, which `device_memory` limits. A resident graph needs its block's weights.
    weights_room = left if request.device_memory is None else max(0, request.device_memory - buffers)
    while found.weights and sum(weights[num_blocks - found.weights :]) > weights_room:
        found = Residency(found.boundaries, found.weights - 1, min(found.graphs, found.weights - 1))
    return found, _describe_residency(found, num_blocks, why)


def _describe_residency(residency: Residency, num_blocks: int, why: str | None = None) -> str:
    """Return a text about where activation checkpoints and weights are, with ``why`` in parentheses."""
    where = "on the device" if residency.boundaries == num_blocks else "in host memory"
    if 0 < residency.boundaries < num_blocks:
        where = f"of the {_last_blocks(residency.boundaries)} of {num_blocks} on the device, the others in host memory"
    parts = [f"activation checkpoints {where}"]
    if residency.weights:
        parts.append(f"weights of the {_last_blocks(residency.weights)} resident (loaded once per step)")
    if residency.graphs:
        parts.append(f"the {_last_blocks(residency.graphs)} not recomputed")
    return "; ".join(parts) + ("" if why is None else f" ({why})")


def _last_blocks(num_blocks: int) -> str:
    return "last block" if num_blocks == 1 else f"last {num_blocks} blocks"
