"""Whether a model's loss may be computed over chunks of tokens: found by computing it both ways, over a few tokens.

A model's own forward runs from the hidden states on, with stand-ins for everything before. Its loss over all tokens must
be the sum of its losses over chunks of them; then the same is done with real hidden states in training.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.model.parts import ModelParts
from horizon_lm.model.places import in_place
from horizon_lm.schedule.ops import OUTER

IGNORED = -100  # label of a token that is not trained, as in torch.nn.functional.cross_entropy
_ROWS, _LENGTH, _CHUNK = 2, 5, 3
_TOLERANCE = 1e-5
AUXILIARY = ("output_router_logits",)  # arguments that make a forward add to its loss what is not the head's


@dataclass(frozen=True, slots=True)
class ChunkedPath:
    """How a model goes from hidden states to its loss, token by token.

    Attributes:
        trunk: the module that the model's forward calls for hidden states.
        norm_is_last: the trunk ends with the final norm, so that it can be left to the chunks, too.
        loss_function: what the model computed its loss with when this was found.
    """

    trunk: nn.Module
    norm_is_last: bool
    loss_function: Any


def find_chunked_path(parts: ModelParts) -> ChunkedPath | str:
    """Return how a model's loss is computed in chunks, or why it cannot be, in a few words."""
    if type(parts.head) is not nn.Linear:
        return f"the head is a {type(parts.head).__name__}, not a plain Linear"
    reason = "its forward does not call a decoder"
    for trunk in _trunks(parts):
        with torch.random.fork_rng(devices=[]), _outer_leaves(parts) as outer:
            try:
                reason = _difference(parts, trunk, outer)
            except Exception as error:  # foreign code, given less than it wants
                reason = f"its loss cannot be computed from hidden states alone ({type(error).__name__})"
        if not reason:
            return ChunkedPath(trunk, _norm_is_last(parts, trunk), parts.model.loss_function)
    return reason


class Decoded:
    """What a trunk returns, whatever its class: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states in what a trunk returned."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden


@contextmanager
def forwards(replaced: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, other functions run in the place of these modules' forwards."""
    before = {module: module.__dict__.get("forward") for module in replaced}
    for module, forward in replaced.items():
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own  # type: ignore[method-assign]


def _trunks(parts: ModelParts) -> list[nn.Module]:
    """Modules that a model's forward may call for hidden states, the outermost first."""
    base = getattr(parts.model, getattr(parts.model, "base_model_prefix", "") or "_", None)
    is_trunk = isinstance(base, nn.Module) and base is not parts.model
    contains = is_trunk and any(module is parts.decoder for module in base.modules())  # type: ignore[union-attr]
    return [base, parts.decoder] if contains and base is not parts.decoder else [parts.decoder]  # type: ignore[list-item]


@contextmanager
def _outer_leaves(parts: ModelParts) -> Iterator[list[torch.Tensor]]:
    """Inside, parameters outside of blocks, table and head are small random leaves in fp32 on the host."""
    refs = parts.units[OUTER]
    leaves = [torch.randn(ref.param.shape).mul_(0.1).requires_grad_() for ref in refs]
    with in_place((m, a, leaf) for ref, leaf in zip(refs, leaves, strict=True) for m, a in ref.places):
        yield leaves


def _difference(parts: ModelParts, trunk: nn.Module, outer: list[torch.Tensor]) -> str:
    """Return what differs between the loss of all tokens and that of chunks; empty if nothing does."""
    model, forward = parts.model, type(parts.model).forward
    accepted = inspect.signature(forward).parameters
    vocabulary = parts.sizes().vocabulary
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((_ROWS, _LENGTH, parts.head_width), generator=generator).requires_grad_()
    columns = min(8, parts.head_width)
    weight = torch.randn((vocabulary, columns), generator=generator)
    ids = torch.randint(min(vocabulary, 1000), (_ROWS, _LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2] = labels[1, :2] = IGNORED
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    trained = (shifted.reshape(-1) != IGNORED).nonzero().squeeze(1)
    options = {"use_cache": False} | {name: False for name in AUXILIARY if name in accepted}

    def run(states: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], **arguments: Any) -> Any:
        replaced: dict[nn.Module, Callable[..., Any]] = {trunk: lambda *a, **k: Decoded(states), parts.head: logits}
        with forwards(replaced), torch.enable_grad():
            return forward(model, **arguments, **options)

    def project(states: torch.Tensor) -> torch.Tensor:
        return F.linear(states[..., :columns], weight)

    # As the engine calls it first: with no label, and one row of logits.
    nothing = labels.new_full((1, 1), IGNORED)
    count = len(trained)
    empty = run(
        hidden, lambda states: states.new_zeros((1, 1, vocabulary)), input_ids=ids,
        labels=nothing, shift_labels=nothing, num_items_in_batch=count,
    )  # fmt: skip
    if float(empty.loss.detach()) != 0:
        return "its loss is not only that of labels"

    whole = run(hidden, project, input_ids=ids, labels=labels)
    used = torch.autograd.grad(whole.loss, outer, allow_unused=True, retain_graph=True) if outer else ()
    if any(grad is not None for grad in used):
        return "it has layers with weights between its decoder and its loss"
    (expected,) = torch.autograd.grad(whole.loss, hidden)
    got, loss = torch.zeros_like(expected).view(-1, expected.shape[-1]), 0.0
    flat = hidden.detach().view(-1, hidden.shape[-1])
    for index in trained.split(_CHUNK):
        chunk = flat[index][None].requires_grad_()
        target = shifted.reshape(-1)[index][None]
        part = run(chunk, project, labels=target, shift_labels=target, num_items_in_batch=count)
        got[index] = torch.autograd.grad(part.loss, chunk)[0][0]
        loss += float(part.loss.detach())
        logits = run(chunk, project).logits
        if not torch.allclose(logits[0], whole.logits.detach().flatten(0, 1)[index], rtol=_TOLERANCE, atol=_TOLERANCE):
            return "its logits depend on more than a token's hidden state"
    if abs(loss - float(whole.loss.detach())) > _TOLERANCE * max(1.0, abs(loss)):
        return "its loss is not the sum over the next tokens' losses"
    if (got.view_as(expected) - expected).norm() > _TOLERANCE * expected.norm():
        return "its loss is not the sum over the next tokens' losses"
    return ""


def _norm_is_last(parts: ModelParts, trunk: nn.Module) -> bool:
    """Return whether a trunk gives what its final norm makes of what its last block gives."""
    norm = parts.final_norm
    if norm is None:
        return False
    ids = torch.zeros((1, _LENGTH), dtype=torch.long)
    width = next(iter(norm.parameters())).shape[-1]
    states = torch.randn((1, _LENGTH, parts.sizes().hidden))
    for shape in (lambda t: t, lambda t: (t,), lambda t: (t, None), lambda t: (t, None, None)):
        seen: list[torch.Tensor] = []
        made: list[torch.Tensor] = []
        given: list[torch.Tensor] = []

        def normalise(hidden: torch.Tensor, seen: Any = seen, made: Any = made) -> torch.Tensor:
            seen.append(hidden)
            made.append(torch.randn(*hidden.shape[:-1], width))
            return made[-1]

        def compute(*args: Any, given: Any = given, shape: Any = shape, **kwargs: Any) -> Any:
            given.append(args[0] if args else kwargs["hidden_states"])
            return shape(given[-1])

        replaced: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(parts.blocks, compute)
        replaced |= {parts.embed: lambda ids: states, norm: normalise}
        try:
            with forwards(replaced), torch.no_grad(), torch.random.fork_rng(devices=[]), _outer_leaves(parts):
                output = hidden_of(type(trunk).forward(trunk, input_ids=ids, use_cache=False))  # type: ignore[attr-defined]
        except Exception:  # the blocks of this model return something else
            continue
        if len(seen) == 1 and given and is_same(seen[0], given[-1]) and is_same(output, made[0]):
            return True
    return False


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same numbers in memory, in the same shape."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
