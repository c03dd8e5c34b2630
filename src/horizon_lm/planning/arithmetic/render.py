"""Render a plan as text for people and as JSON for programs."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import Disk, write_file
from horizon_lm.common.quantities import (
    Item,
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    listed,
    table_lines,
)
from horizon_lm.planning.arithmetic.budgets import IMAGES
from horizon_lm.planning.arithmetic.items import PLACES, overlaps, speeds, stalls, utilization
from horizon_lm.planning.arithmetic.outline import ImageCosts, ModelOutline
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.plan_file import PlanFile, PlannedImages, PlannedModel, PlannedRun, PlannedStep
from horizon_lm.planning.arithmetic.remedies import Remedy, smallest
from horizon_lm.planning.arithmetic.request import Budget, Limit, Request
from horizon_lm.planning.arithmetic.step_time import SaveTime, StepTime
from horizon_lm.schedule.ops import CAUSE_TITLES
from horizon_lm.schedule.trace import write_chrome

_TOKENS = 1_000_000  # the tokens whose duration is stated if the number of steps is unknown


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the answer of a plan in about five lines: whether it fits, the bytes in each place, and the time."""
    adapters = ", adapters" if plan.step.outline.base_is_frozen else ""
    yield f"{'fits' if plan.fits else 'does not fit'}: {plan.step.outline.name}{adapters}, on {plan.machine.name}"
    for place, budget in plan.budgets.items():
        if place == "device" and plan.machine.on_host:
            yield _row(PLACES[place], "part of host memory")
        elif _is_shown(place, budget):
            yield _row(
                PLACES[place], f"{format_bytes(budget.bytes)}{_of_limit(budget)}{_for_each_process(plan, place)}"
            )
    yield _row("time", _rate_and_time(plan))
    yield from _image_lines(plan)
    yield from (f"note: {note}" for note in (*plan.machine.notes, plan.step.outline.unproven) if note)


def _image_lines(plan: Plan) -> Iterator[str]:
    """Yield the number and the size of images in rows, and notes about them; nothing for rows of text."""
    outline = plan.step.outline
    images = outline.images
    if images is None:
        return
    yield _row("images", _images_text(images))
    if images.tokens > outline.length:
        yield (
            f"note: images take {counted(images.tokens, 'token')} of a row, and max_length is {outline.length:,}, so such rows are rejected; raise "
            "max_length or lower image_max_pixels"
        )


def _images_text(images: ImageCosts) -> str:
    """Return the number of images in a row, what they take, and what is assumed about them."""
    tokens = counted(images.tokens, "token")
    text = f"{images.per_row} a row: {images.patches:,} patches in the tower and {tokens} of the row"
    return f"{text}; {images.note}" if images.note else text


def _row(name: str, text: str) -> str:
    return f"{name:15}{text}"


def _is_shown(place: str, budget: Budget) -> bool:
    """Return whether a place needs any bytes. Buffers are part of the device memory, so they are shown only if they have a limit."""
    return bool(budget.items) and (place != "buffers" or bool(budget.limits))


def _of_limit(budget: Budget) -> str:
    """Return the available bytes of a place as the end of "1.00 GiB of 2.00 GiB"; if they do not suffice, also the name of the limit."""
    if budget.limit is None:
        return ""
    of_limit = f" of {format_bytes(budget.limit.bytes)}"
    return f"{of_limit} ({budget.limit.name}), {format_bytes(budget.deficit)} short" if budget.deficit else of_limit


def _for_each_process(plan: Plan, place: str) -> str:
    """Return " for each of 8 processes" if the processes of a machine share the place; empty otherwise."""
    num_processes = plan.machine.num_processes
    return f" for each of {num_processes} processes" if place == "host" and num_processes > 1 else ""


def _rate_and_time(plan: Plan) -> str:
    """Return the rate of a plan, and the time of all steps or of a million tokens; or why they are unknown."""
    time, steps = plan.time, plan.request.num_steps
    if time is None:
        return _why_unknown(plan)
    step, rate, _operations = speeds(time)
    if time.run_seconds is not None and steps is not None:
        whole, seconds = counted(steps, "step"), time.run_seconds
    else:
        whole, seconds = "a million tokens", _TOKENS / time.tokens_per_second
    return f"{rate.text}, {step.text}; {whole}: {format_seconds(seconds)}"


def _why_unknown(plan: Plan) -> str:
    """Return why a plan has no times."""
    if plan.step.outline.unknown:
        return "unknown, as the model cannot be tried without weights"
    if plan.request.num_ranks > 1:
        return "the links between the GPUs are unknown; name a profile with --device"
    return "unknown, as this machine was not measured; run horizon-lm doctor"


def detail_lines(plan: Plan) -> Iterator[str]:
    """Yield the items of all places, the settings that were chosen, and the times of a step."""
    yield from _model_lines(plan)
    yield f"on {plan.machine.name}"
    for place, budget in plan.budgets.items():
        if _is_shown(place, budget):
            yield from ("", *_budget_lines(place, budget, plan.machine.num_processes if place == "host" else 1))
    yield from ("", "settings", *(f"  {reason}" for reason in plan.reasons), "")
    if plan.time is None or plan.machine.hardware is None:
        yield f"time: {_why_unknown(plan)}"
        return
    yield f"time, simulated with the rates of {plan.machine.hardware.name}{_links(plan)}"
    yield from (f"  {line}" for line in _time_lines(plan, plan.time))


def _model_lines(plan: Plan) -> Iterator[str]:
    """Yield the size of the model and of a step, the passes that load a part of the experts, and the caches of sample prompts."""
    outline, request = plan.step.outline, plan.request
    active = f" ({format_count(outline.active)} active)" if outline.active < 0.8 * outline.layout.num_parameters else ""
    yield (
        f"{outline.name}: {format_count(outline.layout.num_parameters)} parameters{active} in {counted(outline.num_blocks, 'block')}; "
        f"{request.precision}, {request.rows} × {outline.length:,} tokens per step{_and_each_process(request)}"
    )
    if outline.routed_tokens and request.num_ranks == 1:
        yield (
            f"passes without gradients of at most {counted(outline.routed_tokens, 'token')}, as in generation, stream those of the "
            f"{outline.experts} experts that their tokens are routed to; larger ones stream all"
        )
    for batch in request.forwards:
        if batch.kept_bytes:
            rows = counted(batch.rows, "row")
            yield f"key-value cache of sample_prompts: {format_bytes(batch.kept_bytes)} for {rows} of {batch.length:,} tokens"


def _and_each_process(request: Request) -> str:
    """Return the end of "... tokens per step and process; 4 processes share the model". Empty for one process."""
    ranks, copies = request.num_ranks, request.num_replicas
    if ranks == 1:
        return ""
    if copies == 1:
        return f" and process; {ranks} processes share the model"
    return f" and process; {copies} copies of the model, shared by {request.shard.count} processes each"


def _budget_lines(place: str, budget: Budget, num_processes: int) -> Iterator[str]:
    """Yield the title, the items and the total of a place, for one of the processes that share it."""
    of_each, of_all = "", []
    if num_processes > 1:
        of_each = " of each process"
        of_all = [Item(f"all {num_processes} processes of a machine", budget.bytes * num_processes, format_bytes)]
    yield PLACES[place] + of_each
    yield from table_lines([*budget.table, Item("total", budget.bytes, format_bytes, _verdict(budget)), *of_all])


def _verdict(budget: Budget) -> str:
    """Return whether a place has the needed bytes, and how many are left or missing; empty if it has no limit."""
    if budget.limit is None:
        return ""
    left = budget.limit.bytes - budget.bytes
    verdict = f"fits, {format_bytes(left)} left" if left >= 0 else f"DOES NOT FIT, {format_bytes(-left)} short"
    return f"of {format_bytes(budget.limit.bytes)} ({budget.limit.name}): {verdict}"


def _time_lines(plan: Plan, time: StepTime) -> Iterator[str]:
    """Yield the times of a step, of a checkpoint, of loading the weights and of the run."""
    on_each = " per GPU" if plan.request.num_ranks > 1 else ""
    rates = ", ".join(item.text for item in speeds(time))
    yield f"{rates}{on_each}; bottleneck: {CAUSE_TITLES[time.limited_by]}"
    notable = [item for item in stalls(time.exposed_seconds) if item.value > 5e-4 * time.seconds]
    yield f"compute stalls: {listed(notable) or 'none'}"
    yield f"stream utilization: {listed(utilization(time.busy))}"
    for item in overlaps(time):
        of_this = f"{on_each}; this run has {plan.step.tokens:,}" if item.value > 1 else ""
        yield f"{item.name} fully overlapped {item.text}{of_this}"
    if plan.save is not None:
        yield (
            f"a checkpoint: {format_bytes(plan.save.num_bytes)} in {format_seconds(plan.save.seconds)}, while training goes on; "
            f"the steps lose {format_duration(plan.save.stall_seconds)}{_save_advice(plan.save, time, plan.request)}"
        )
    if plan.load_seconds is not None:
        yield f"loading the weights: {format_seconds(plan.load_seconds)}"
    if time.run_seconds is not None:
        yield f"all {plan.request.num_steps:,} steps: {format_seconds(time.run_seconds)}"


def _links(plan: Plan) -> str:
    """Return the rates of the links between GPUs and machines; empty for one GPU."""
    links = plan.machine.interconnect
    if links is None:
        return ""
    within = (
        f"{links.peer / 1e9:,.0f} GB/s between its GPUs" if links.peer else "GPUs reach each other through host memory"
    )
    parts = [within] if links.gpus > 1 else []
    if links.machines > 1:
        parts.append(f"{links.network / 1e9:,.0f} GB/s between machines")
    return "; " + ", ".join(parts)


_SAVE_SHARE = 0.02  # of a run's time that checkpoints may cost without a remark


def _save_advice(save: SaveTime, time: StepTime, request: Request) -> str:
    """Return the advice to save less often if checkpoints cost more than `_SAVE_SHARE` of the run's time; empty otherwise."""
    save_steps = math.ceil(save.stall_seconds / (_SAVE_SHARE * time.seconds))
    num_regular = request.saves.num - request.saves.of_best
    # n regular saves cut the steps of the run into n + 1 intervals: their length is the present ``save_steps``.
    if request.num_steps is None or not num_regular or save_steps <= request.num_steps / (num_regular + 1):
        return ""
    return f"; save_steps: {save_steps} would keep that below {_SAVE_SHARE:.0%} of the time"


def summary_lines(plan: Plan) -> Iterator[str]:
    """Yield the summary of a plan that a run logs before it starts."""
    yield from plan.reasons
    if (images := plan.step.outline.images) is not None:
        yield f"images: {_images_text(images)}"
    for place, budget in plan.budgets.items():
        if budget.items and budget.limit is not None:
            planned = f"{format_bytes(budget.bytes)} planned{_for_each_process(plan, place)}"
            yield f"{PLACES[place]}: {planned}, {_available(budget.limit)}"
    if plan.time is not None and plan.time.run_seconds is not None:
        step, *_rates = speeds(plan.time)
        yield (
            f"expected: {step.text}, bottleneck: {CAUSE_TITLES[plan.time.limited_by]}; "
            f"{format_seconds(plan.time.run_seconds)} for all steps, without evaluation, sample prompts and exports"
        )


def deficit_lines(plan: Plan) -> Iterator[str]:
    """Yield the needed, available and missing bytes of each place that is too small."""
    for place, budget in plan.lacking.items():
        assert budget.limit is not None
        short = f"{format_bytes(budget.deficit)} short ({budget.deficit:,} bytes)"
        yield f"{place}: {format_bytes(budget.bytes)} needed, {_available(budget.limit)}, {short}"


def _available(limit: Limit) -> str:
    return f"{format_bytes(limit.bytes)} available ({limit.name})"


def remedy_lines(plan: Plan, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield the changes that would make a run fit."""
    yield from plan.problems
    if plan.disk.deficit or plan.download.deficit:
        yield "Make room on the disk, or choose another output_dir."
    if plan.memory_deficit and not remedies:
        yield "No settings make it fit: use a smaller model (horizon-lm plan --largest lists those that fit) or more memory."
    if plan.memory_deficit and all("use_peft" in each.settings for each in remedies):  # full training does not fit
        yield from _smallest_plan_lines(plan)
    if remedies:
        yield "It would fit with" if len(remedies) == 1 else "It would fit with any of"
    for remedy in remedies:
        memory = {"host": remedy.plan.host, "device": remedy.plan.device}
        sizes = listed(
            Item(PLACES[place], budget.bytes, format_bytes) for place, budget in memory.items() if budget.items
        )
        yield f"  {_arguments(remedy)}\n    {sizes}; cost: {remedy.cost}"


def _smallest_plan_lines(plan: Plan) -> Iterator[str]:
    """Yield a sentence about the run with the fewest bytes per parameter, if even that does not fit and the change saves host memory."""
    least = smallest(plan)
    needed = " and ".join(
        f"{format_bytes(budget.bytes)} of {PLACES[place]}"
        for place, budget in least.plan.lacking.items()
        if place in ("host", "device")
    )
    if needed and least.plan.host.bytes < plan.host.bytes:
        yield f"Even with {_arguments(least)} it would take {needed}."


def _arguments(remedy: Remedy) -> str:
    return " ".join(f"--{name} {setting_text(value)}" for name, value in remedy.settings.items())


def setting_text(value: Any) -> str:
    """Return a value as written in a run file."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {setting_text(each)}" for key, each in value.items()) + "}"
    return str(value)


def plan_as_json(plan: Plan, device: str, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """Return everything in a plan as JSON values, with the run's setting ``device``."""
    machine, time = plan.machine, plan.time
    step = (
        None if time is None else PlannedStep(**{each.name: getattr(time, each.name) for each in fields(PlannedStep)})
    )
    content = PlanFile(
        fits=plan.fits, model=_model(plan.step.outline), run=_run(plan, device), images=_images(plan),
        host=plan.host, device=plan.device, buffers=plan.buffers, disk=plan.disk, download=plan.download,
        hardware=_as_dict(machine.hardware), interconnect=_as_dict(machine.interconnect), save=_as_dict(plan.save),
        step=step, memory=plan.curve, problems=list(plan.problems),
        remedies=[{"settings": dict(each.settings), "cost": each.cost, "bytes": each.plan.bytes} for each in remedies],
    )  # fmt: skip
    return asdict(content)


def _as_dict(part: Any) -> dict[str, Any] | None:
    """Return a dataclass as a dict; None for None."""
    return None if part is None else asdict(part)


def _model(outline: ModelOutline) -> PlannedModel:
    layout = outline.layout
    return PlannedModel(
        outline.name, layout.num_parameters, outline.active, outline.num_blocks, layout.hidden, layout.vocabulary
    )


def _run(plan: Plan, device: str) -> PlannedRun:
    outline, request, settings = plan.step.outline, plan.request, plan.step.settings
    return PlannedRun(
        rows=request.rows, length=outline.length, tokens=plan.step.tokens, num_steps=request.num_steps,
        num_ranks=request.num_ranks, dp_shard_size=request.shard.count, processes_per_machine=plan.machine.num_processes,
        precision=request.precision, device=device, reasons=list(plan.reasons),
        settings={**settings.choices(), "slices": settings.slices, "attn_implementation": outline.attention},
    )  # fmt: skip


def _images(plan: Plan) -> PlannedImages | None:
    """Return the images of rows; None for rows of text."""
    images = plan.step.outline.images
    if images is None:
        return None
    in_host = sum(item.bytes for item in plan.host.items if item.name == IMAGES)
    return PlannedImages(images.per_row, images.patches, images.tokens, plan.step.image_bytes, in_host, images.note)


def write_plan(plan: Plan, device: str, folder: Path) -> None:
    """Write ``plan.json`` and, for a simulated step, ``predicted_trace.json`` into a run's folder."""
    write_file(Disk(), folder / "plan.json", (json.dumps(plan_as_json(plan, device), indent=2) + "\n").encode())
    if plan.time is None:
        return
    curve = plan.curve
    assert curve is not None
    # If the device computes in host memory, a trace counts only the engine's buffers: nothing reports other allocations.
    buffers = plan.buffers.bytes
    samples = [
        (at, {"device bytes": buffers if plan.machine.on_host else device_bytes, "host bytes": host_bytes})
        for at, device_bytes, host_bytes in zip(curve.seconds, curve.device, curve.host, strict=True)
    ]
    write_chrome(folder / "predicted_trace.json", plan.time.spans, samples, [(1, 0.0, plan.time.seconds)])
