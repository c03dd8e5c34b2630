"""Let a block route its tokens to the same experts when it is computed again.

A router chooses the experts with the largest scores. Where two scores are nearly equal, a kernel that adds in another order can
turn the choice, and the recomputed block would be another function than the forward pass, with the gradients of other experts.

Shapes: N tokens, K experts of a token, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHOICES = (torch.topk, torch.Tensor.topk)


class Choices:
    """The choices that a block has made for one micro-batch, in the order in which it made them."""

    def __init__(self) -> None:
        self._made: list[torch.Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager: record the choices."""
        with _Intercepted(self._record):
            yield

    def _record(self, choose: Callable[[], Any], scores: torch.Tensor, dim: int) -> Any:
        """Make a choice by the scores, and keep its indices."""
        found = choose()
        # In a small dtype, because they stay on the device until the backward pass.
        self._made.append(found.indices.to(torch.int16 if scores.shape[dim] < 2**15 else torch.int32))
        return found

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Context manager: choose the recorded indices again, in the same order, whatever the scores are now."""
        recorded = iter(self._made)

        def repeat(_: Callable[[], Any], scores: torch.Tensor, dim: int) -> Any:
            indices = next(recorded).long()
            return torch.return_types.topk((scores.gather(dim, indices), indices))

        with _Intercepted(repeat):
            yield


class _Intercepted(TorchFunctionMode):
    """Replaces the choices of the largest scores (N, E) along a dimension.

    Args:
        replacement: function of the original choice, the scores and the dimension that returns values and indices (N, K).
    """

    def __init__(self, replacement: Callable[[Callable[[], Any], torch.Tensor, int], Any]) -> None:
        super().__init__()
        self._replacement = replacement

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOICES:
            return func(*args, **kwargs)
        # topk(input, k, dim=-1, largest=True, sorted=True)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return self._replacement(lambda: func(*args, **kwargs), scores, dim)
