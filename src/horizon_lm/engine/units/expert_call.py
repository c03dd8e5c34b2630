"""The experts' part of a micro-batch, computed tile by tile with the bits of transformers' own functions.

Every pair of a token and an expert is a row; its rank is the place of the expert among the K experts of the token. Rows are
sorted by expert, so those of a tile follow each other. A tile computes
its rows by the function that the model uses, as tokens with one expert of weight one. What the functions do with the rows of all
experts is done here, in the order in which they do it: a sum of floating-point numbers depends on it.

Shapes: N tokens, K experts of a token, S = N * K rows, R rows of a tile, H hidden size, E experts.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from horizon_lm.engine.units.grad_sink import unexpected_gradient
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.lazy_products import require_computed
from horizon_lm.model.routed_experts import Experts, weighted_rows


class _NeedsGrad(NamedTuple):
    """The inputs of the experts that need a gradient."""

    hidden: bool
    weights: bool


class ExpertCall:
    """A call of a block's experts for one micro-batch.

    Args:
        module: the module that computes the experts.
        count: number of its experts (E).
        hidden: hidden states (N, H).
        ids: the experts of each token (N, K). A number of at least E stands for no expert.
        weights: their weights (N, K).
        before: the same call in the forward pass, for its backward pass.

    Attributes:
        output: the experts' output (N, H), once it is computed.
        output_like: its shape and dtype, which are those of the hidden states.
    """

    def __init__(
        self, module: nn.Module, count: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        before: "ExpertCall | None" = None,
    ) -> None:  # fmt: skip
        if hidden.ndim != 2 or ids.shape != weights.shape:
            raise ModelNotSupportedError(
                f"{type(module).__name__} is called with hidden states of shape {tuple(hidden.shape)} and weights of shape "
                f"{tuple(weights.shape)} for experts of shape {tuple(ids.shape)}, so its experts cannot be cut into tiles; leave "
                "expert_tile unset"
            )
        require_computed(hidden, weights)  # in a recompute: they are read later
        self._order = order_of(module)
        self._ids, self._needs_grad = ids, _NeedsGrad(hidden.requires_grad, weights.requires_grad)
        self._hidden, self._weights = hidden.detach(), weights.detach()
        num_tokens, num_ranks = ids.shape
        flat = (ids.t() if self._order.by_rank else ids).reshape(-1)
        self._experts, sources = self._order.sort(flat)  # (S,)
        # By row (S,): its token, and the place of its pair in the flattened (N, K). `sources` are places in the flattened (K, N) if rows
        # are ordered by rank, and otherwise in (N, K).
        self._tokens = sources % num_tokens if self._order.by_rank else sources // num_ranks
        self._places = self._tokens * num_ranks + sources // num_tokens if self._order.by_rank else sources
        self._count = count
        if before is not None:  # the host waits for them only once
            self._bounds = before._bounds
        self._grad: torch.Tensor | None = None  # of the output
        self._weight_grads: torch.Tensor | None = None  # (S,), by place
        self._row_outputs: torch.Tensor | None = None  # (S, H), until they are added up
        self._row_grads: torch.Tensor | None = None  # of the hidden states of all rows, (S, H)
        self.output: torch.Tensor | None = None if before is None else before.output
        self.output_like = hidden.shape, hidden.dtype

    @cached_property
    def _bounds(self) -> list[int]:
        """The places at which the rows of each expert begin among the sorted rows, and the place at which the last expert's rows end.

        The host waits for them at the first use, when rows are computed and all micro-batches of the block are enqueued.
        """
        experts = torch.arange(self._count + 1, device=self._experts.device)
        bounds: list[int] = torch.searchsorted(self._experts, experts).tolist()
        return bounds

    def chosen(self) -> list[int]:
        """Return the experts that tokens are routed to."""
        return [expert for expert, (start, stop) in enumerate(pairwise(self._bounds)) if start < stop]

    def has_rows(self, experts: slice) -> bool:
        """Return whether a token is routed to one of a tile's experts."""
        return self._bounds[experts.start] < self._bounds[experts.stop]

    def compute(self, experts: slice, function: Experts) -> None:
        """Compute the rows of a tile's experts by its function, and keep their outputs for `finish`."""
        tile = self._rows_of_tile(experts)
        if tile is None:
            return
        ids, rows = tile
        weights = self._weights.flatten()[self._places[rows]]
        weighted = weighted_rows(function, self._hidden[self._tokens[rows]], ids, weights)
        self._row_outputs = self._put(self._row_outputs, rows, weighted, by_place=self._order.adds_by_token)

    def _put(self, total: torch.Tensor | None, rows: torch.Tensor, new: torch.Tensor, by_place: bool) -> torch.Tensor:
        """Put new values (R, H) of rows (R,) into ``total``, the values of all rows (S, H), and return it; it is allocated if None. With
        ``by_place`` the rows of ``total`` are ordered by place in (N, K), otherwise by expert.
        """
        if total is None:  # zeros if there are rows without an expert
            allocate = new.new_empty if self._bounds[-1] == self._ids.numel() else new.new_zeros
            total = allocate((self._ids.numel(), new.shape[-1]))
        total[self._places[rows] if by_place else rows] = new
        return total

    def _rows_of_tile(self, experts: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the experts (R, 1) of a tile's rows, counted from the tile's first, and the numbers of these rows (R,) among all sorted
        rows; None if no token is routed to these experts. Both have the order in which the experts' function is given the rows.
        """
        if not self.has_rows(experts):
            return None
        start, stop = self._bounds[experts.start], self._bounds[experts.stop]
        ids = self._experts[start:stop] - experts.start
        # The function sorts by expert again, and an unstable sort exchanges rows of one expert. Rows are given in the order that this
        # exchange turns into the present one. All exchanged rows have the same expert, so `ids` is the same in either order.
        positions = self._order.before_sorting(ids)
        return ids[:, None], start + positions

    def finish(self) -> None:
        """Add up the output (N, H) after all rows are computed, and forget what the backward pass computes again."""
        rows, self._row_outputs = self._row_outputs, None
        output = torch.zeros_like(self._hidden)
        if rows is not None and self._order.adds_by_token:  # by place, so the K rows of a token follow each other
            output = rows.view(*self._ids.shape, -1).sum(dim=1).to(output.dtype)
        elif rows is not None:
            for expert in range(len(self._bounds) - 1):
                self._add_expert(output, rows, expert)
        self.output = output
        del self._ids, self._hidden, self._weights, self._experts, self._tokens, self._places

    def _add_expert(self, total: torch.Tensor, rows: torch.Tensor, expert: int) -> None:
        """Add the rows (S, H) of one expert to their tokens in a total (N, H), in any order, since a token occurs once among them."""
        start, stop = self._bounds[expert], self._bounds[expert + 1]
        if start < stop:
            total.index_add_(0, self._tokens[start:stop], rows[start:stop].to(total.dtype))

    def take_output(self) -> torch.Tensor:
        """Return the output, and forget it."""
        output, self.output = self.output, None
        assert output is not None
        return output

    # Backward pass

    def begin_backward(self, grad: torch.Tensor) -> None:
        """Take the gradient of the experts' output (N, H)."""
        self._grad = grad
        if self._needs_grad.weights:
            self._weight_grads = torch.zeros_like(self._weights).flatten()

    def differentiate(self, experts: slice, function: Experts) -> None:
        """Compute the rows of a tile's experts again, and differentiate them. Keep the gradients of their hidden states and weights;
        gradients of parameters go to the leaves that ``function`` computes with.
        """
        tile = self._rows_of_tile(experts)
        if tile is None:
            return
        ids, rows = tile
        tokens, places = self._tokens[rows], self._places[rows]
        hidden = self._hidden[tokens].requires_grad_(self._needs_grad.hidden)
        weights = self._weights.flatten()[places].requires_grad_(self._needs_grad.weights)
        assert self._grad is not None
        with torch.enable_grad():
            weighted = weighted_rows(function, hidden, ids, weights)
            if not weighted.requires_grad:
                return
            weighted.backward(self._grad[tokens].to(weighted.dtype))
        if hidden.grad is not None:
            self._row_grads = self._put(
                self._row_grads, rows, hidden.grad, by_place=self._order.grads == GradOrder.TOKENS
            )
        if self._weight_grads is not None and weights.grad is not None:
            self._weight_grads[places] = weights.grad

    def take_grads(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of hidden states (N, H), summed over the rows of a token, and of weights (N, K); None for an input that
        needs none.

        Raises:
            StreamingError: this call belongs to a graph that must not be differentiated.
        """
        if self._grad is None:
            raise unexpected_gradient()
        row_grads, self._row_grads = self._row_grads, None
        weight_grads = None if self._weight_grads is None else self._weight_grads.view(self._ids.shape)
        if not self._needs_grad.hidden:
            return None, weight_grads
        grads = torch.zeros_like(self._hidden)
        if row_grads is not None:
            self._add_row_grads(grads, row_grads)
        return grads, weight_grads

    def _add_row_grads(self, total: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the gradients of all rows (S, H) to those of their tokens (N, H), in the order in which the function that computes the
        experts adds them (`Order.grads`).
        """
        match self._order.grads:
            case GradOrder.EXPERTS_FROM_LAST:
                for expert in reversed(range(len(self._bounds) - 1)):
                    self._add_expert(total, rows, expert)
            case GradOrder.TOKENS:
                tokens = torch.arange(len(total), device=total.device).repeat_interleave(self._ids.shape[1])
                total.index_add_(0, tokens, rows)
            case GradOrder.SORTED_ROWS:  # rows after the last bound have no expert
                used = self._bounds[-1]
                _add_reproducibly(total, self._tokens[:used], rows[:used])

    def attach(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the output as the result of a node of autograd, whose gradients are those of `take_grads`."""
        assert self.output is not None
        # It requires a gradient even if neither input does, because `TiledBackward` asks autograd for it.
        output: torch.Tensor = _FromTiles.apply(self, self.output.detach().requires_grad_(), hidden, weights)
        return output


def _add_reproducibly(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows (R, H) to the tokens (R,) of a total (N, H), in the same order each time."""
    # On an accelerator `index_add_` adds by atomic operations, in any order; on a CPU `index_put_` does.
    if total.device.type == "cpu":
        total.index_add_(0, tokens, rows)
    else:
        total.index_put_((tokens,), rows, accumulate=True)


class _FromTiles(torch.autograd.Function):
    """The experts' output, whose gradients were computed tile by tile before autograd comes here."""

    @staticmethod
    def forward(
        ctx: Any, call: ExpertCall, output: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.call.take_grads()


class GradOrder(Enum):
    """The order in which the rows' gradients of hidden states are added. A sum in floating point depends on its order, so each of
    transformers' three functions has one here.
    """

    EXPERTS_FROM_LAST = "expert by expert, from the last to the first, as autograd visits them"
    TOKENS = "token by token, the rows of a token by rank"
    SORTED_ROWS = "row by row, sorted by expert"


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which one of transformers' functions computes and adds rows.

    Attributes:
        by_rank: the rows of an expert are ordered by rank and then by token, not the other way round.
        adds_by_token: outputs are put back in the order of tokens and ranks, and added over the ranks; otherwise expert by expert.
        grads: the order in which gradients of the hidden states are added.
        is_unstable: rows are sorted by torch's unstable sort, so the order of the rows of an expert depends on all keys.
    """

    by_rank: bool = False
    adds_by_token: bool = True
    grads: GradOrder = GradOrder.SORTED_ROWS
    is_unstable: bool = False

    def sort(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of all rows (S,), sorted, and the place of each before sorting."""
        return torch.sort(experts) if self.is_unstable else torch.sort(experts, stable=True)

    def before_sorting(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the order (R,) in which to give rows with these sorted experts to a function that sorts them again, so that it
        computes them in their present order.
        """
        if not self.is_unstable:  # a stable sort leaves sorted rows as they are
            return torch.arange(len(experts), device=experts.device)
        return torch.argsort(torch.sort(experts).indices)  # the inverse of what the sort will do


ORDERS = {
    "eager": Order(by_rank=True, adds_by_token=False, grads=GradOrder.EXPERTS_FROM_LAST),
    "grouped_mm": Order(is_unstable=True),
    "batched_mm": Order(grads=GradOrder.TOKENS),
}
"""The order of each function, by its name in transformers' ``ALL_EXPERTS_FUNCTIONS``."""


def order_of(module: nn.Module) -> Order:
    """Return the order of the function that computes a module's experts.

    Raises:
        ModelNotSupportedError: it is not known how the function adds rows.
    """
    name = getattr(module.config, "_experts_implementation", None) or "eager"
    if name not in ORDERS:
        raise ModelNotSupportedError(
            f"experts_implementation={name!r} cannot be cut into tiles; choose one of {', '.join(ORDERS)}, or leave "
            "expert_tile unset"
        )
    return ORDERS[name]
