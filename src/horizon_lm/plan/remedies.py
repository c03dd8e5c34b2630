"""What to change in a run that does not fit, and what each change costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.plan.outline import ModelOutline
from horizon_lm.plan.plan import Plan, make_plan
from horizon_lm.plan.request import Machine, Request
from horizon_lm.quantities import parse_bytes

OutlineFor = Callable[..., ModelOutline]
"""Another outline of the same model: with ``length`` or ``mlp_chunk_tokens``."""

_MOST = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a run's settings.

    Attributes:
        settings: by name, as a run file has them.
        cost: what is given up, for people.
        of_request: the same change of a `Request`.
        of_outline: and of the model's outline.
    """

    settings: Mapping[str, Any]
    cost: str
    of_request: Mapping[str, Any]
    of_outline: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes with which the run fits.

    Attributes:
        settings: all of them.
        cost: what is given up, for people.
        plan: with these changes.
    """

    settings: Mapping[str, Any]
    cost: str
    plan: Plan


def find_remedies(plan: Plan, outline_for: OutlineFor) -> list[Remedy]:
    """The smallest sets of changes, up to three, with which a run would fit into memory; none if there is none.

    Sets of up to three changes are tried; where none helps, all changes together, without those that are not needed.
    Disk space has no setting: who lacks that has to make room.
    """
    if not plan.memory_deficit:
        return []
    changes = list(_changes(plan))
    found: list[tuple[frozenset[int], Remedy]] = []
    for count in range(1, min(3, len(changes)) + 1):
        for chosen in combinations(range(len(changes)), count):
            parts = [changes[i] for i in chosen]
            if len({name for part in parts for name in part.settings}) < sum(len(part.settings) for part in parts):
                continue  # two values for one setting
            if any(smaller <= set(chosen) for smaller, _ in found):
                continue  # less is enough
            try:
                remedy = _try(plan.request, plan.machine, parts, outline_for)
            except ConfigError:  # a change that this model does not know
                continue
            if not remedy.plan.memory_deficit:
                found.append((frozenset(chosen), remedy))
            if len(found) == _MOST:
                return [remedy for _, remedy in found]
    return (
        [remedy for _, remedy in found]
        or _all_that_is_needed(plan, changes, outline_for)
        or _all_that_is_needed(plan, [*changes, _one_row()], outline_for)
    )


def _all_that_is_needed(plan: Plan, changes: Sequence[Change], outline_for: OutlineFor) -> list[Remedy]:
    """The strongest change of each setting, without those that the others make needless, those that cost most first."""
    parts: list[Change] = []
    for change in reversed(changes):
        if not any(change.settings.keys() & part.settings.keys() for part in parts):
            parts.insert(0, change)
    best: Remedy | None = None
    for without in [None, *reversed(parts)]:
        fewer = [part for part in parts if part is not without]
        try:
            remedy = _try(plan.request, plan.machine, fewer, outline_for)
        except ConfigError:
            remedy = None
        if remedy is not None and not remedy.plan.memory_deficit:
            best, parts = remedy, fewer
    return [best] if best else []


def smallest(plan: Plan) -> Remedy:
    """The same run with the fewest bytes per parameter that there are, whether it fits or not."""
    settings: dict[str, Any] = {"precision": "bf16", "moments": "8bit"}
    in_backward = not plan.request.skips_steps
    if in_backward:
        settings |= {"update_in_backward": True, "max_grad_norm": 0}
    less = replace(plan.request, precision="bf16", grad_bytes=2, moments="8bit", update_in_backward=in_backward)
    return Remedy(settings, "", make_plan(plan.step.outline, less, plan.machine, priced=False))


def _try(request: Request, machine: Machine, parts: list[Change], outline_for: OutlineFor) -> Remedy:
    changed: dict[str, Any] = {}
    outlined: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for part in parts:
        changed |= part.of_request
        outlined |= part.of_outline
        settings |= part.settings
    plan = make_plan(outline_for(**outlined), replace(request, **changed), machine, priced=False)
    return Remedy(settings, "; ".join(part.cost for part in parts), plan)


def _changes(plan: Plan) -> Iterator[Change]:
    """Changes that may help, those that cost least first."""
    on_device = plan.device.deficit or plan.buffers.deficit or plan.machine.on_host
    if on_device:
        yield from _less_at_once(plan)
    if plan.host.deficit:
        yield from _fewer_bytes_per_parameter(plan.request)
    if on_device:
        yield from _shorter_rows(plan)
    yield from _fewer_rows(plan.request)


def _fewer_rows(request: Request) -> Iterator[Change]:
    """Hidden states of the whole batch wait between blocks."""
    cost = "a quarter of the rows a step, so another learning rate may be needed"
    if request.gradient_accumulation_steps >= 4:
        yield _plain(cost, gradient_accumulation_steps=request.gradient_accumulation_steps // 4)
    elif request.per_device_train_batch_size >= 4:
        yield _plain(cost, per_device_train_batch_size=request.per_device_train_batch_size // 4)


def _one_row() -> Change:
    cost = "one row a step, so a much smaller learning rate is needed"
    return _plain(cost, per_device_train_batch_size=1, gradient_accumulation_steps=1)


def _plain(cost: str, **settings: Any) -> Change:
    """A change whose settings have the same names in a run and in a request."""
    return Change(settings, cost, settings, {})


def _less_at_once(plan: Plan) -> Iterator[Change]:
    request, step = plan.request, plan.step
    if request.head == "whole":
        yield _plain("the loss over chunks of tokens; no logits are returned", head="chunked")
    for size in sorted({max(1, step.settings.slices[0] // 4), 1}, reverse=True):
        if size < step.settings.slices[0]:
            yield _plain("more, smaller slices: a little slower", device_micro_batch_size=size)
    for index, batch in enumerate(request.forwards):
        if batch.setting and batch.rows > request.sequences:
            size = max(1, batch.rows // request.sequences // 8)
            others = list(request.forwards)
            others[index] = replace(batch, rows=size * request.sequences)
            cost = "fewer rows at once where there is no gradient"
            yield Change({batch.setting: size}, cost, {"forwards": tuple(others)}, {})
    if (
        request.resident_blocks
        or request.resident_graphs
        or (request.activation_checkpoints == "device" and not plan.machine.on_host)
    ):
        settings = {"activation_checkpoints": "host", "resident_blocks": 0, "resident_graphs": 0}
        yield Change(settings, "more transfers and recomputation", settings, {})
    if plan.buffers.deficit:
        needed = f"{-(-plan.buffers.num_bytes // 2**20)}MiB"
        cost = "more device memory is taken"
        yield Change({"device_memory": needed}, cost, {"device_memory": parse_bytes(needed)}, {})


def _fewer_bytes_per_parameter(request: Request) -> Iterator[Change]:
    if request.moments == "float32":
        yield _plain("moments in bf16, stochastically rounded: 4 bytes per parameter less", moments="bfloat16")
    if request.moments != "8bit":
        yield _plain("moments in 8 bits: 6 bytes per parameter less, another rounding of the update", moments="8bit")
    if request.precision != "bf16":
        less = 4 if request.precision == "float32" else 2
        cost = f"bf16 weights with stochastic rounding instead of an exact fp32 master: {less} bytes per parameter less"
        grad_bytes = request.grad_bytes if request.has_grad_dtype else 2
        yield Change({"precision": "bf16"}, cost, {"precision": "bf16", "grad_bytes": grad_bytes}, {})
    if not request.update_in_backward and not request.skips_steps:
        settings = {"update_in_backward": True, "max_grad_norm": 0}
        cost = "no gradient store: 2 bytes per parameter less, no clipping by the global norm"
        yield Change(settings, cost, {"update_in_backward": True}, {})


def _shorter_rows(plan: Plan) -> Iterator[Change]:
    length = plan.step.outline.length
    for tokens in (4096, 1024):
        if length > tokens:
            cost = "feed-forward layers computed once more, in chunks of tokens"
            yield Change({"mlp_chunk_tokens": tokens}, cost, {}, {"mlp_chunk_tokens": tokens})
            break
    if length >= 512:
        half = length // 2
        yield Change({"max_length": half}, "rows lose what is beyond", {}, {"length": half})
