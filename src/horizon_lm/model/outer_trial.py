"""Run a model's outer code over a few tokens, with stand-ins for its blocks, embedding and head.

How this code uses the blocks cannot be derived from their names, so it is found by a trial.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from horizon_lm.common.units import EMBED, OUTER
from horizon_lm.errors import ImagesNotSupportedError, ModelNotSupportedError
from horizon_lm.model import attention
from horizon_lm.model.functional import Place
from horizon_lm.model.image_inputs import MARKS, image_token
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.trial import Call, answers_of, hidden_of, outer_weights, trial

_ROWS, _LENGTH = 2, 5
# What blocks return: hidden states, alone or first in a tuple.
_STRUCTURES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, None), lambda hidden: (hidden, None, None),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OuterTrial:
    """The behavior of a model's outer code on text.

    Attributes:
        order: indices of the blocks in the order of their calls.
        calls: arguments of the blocks, by index.
        rows_first: the first dimension of hidden states is B.
        norm_is_last: the trunk returns the final norm of its last block's output.
    """

    order: tuple[int, ...]
    calls: Mapping[int, Call]
    rows_first: bool
    norm_is_last: bool


def require_each_block_once(parts: ModelParts, found: OuterTrial | None) -> None:
    """Raise ModelNotSupportedError if a model does not call each block once, in order: in a trial, or because it has LayerDrop."""
    blocks = parts.decoder_blocks
    if found is not None and found.order != tuple(blocks):
        raise ModelNotSupportedError(
            f"{type(parts.model).__name__}: its forward calls the blocks of {parts.block_names[-1].rpartition('.')[0]} in the order "
            f"{', '.join(str(index - blocks.start) for index in found.order)}; a model is streamed whose blocks are called once each, in order"
        )
    for module in parts.trunks():
        if getattr(module, "layerdrop", 0.0):
            raise ModelNotSupportedError(
                f"{type(parts.model).__name__}: layerdrop={module.layerdrop} leaves out blocks at random; a streamed model "
                "computes every block. Set layerdrop to 0 in the model's config."
            )


def try_outer(parts: ModelParts) -> OuterTrial | None:
    """Run a model's trunk on text and return its behavior, or None if it cannot be run."""
    ids = torch.ones((_ROWS, _LENGTH), dtype=torch.long)
    for trunk in parts.trunks():
        for structure in _STRUCTURES:
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    return _run_trunk(parts, trunk, structure, {"input_ids": ids}, random_weights(parts))
            except Exception:  # this module is not a trunk, or its blocks return another structure
                continue
    return None


def require_causal_images(parts: ModelParts) -> None:
    """Raise ImagesNotSupportedError if tokens of an image see later ones, as those of a text never do.

    The model's outer code is run on tokens that are marked as those of an image, without the image.
    """
    trunk = parts.trunks()[0]
    marks = torch.tensor([[0, *[1] * (_LENGTH - 2), 0]] * _ROWS)
    takes, token = inspect.signature(type(trunk).forward).parameters, image_token(parts.model.config)
    inputs = {"input_ids": torch.where(marks == 1, 1 if token is None else token, 1)}
    inputs |= {name: marks for name in MARKS if name in takes}
    # One zero that is read everywhere; some models look the embedding of padding up by themselves.
    zeros = [*outer_weights(parts, lambda ref: torch.zeros(()).expand(ref.param.shape), units=(OUTER, EMBED))]
    reason = "the model cannot be tried without an image"
    for structure in _STRUCTURES:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), attention.making_masks(parts.model):
                calls = _run_trunk(parts, trunk, structure, inputs, zeros).calls
        except Exception:  # blocks return another structure
            continue
        if not any(mask.triu(1).any() for call in calls.values() for mask in seen_in(call, _LENGTH)):
            return
        reason = "their tokens see later ones"
        break
    raise ImagesNotSupportedError(
        f"{type(parts.model).__name__}: attn_implementation='varlen' is not possible for images: {reason}; choose sdpa"
    )


def seen_in(call: Call, length: int) -> Iterator[torch.Tensor]:
    """Yield the masks among the arguments of a block as booleans, True where a token sees another one: (B, heads, T, T), T = ``length``."""
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.shape[-2:] == (length, length):
            yield seen(leaf)


def seen(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as booleans, True where a token sees another one; of a mask that is added to scores, where it is not the least number."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()


class _StandIns:
    """Functions in place of a model's blocks and final norm, which record their calls."""

    def __init__(self, structure: Callable[[torch.Tensor], Any]) -> None:
        self._structure = structure
        self.order: list[int] = []  # as in `OuterTrial`, as are the calls
        self.calls: dict[int, Call] = {}
        self.last: torch.Tensor  # input of the last block that was called, which it has returned
        self.normed: list[tuple[torch.Tensor, torch.Tensor]] = []  # input and output of each call of the norm

    def block(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return the input (B, T, H) of a block in the structure."""
        self.order.append(index)
        self.calls[index] = args, kwargs
        self.last = args[0] if args else kwargs["hidden_states"]
        return self._structure(self.last)

    def norm(self, width: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return random numbers as the output (..., width) of the norm."""
        output = torch.randn(*hidden.shape[:-1], width)
        self.normed.append((hidden, output))
        return output


def _run_trunk(
    parts: ModelParts, trunk: nn.Module, structure: Callable[[torch.Tensor], Any], inputs: Mapping[str, torch.Tensor],
    weights: Iterable[Place],
) -> OuterTrial:  # fmt: skip
    """Run the trunk once on inputs, with stand-ins for its blocks that return their input (B, T, H) in the given structure.

    The trunk's own code may raise any exception; ValueError is raised if its output shows that blocks return another structure.
    """
    record = _StandIns(structure)
    answers = answers_of(parts.blocks, record.block)
    answers[parts.embed] = lambda ids: torch.randn(*ids.shape, parts.hidden)
    if parts.final_norm is not None:
        width = next(iter(parts.final_norm.parameters())).shape[-1]
        answers[parts.final_norm] = partial(record.norm, width)
    with trial(answers, weights):
        output = hidden_of(type(trunk).forward(trunk, **inputs, use_cache=False))  # type: ignore[attr-defined]
    if output.ndim != 3 or record.last.ndim < 3:
        raise ValueError("hidden states have lost a dimension: blocks return something else")
    norm_is_last = False
    if len(record.normed) == 1:
        ((norm_input, norm_output),) = record.normed
        norm_is_last = is_same(norm_input, record.last) and is_same(output, norm_output)
    return OuterTrial(tuple(record.order), record.calls, record.last.shape[0] == _ROWS, norm_is_last)


def random_weights(parts: ModelParts) -> list[Place]:
    """Return small random fp32 leaves on the host for the outer parameters of a model, with the places that they are read from.

    Adapters inside blocks are left out: stand-ins take the place of the blocks, and a large model has a thousand adapters.
    """

    def draw(ref: ParamRef) -> torch.Tensor:
        return torch.randn(ref.param.shape).mul_(0.1).requires_grad_()

    return list(outer_weights(parts, draw, left_out=frozenset().union(*parts.adapters.values())))


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same memory and shape."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
