"""The experts of a block, of which a token reads only those that it is routed to.

Shapes: E experts, N tokens, K experts of a token, H hidden size, R rows: pairs of a token and an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.memory.layout.model import ExpertTensors
from horizon_lm.model.expert_adapters import adapters_of, outermost, wrappers_of
from horizon_lm.model.parts import ModelParts

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = (
    "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token",
)  # fmt: skip

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of hidden states (R, H), experts (R, 1) counted from the first of a tile, and their weights (R, 1)."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of a block.

    Attributes:
        block: the block.
        path: name inside the block of the module that computes them.
        count: number of experts (E).
        per_token: number of experts that a token is routed to.
        names: their weights (E, ...), by their names inside the block. Those of an expert without tokens are not read.
        have_more: the module has other weights, too, which all experts share.
        adapters: the weights of PEFT's adapters of these weights, by their names inside the block.
    """

    block: nn.Module
    path: str
    count: int
    per_token: int
    names: tuple[str, ...]
    have_more: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The module that computes the experts."""
        return self.block.get_submodule(self.path)

    @property
    def called(self) -> nn.Module:
        """The module that the block calls: the one that computes the experts, or PEFT's layers around it. Its second argument has the
        experts of each token.
        """
        return self.block.get_submodule(outermost(self.block, self.path))

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that read at most half of the experts, wherever they are routed to; 0 with adapters, which PEFT
        applies to all experts of a block at once.
        """
        return 0 if self.adapters else self.count // (2 * self.per_token)


def num_experts(config: Any) -> int:
    """Return the number of routed experts of a block that a model's config names; 0 if it names none."""
    return next((n for name in _COUNTS if (n := getattr(config, name, None))), 0)


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts that a model's config routes a token to; None if it does not say."""
    found = next((n for name in _PER_TOKEN if (n := getattr(config, name, None))), None)
    return found if isinstance(found, int) else None


def expert_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what experts are called with: hidden states (N, H), experts of each token (N, K), and their weights (N, K)."""
    arguments = list(args)
    for names in _ARGUMENTS[len(args) :]:  # the arguments that are given by name
        arguments += [kwargs[name] for name in names if name in kwargs]
    hidden, ids, weights = arguments
    return hidden, ids, weights


# The names that models use for each argument, in the order of arguments.
_ARGUMENTS = (("hidden_states",), ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))


def weighted_rows(function: Experts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted outputs (R, H) of rows, from their hidden states (R, H), experts (R, 1) and weights (R,)."""
    return function(hidden, ids, torch.ones_like(hidden[:, :1])) * weights[:, None]


def find_experts(parts: ModelParts) -> dict[int, RoutedExperts]:
    """Return the experts of all blocks that have any (`_experts_of`), by the index of their block."""
    found: dict[int, RoutedExperts] = {}
    per_token = experts_per_token(parts.model.config.get_text_config())
    if per_token is None:
        return found
    for index, module in enumerate(parts.blocks):
        if index in parts.written:  # weights that a block may write are compared as a whole, so all have to be there
            continue
        if (experts := _experts_of(parts, index, module, per_token)) is not None:
            found[index] = experts
    return found


def expert_tensors(parts: ModelParts) -> dict[int, ExpertTensors]:
    """Return the experts of blocks as they are laid out, by the index of their block."""
    return {
        index: ExpertTensors(
            each.count,
            each.per_token,
            frozenset(f"{parts.block_names[index]}.{name}" for name in each.names),
            is_divisible=not each.have_more,
        )
        for index, each in find_experts(parts).items()
    }


def _experts_of(parts: ModelParts, index: int, block: nn.Module, per_token: int) -> RoutedExperts | None:
    """Return the experts of a block; None if it has none, or if its code may read experts to which no token is routed.

    Only the functions of transformers' experts interface are known to leave out experts without tokens.
    """
    found = [(name, each) for name, each in block.named_modules() if _is_of_interface(each)]
    if len(found) != 1:
        return None
    ((path, module),) = found
    count = int(module.num_experts)  # type: ignore[arg-type]
    names = []
    for attribute, weight in module.named_parameters(recurse=False):
        name = f"{path}.{attribute}"
        codec = parts.codecs.get(f"{parts.block_names[index]}.{name}")
        if weight.ndim > 1 and weight.shape[0] == count and isinstance(codec, _DIVISIBLE):
            names.append(name)
    # PEFT adapts a tensor (E, O) as a single matrix, which has no parts of experts.
    if not names or any(each.num_experts != count for each in wrappers_of(block, path)):
        return None
    have_more = len(names) < len(list(module.parameters()))
    return RoutedExperts(block, path, count, per_token, tuple(names), have_more, adapters_of(block, path))


def find_divisible_experts(parts: ModelParts) -> dict[int, RoutedExperts]:
    """Return the experts that can be computed a few at a time, by the index of their block.

    Experts that share weights are left out, because these weights would get a gradient from each part.
    """
    return {index: experts for index, experts in find_experts(parts).items() if not experts.have_more}


_DIVISIBLE = (Stack, Mxfp4, type(None))  # codecs of which one expert can be decoded by itself


def _is_of_interface(module: nn.Module) -> bool:
    """Return whether transformers' experts interface computes a module, by the attributes that only such modules have."""
    return all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "num_experts"))
