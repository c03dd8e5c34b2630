"""Parameters as the user sees them: host views, whose gradients may still be on their way."""

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.errors import StreamingError

_GRAD: Any = torch._C.TensorBase.__dict__["grad"]


def landing_grad(param: nn.Parameter) -> torch.Tensor | None:
    """``param.grad`` without waiting for its contents."""
    return _GRAD.__get__(param)


def set_landing_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad`` to a gradient that may still be on its way."""
    if grad is not None and grad.dtype != param.dtype:
        param.grad_dtype = grad.dtype
    _GRAD.__set__(param, grad)


class OwnsGrads(Protocol):
    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Somebody may read the gradient, or write to it."""
        ...


class StreamedParameter(nn.Parameter):
    """A view into a host slab. Reading ``grad`` waits until the last backward's gradients have landed."""

    _owner: "weakref.ref[OwnsGrads] | None" = None

    def _hand_out(self) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None and _GRAD.__get__(self) is not None:
            owner.hand_out_grad(self)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        self._hand_out()
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._hand_out()
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


_PRODUCTS = {
    F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.mm,
    torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.addmm, torch.Tensor.bmm,
}  # fmt: skip


class HeadParameter(StreamedParameter):
    """The head's weight. Code that multiplies by it directly would compute on the host, in silence; it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            raise StreamingError(
                "something multiplies by the weight of the language model's head directly (a fused or chunked loss of a "
                "trainer, usually). The weight of a streamed model lives in host memory. Call model(input_ids, "
                "labels=...) for the loss, or stream with head='whole' for logits, and turn the fused loss off "
                "(TRL: use_liger_kernel=False and loss_type='nll')."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def adopt(param: nn.Parameter, cls: type[StreamedParameter], owner: OwnsGrads) -> None:
    """Turn a parameter into a streamed one; the object stays the same."""
    if type(param) is not nn.Parameter and not isinstance(param, StreamedParameter):
        raise StreamingError(f"a parameter of type {type(param).__name__} cannot be streamed; load the model plainly")
    param.__class__ = cls
    param._owner = weakref.ref(owner)  # type: ignore[attr-defined]
