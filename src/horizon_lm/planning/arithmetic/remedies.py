"""Find the changes of settings with which a run would fit, and state the cost of each change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

from horizon_lm.common.optimizers import OptimizerEntry
from horizon_lm.common.quantities import parse_bytes
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.request import Request

OutlineFor = Callable[..., ModelOutline]
"""Outline the same model again, with another ``length`` or ``mlp_chunk_tokens``."""
_OUTLINED = {
    "max_length": "length",
    "mlp_chunk_tokens": "mlp_chunk_tokens",
}  # settings, and the arguments of `OutlineFor` for them

_SHORTEST_ROWS, _LONG_ROWS = 512, 4096  # tokens
_MOST_CHUNKS = 256  # of a row: each is traced for the plan
_MOST = 3  # maximum number of remedies, and of changes per remedy


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a run's settings.

    Attributes:
        settings: changed settings by their names in a run file; those that a `Request` has are changed in it, too.
        cost: drawback of the change, for the message.
        of_request: fields of a `Request` that follow from them.
    """

    settings: Mapping[str, Any]
    cost: str
    of_request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A set of changes with which the run fits.

    Attributes:
        settings: all changed settings.
        cost: drawbacks of the changes, for the message.
        plan: plan of the changed run.
    """

    settings: Mapping[str, Any]
    cost: str
    plan: Plan


def find_remedies(plan: Plan, outline_for: OutlineFor) -> list[Remedy]:
    """Return up to three smallest sets of changes with which a run fits into memory; empty if no set suffices.

    Sets of up to three changes are tried, then all changes together, without unnecessary ones, then rows of less than half
    their length. No setting helps if the disk is full.
    """
    if not plan.memory_deficit:
        return []
    changes = list(_helpful_changes(plan))
    return (
        _small_remedies(plan, changes, outline_for)
        or _minimal_remedy(plan, changes, outline_for)
        or _minimal_remedy(plan, [*changes, _ONE_ROW], outline_for)
        or _much_shorter_rows(plan, outline_for)
    )


def _small_remedies(plan: Plan, changes: Sequence[Change], outline_for: OutlineFor) -> list[Remedy]:
    """Return the first remedies of one, two and three changes, without remedies that contain all changes of a smaller one."""
    found: dict[frozenset[int], Remedy] = {}  # by the indices of the changes
    for count in range(1, min(_MOST, len(changes)) + 1):
        for chosen in combinations(range(len(changes)), count):
            parts = [changes[i] for i in chosen]
            if len({name for part in parts for name in part.settings}) < sum(len(part.settings) for part in parts):
                continue  # two values of one setting
            if any(smaller <= set(chosen) for smaller in found):
                continue  # a subset suffices
            if (remedy := _remedy_of(plan, parts, outline_for)) is not None:
                found[frozenset(chosen)] = remedy
            if len(found) == _MOST:
                return list(found.values())
    return list(found.values())


def _minimal_remedy(plan: Plan, changes: Sequence[Change], outline_for: OutlineFor) -> list[Remedy]:
    """Return at most one remedy: of the strongest change of each setting, which is its last, all changes that are necessary."""
    parts: list[Change] = []
    for change in reversed(changes):
        if not any(change.settings.keys() & part.settings.keys() for part in parts):
            parts.insert(0, change)
    best = _remedy_of(plan, parts, outline_for)
    # The costliest change is dropped first. A set without it may be a remedy where the whole set is none: a model may not support it.
    for dropped in reversed(parts):
        fewer = [part for part in parts if part is not dropped]
        if (remedy := _remedy_of(plan, fewer, outline_for)) is not None:
            best, parts = remedy, fewer
    return [best] if best else []


def _much_shorter_rows(plan: Plan, outline_for: OutlineFor) -> list[Remedy]:
    """Return at most one remedy for a run of long rows: the longest rows of 2^n tokens, below half of the present length, with which it fits.

    A half is tried by `_shorter_rows`. The remedy also has the changes of other settings without which not even the shortest rows fit.
    """
    length = plan.step.outline.length
    if length <= _LONG_ROWS:
        return []
    settings: Mapping[str, Any] = {}
    cost = "longer examples are truncated"
    longest = _shortened(plan, plan.request, _SHORTEST_ROWS, outline_for)
    if longest.memory_deficit:
        found = find_remedies(longest, partial(outline_for, length=_SHORTEST_ROWS))
        if not found or "max_length" in found[0].settings:  # the shortest rows would have to be still shorter
            return []
        settings, cost, longest = found[0].settings, f"{cost}; {found[0].cost}", found[0].plan
    # Longer rows take more memory, so they are doubled for as long as the run fits.
    tokens = _SHORTEST_ROWS
    while 2 * tokens < length // 2:
        longer = _shortened(plan, longest.request, 2 * tokens, outline_for)
        if longer.memory_deficit:
            break
        tokens, longest = 2 * tokens, longer
    return [Remedy({"max_length": tokens, **settings}, cost, longest)]


def _shortened(plan: Plan, request: Request, tokens: int, outline_for: OutlineFor) -> Plan:
    """Return the plan of a request whose rows are shortened, without times.

    Args:
        plan: the plan before, whose machine is planned for, and whose batches without gradients are shortened, too, if they are longer.
        request: the request of the plan, or one with further changes.
        tokens: the new length of the rows.
        outline_for: outlines the model with another length.
    """
    forwards = tuple(
        replace(each, length=min(before.length, tokens))
        for each, before in zip(request.forwards, plan.request.forwards, strict=True)
    )
    return make_plan(outline_for(length=tokens), replace(request, forwards=forwards), plan.machine, priced=False)


def smallest(plan: Plan) -> Remedy:
    """Return the changes with which the same run takes the fewest bytes per parameter, and its plan; even this plan may not fit."""
    settings: dict[str, Any] = {"precision": "bf16", "moments": "8bit"}
    request = replace(plan.request, **settings, grad_bytes=2)
    for optimizer in _lighter_optimizers(request):  # the last one keeps the fewest bytes
        settings |= optimizer.settings
        request = replace(request, **optimizer.of_request)
    if request.optimizer.updates_in_backward and not request.skips_steps:
        settings |= {"update_in_backward": True, "max_grad_norm": 0}
        request = replace(request, update_in_backward=True)
    return Remedy(settings, "", make_plan(plan.step.outline, request, plan.machine, priced=False))


def _remedy_of(plan: Plan, changes: Sequence[Change], outline_for: OutlineFor) -> Remedy | None:
    """Return these changes as a remedy; None if the run does not fit with them, or its model does not support one of them."""
    settings: dict[str, Any] = {}
    of_request: dict[str, Any] = {}
    for each in changes:
        settings |= each.settings
        of_request |= each.of_request
    same = {name: settings[name] for name in Request.names() if name in settings}
    request = replace(plan.request, **(same | of_request))
    if request.update_in_backward and not request.optimizer.updates_in_backward:
        return None
    try:
        of_outline = {argument: settings[name] for name, argument in _OUTLINED.items() if name in settings}
        changed = make_plan(outline_for(**of_outline), request, plan.machine, priced=False)
    except ConfigError:
        return None
    lacks_matrices = request.optimizer.orthogonalizes and not changed.step.orthogonalized
    if changed.memory_deficit or lacks_matrices:
        return None
    return Remedy(settings, "; ".join(each.cost for each in changes), changed)


def _helpful_changes(plan: Plan) -> Iterator[Change]:
    """Yield changes that may help, cheapest first."""
    on_device = plan.device.deficit or plan.buffers.deficit or plan.machine.on_host
    if on_device:
        yield from _less_at_once(plan)
    if plan.host.deficit:
        yield from _fewer_bytes_per_parameter(plan.request)
    if on_device:
        yield from _shorter_rows(plan)
    yield from _fewer_rows(plan.request)


def _fewer_rows(request: Request) -> Iterator[Change]:
    """Yield a smaller batch."""
    # A smaller batch helps, because block inputs of the whole batch exist between blocks.
    cost = "a quarter of the examples per step, so another learning rate may be needed"
    if request.gradient_accumulation_steps >= 4:
        yield Change({"gradient_accumulation_steps": request.gradient_accumulation_steps // 4}, cost)
    elif request.per_device_train_batch_size >= 4:
        yield Change({"per_device_train_batch_size": request.per_device_train_batch_size // 4}, cost)


_ONE_ROW = Change(
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    "one example per step, so a much smaller learning rate is needed",
)


def _less_at_once(plan: Plan) -> Iterator[Change]:
    """Yield the changes with which less of a batch is on the device at once, and last a larger limit on the engine's device memory."""
    request, micro_batch = plan.request, plan.step.settings.slices[0]
    if request.head == "whole":
        yield Change({"head": "chunked"}, "loss over chunks of tokens, so no logits are returned")
    for size in sorted({max(1, micro_batch // 4), 1}, reverse=True):  # a quarter, and one row
        if size < micro_batch:
            yield Change({"device_micro_batch_size": size}, "more and smaller micro-batches: slightly slower")
    for batch in request.forwards:
        if batch.setting and batch.rows > request.sequences:  # it has more than one example
            size = max(1, batch.rows // request.sequences // 8)
            smaller = replace(batch, rows=size * request.sequences)
            forwards = tuple(smaller if each is batch else each for each in request.forwards)
            cost = "smaller batches in passes without gradients"
            yield Change({batch.setting: size}, cost, {"forwards": forwards})
    keeps_checkpoints = request.activation_checkpoints == "device" and not plan.machine.on_host
    if request.resident_blocks or request.resident_graphs or keeps_checkpoints:
        settings = {"activation_checkpoints": "host", "resident_blocks": 0, "resident_graphs": 0}
        yield Change(settings, "more transfers and recomputation")
    if plan.buffers.deficit:
        needed = f"{-(-plan.buffers.bytes // 2**20)}MiB"
        yield Change({"device_memory": needed}, "more device memory in use", {"device_memory": parse_bytes(needed)})


def _fewer_bytes_per_parameter(request: Request) -> Iterator[Change]:
    """Yield the changes that store a parameter, its moments and its gradient in fewer bytes."""
    moment_bytes = request.optimizer.moment_bytes
    if request.moments == "float32":
        less = moment_bytes("float32") - moment_bytes("bfloat16")
        cost = f"moments in bf16 with stochastic rounding: {less} bytes less per parameter"
        yield Change({"moments": "bfloat16"}, cost)
    if request.moments != "8bit":
        less = moment_bytes(request.moments) - moment_bytes("8bit")
        yield Change({"moments": "8bit"}, f"8-bit moments: {less} bytes less per parameter, but less exact updates")
    if request.precision != "bf16":
        grad_bytes = 2 if request.grad_dtype is None else request.grad_bytes
        less = 2 + request.grad_bytes - grad_bytes  # a weight takes 4 bytes in both other precisions
        cost = f"bf16 weights with stochastic rounding instead of exact fp32 masters: {less} bytes less per parameter"
        yield Change({"precision": "bf16"}, cost, {"grad_bytes": grad_bytes})
    if request.optimizer.updates_in_backward and not (request.update_in_backward or request.skips_steps):
        cost = f"no gradient store: {request.grad_bytes} bytes less per parameter, but no clipping of the global norm"
        yield Change({"update_in_backward": True, "max_grad_norm": 0}, cost)
    yield from _lighter_optimizers(request)


def _lighter_optimizers(request: Request) -> Iterator[Change]:
    """Yield the optimizers with fewer moments than that of the run, the one that leaves the fewest bytes per parameter last."""

    def memory_order(named: tuple[str, OptimizerEntry]) -> tuple[int, bool]:
        """Return the bytes of an optimizer's moments and, to order equal ones, whether it needs all gradients at once beside them."""
        return named[1].moment_bytes(request.moments), not named[1].updates_in_backward

    own, moments, optimizers = request.optimizer, request.moments, request.optimizers.items()
    lighter = [(name, each) for name, each in optimizers if each.moment_bytes(moments) < own.moment_bytes(moments)]
    for name, optimizer in sorted(lighter, key=memory_order, reverse=True):
        held = f"{optimizer.name} instead of {own.name}, with fewer moments: {optimizer.moments_held}"
        cost = f"{held}; its updates differ, so another learning rate is needed"
        yield Change({"optim": name}, cost, {"optimizer": optimizer})


def _shorter_rows(plan: Plan) -> Iterator[Change]:
    """Yield the changes by which a block computes fewer tokens of a sequence at once."""
    length = plan.step.outline.length
    large = max(4096, length // _MOST_CHUNKS)
    chunk_tokens = large if large < length else 1024
    if chunk_tokens < length:
        cost = "feed-forward layers run in chunks of tokens, and again in the backward pass"
        yield Change({"mlp_chunk_tokens": chunk_tokens}, cost)
    if length >= 512:
        half = length // 2
        yield Change({"max_length": half}, "longer examples are truncated")
