"""The settings that a run leaves open: how many rows are on the device at once, and what stays there.

None of them changes which rows form a step, or the result beyond the order of summation; but draws of dropout follow the
micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from horizon_lm.constants import DEVICE_MARGIN
from horizon_lm.plan.device_memory import device_use, step_working, weights_of_blocks
from horizon_lm.plan.memory import device_buffers, host_bytes
from horizon_lm.plan.outline import ModelOutline
from horizon_lm.plan.request import Machine, Request
from horizon_lm.plan.residency import Residency, head_chunk_tokens, spend
from horizon_lm.plan.step import Step, StepSettings
from horizon_lm.quantities import format_bytes

_ENOUGH_TOKENS = 32 * 1024  # on the device at once; more gain nothing


@dataclass(frozen=True, slots=True)
class Choice:
    """A step with all its settings, and why they are so. ``reasons`` are sentences for people."""

    step: Step
    reasons: tuple[str, ...]


def device_room(request: Request, machine: Machine) -> int | None:
    """Bytes that a step may take on the device; None where its memory is the host's, and not limited for itself."""
    if machine.on_host or not machine.device_limits:
        return None
    room = int(min(limit.num_bytes for limit in machine.device_limits) * (1 - DEVICE_MARGIN))
    return room - machine.device_context_bytes - machine.scratch_bytes


def choose(outline: ModelOutline, request: Request, machine: Machine) -> Choice:
    """Fill in what a request leaves open, as far as there is room for it.

    Where nothing fits, the smallest choice is made, and the plan's budgets say by how much it does not.
    """
    room = device_room(request, machine)
    step, why_rows = _choose_rows(outline, request, machine, room)
    residency, why_there = _choose_residency(step, request, room)
    step = replace(step, settings=replace(step.settings, residency=residency))
    return Choice(step, (why_rows, why_there))


def _settings(outline: ModelOutline, request: Request, micro_batch: int | None, room: int | None) -> StepSettings:
    spare = None if room is None else max(0, room)
    chunk = request.head_chunk_tokens or head_chunk_tokens(spare, outline.sizes.vocabulary)
    return StepSettings(
        rows=request.rows,
        micro_batch=micro_batch,
        chunked_head=request.head == "chunked",
        head_chunk_tokens=chunk,
        residency=_smallest_residency(outline, request, room),
        **request.given,
    )


# Rows


def _choose_rows(outline: ModelOutline, request: Request, machine: Machine, room: int | None) -> tuple[Step, str]:
    """The most rows at once that fit, while everything waits in host memory."""
    per_device, rows = request.per_device_train_batch_size, request.rows
    step_is = f"{rows} rows a step = {per_device} x {request.gradient_accumulation_steps}"
    step_is += "; " if request.sequences == 1 else f" x {request.sequences}, a row for each answer; "
    wanted = [request.device_micro_batch_size] if request.device_micro_batch_size else None
    sizes = wanted or list(_sizes(outline, request, machine))
    for size in sizes:
        micro_batch = size if wanted or size < rows else None
        step = Step(outline, _settings(outline, request, micro_batch, room))
        if _fits(step, request, machine, room):
            break
    else:
        step = Step(outline, _settings(outline, request, sizes[-1] if wanted or sizes[-1] < rows else None, room))
    slices = len(step.settings.slices)
    how = "runs as one slice" if slices == 1 else f"runs as {slices} slices of {step.settings.slices[0]}"
    if wanted:
        return step, f"{step_is}{how}, as device_micro_batch_size says"
    if not _fits(step, request, machine, room):
        return step, f"{step_is}{how}, and even that does not fit"
    if size < sizes[0]:
        return step, f"{step_is}{how}, the most that fits"
    return step, f"{step_is}{how}"


def _sizes(outline: ModelOutline, request: Request, machine: Machine) -> Iterator[int]:
    """Numbers of rows to try, the largest first. Where activations are not known, it is the run that has to know."""
    per_device = request.per_device_train_batch_size * request.sequences
    if outline.unknown:
        yield per_device
        return
    most = per_device if machine.on_host else max(1, _ENOUGH_TOKENS // outline.length)
    before = request.rows + 1
    for count in range(1, request.rows + 1):
        size = -(-request.rows // count)
        if size <= most and size < before:
            before = size
            yield size


def _fits(step: Step, request: Request, machine: Machine, room: int | None) -> bool:
    """Whether there is room for so many rows at once. What ``device_memory`` limits does not depend on them."""
    needed = device_use(step).total
    if machine.on_host and machine.host_limits:
        kept = host_bytes(step.outline.sizes, step.outline.trained, step.host_settings())
        held = sum(kept.values()) + machine.process_bytes
        return held + needed <= min(limit.num_bytes for limit in machine.host_limits)
    return room is None or needed <= room


# Residency


def _smallest_residency(outline: ModelOutline, request: Request, room: int | None) -> Residency:
    """What is asked for; nothing more than that where device memory is scarce."""
    num_blocks = outline.num_blocks
    held = min(request.resident_blocks or 0, num_blocks)
    graphs = min(request.resident_graphs or 0, held)
    if isinstance(request.activation_checkpoints, int):
        return Residency(max(graphs, min(request.activation_checkpoints, num_blocks)), held, graphs)
    on_device = request.activation_checkpoints == "device" or (
        request.activation_checkpoints == "auto" and room is None
    )
    return Residency(num_blocks if on_device else graphs, held, graphs)


def _choose_residency(step: Step, request: Request, room: int | None) -> tuple[Residency, str]:
    num_blocks, settled = step.outline.num_blocks, step.settings.residency
    if step.outline.unknown:
        return settled, "what stays on the device is decided when the first batch is there"
    if request.activation_checkpoints != "auto":
        return settled, _describe(settled, num_blocks, "as the settings say")
    if room is None:
        return settled, _describe(settled, num_blocks, "device memory is host memory")
    # Buffers as they are when no boundary stays; the ring for boundaries is left out once all of them do.
    buffers = sum(device_buffers(step.outline.sizes, step.buffer_settings(), step.outline.trained).values())
    left = max(0, room - buffers - step.outline.shared.at(step.settings.rows))
    why = f"{format_bytes(left)} of device memory are left for it"
    needed, weights = step_working(step), weights_of_blocks(step)
    if request.resident_blocks is not None or request.resident_graphs is not None:
        fitting = (n for n in range(num_blocks, 0, -1) if needed.most(n, settled.graphs) <= left)
        boundaries = max(settled.graphs, next(fitting, 0))
        return replace(settled, boundaries=boundaries), _describe(
            replace(settled, boundaries=boundaries), num_blocks, why
        )
    found = spend(left, weights, needed)
    weights_room = left if request.device_memory is None else max(0, request.device_memory - buffers)
    while found.weights and sum(weights[num_blocks - found.weights :]) > weights_room:
        found = Residency(found.boundaries, found.weights - 1, min(found.graphs, found.weights - 1))
    return found, _describe(found, num_blocks, why)


def _describe(residency: Residency, num_blocks: int, why: str) -> str:
    where = "on the device" if residency.boundaries == num_blocks else "in host memory"
    if 0 < residency.boundaries < num_blocks:
        where = (
            f"on the device for the last {residency.boundaries} of {num_blocks} blocks, in host memory for the others"
        )
    parts = [f"boundaries {where}"]
    if residency.weights:
        parts.append(f"weights of the last {residency.weights} blocks stay, and move once a step")
    if residency.graphs:
        parts.append(f"the last {residency.graphs} are not computed again")
    return f"{'; '.join(parts)}: {why}"
