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


class WaitsForGrads(Protocol):
    def wait_for_grads(self) -> None: ...


class StreamedParameter(nn.Parameter):
    """A view into a host slab. Reading ``grad`` waits until the last backward's gradients have landed."""

    _owner: "weakref.ref[WaitsForGrads] | None" = None

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.wait_for_grads()
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
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


def adopt(param: nn.Parameter, cls: type[StreamedParameter], owner: WaitsForGrads) -> None:
    """Turn a parameter into a streamed one; the object stays the same."""
    if type(param) is not nn.Parameter and not isinstance(param, StreamedParameter):
        raise StreamingError(f"a parameter of type {type(param).__name__} cannot be streamed; load the model plainly")
    param.__class__ = cls
    param._owner = weakref.ref(owner)  # type: ignore[attr-defined]
