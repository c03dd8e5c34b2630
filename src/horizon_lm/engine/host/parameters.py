"""The parameters of a streamed model: views into host memory that synchronize when they are used.

Reading or writing a weight waits for its update; reading a gradient waits until it has landed. Uses that a streamed model
would silently ignore, because its parameters are not in autograd's graph, are rejected.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.hooks import RemovableHandle

from horizon_lm.engine.host.same_values import is_same_memory, is_wider_copy
from horizon_lm.errors import StreamingError

# torch's own properties, under the ones that streamed parameters put in their place.
_GRAD: Any = torch._C.TensorBase.__dict__["grad"]
_DATA: Any = torch._C.TensorBase.__dict__["data"]


def landing_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return ``param.grad`` without waiting for its contents."""
    with torch._C.DisableTorchFunctionSubclass():
        return _GRAD.__get__(param)


def set_landing_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad`` to a gradient that may still be landing."""
    with torch._C.DisableTorchFunctionSubclass():
        # torch accepts a gradient of another dtype, such as float32 for bfloat16 weights, only if it is announced.
        if grad is not None and grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        _GRAD.__set__(param, grad)


class ParameterOwner(Protocol):
    """The interface between a streamed parameter and the engine that updates it."""

    def hand_out_weight(self) -> None:
        """Wait for updates of weights before a weight is read or written."""
        ...

    def require_known_grad(self, param: nn.Parameter) -> None:
        """Raise StreamingError if a gradient is read or written before the losses of its step are computed."""
        ...

    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed, before it is read or written."""
        ...

    @property
    def has_parts(self) -> bool:
        """True if other ranks have parts of every weight and gradient."""
        ...

    def before_grad_is_emptied(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed, before it is dropped."""
        ...

    def before_foreign_step(self, optimizer: str) -> None:
        """Wait for updates before a step of another optimizer, given by the name of its class; raise StreamingError if it must not
        update the weights.
        """
        ...

    def after_foreign_step(self) -> None:
        """Record that another optimizer has changed the weights."""
        ...

    def after_ignored_cast(self, dtype: torch.dtype) -> None:
        """Warn that a cast of a weight to a wider dtype was ignored, unless the model computes in it anyway."""
        ...


# Functions that read only a parameter's metadata, not its values, and need not wait for an update.
METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names", "is_cuda", "is_cpu",
        "is_meta", "is_sparse", "is_quantized", "is_nested", "_version", "itemsize", "nbytes", "_backward_hooks",
        "_post_accumulate_grad_hooks", "output_nr", "grad_dtype",
    )
    if hasattr(torch.Tensor, name)
} | {
    torch._C.TensorBase.__dict__["requires_grad"].__set__, torch.Tensor.requires_grad_, torch.Tensor.size, torch.Tensor.numel,
    torch.Tensor.nelement, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.stride, torch.Tensor.storage_offset,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous,
    torch.Tensor.is_pinned, torch.Tensor.is_shared, torch.Tensor.__len__, torch.is_floating_point, torch.is_complex,
    torch.numel, torch.empty_like,
}  # fmt: skip


class StreamedParameter(nn.Parameter):
    """A parameter whose values are a view into a host slab; it waits for its update before torch uses the values."""

    # Weak: parameters that a user holds must not keep the slabs of a whole model alive.
    _owner: "weakref.ref[ParameterOwner] | None" = None
    _after_grad: "OrderedDict[int, Callable[[nn.Parameter], None]] | None" = None  # post-backward hooks
    _is_followed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every function but these may read or write the memory, which an update, or a checkpoint's writer, may be using.
        if func not in METADATA:
            _hand_out_weights(args)
            if kwargs:
                _hand_out_weights(kwargs.values())
        # Without this class, so that the call ends here, and its results are plain tensors, whose uses wait for nothing.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func not in METADATA and torch.is_grad_enabled():
            _follow_if_in_graph(result, (*args, *(kwargs or {}).values()))
        return result

    def follow_accumulation(self) -> None:
        """Register a hook, once, that waits until the gradient has landed before torch's own autograd adds to it."""
        if not self._is_followed and self.requires_grad:
            self._is_followed, weak_self = True, weakref.ref(self)
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.register_hook(self, lambda _: _before_accumulation(weak_self()))

    def owner(self) -> ParameterOwner | None:
        """Return the engine that updates this parameter, or None once the engine is gone."""
        return self._owner() if self._owner is not None else None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The values, as a tensor that shares the parameter's version counter, so that changes made through it are
        noticed.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            owner = self.owner()
            # Without its engine it is an ordinary parameter again.
            if owner is None:
                _DATA.__set__(self, value)
                return
            # The same memory is accepted: torch's `Module.to` assigns it if it changes nothing.
            if is_same_memory(self, value):
                return
            # The present values are read or overwritten below, so their update must be done and no checkpoint may be reading them.
            owner.hand_out_weight()
            if _copies_data and value.shape == self.shape:  # inside `copying_data()`
                with torch.no_grad():
                    self.detach().copy_(value)
            # PEFT's `prepare_model_for_kbit_training` casts all weights in 16 bits to float32, which loses nothing.
            elif is_wider_copy(value, _DATA.__get__(self)):
                owner.after_ignored_cast(value.dtype)  # warns if blocks compute in a narrower dtype
            elif value.dtype != self.dtype and value.shape == self.shape and not value.is_meta:
                raise StreamingError(
                    f"a weight of a streamed model cannot be cast from {self.dtype} to {value.dtype}; choose the precision in "
                    "horizon_lm.stream(): 'float32', or 'fp32_master' and 'bf16', which have weights in torch.bfloat16"
                )
            else:
                raise StreamingError(
                    "the values of a streamed parameter live in the model's host memory, so its .data cannot be replaced "
                    "by another tensor; copy the values with param.data.copy_(values). Cast or move a model before "
                    "horizon_lm.stream(), or choose precision and device there."
                )

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient, once it has landed; if other ranks have parts of it, a stand-in without values."""
        owner, grad = self.owner(), landing_grad(self)
        if owner is not None:
            owner.require_known_grad(self)
        if owner is not None and owner.has_parts:  # not waited for, because a stand-in has no values
            return None if grad is None else PartOfGrad.of(grad)
        self._hand_out_grad()
        return landing_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        # The old gradient must have landed before another one takes its place. If other ranks have parts of it, it may be
        # dropped, but not replaced.
        owner = self.owner()
        if owner is not None:
            owner.require_known_grad(self)
        if owner is None or not owner.has_parts:
            self._hand_out_grad()
        elif value is None:
            owner.before_grad_is_emptied(self)
        else:
            owner.hand_out_weight()  # raises StreamingError, because other ranks have parts of the gradient
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _hand_out_grad(self) -> None:
        """Wait until the gradient has landed."""
        owner = self.owner()
        if owner is not None:
            owner.hand_out_grad(self)

    def register_hook(self, hook: Any) -> Any:
        raise StreamingError(
            "register_hook on a parameter of a streamed model is not supported: its gradient goes from the device to host "
            "memory block by block and never passes through a hook. Use param.register_post_accumulate_grad_hook, or "
            "change param.grad after backward()."
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
        """Call ``hook(param)`` at the end of each backward pass in which this parameter received a gradient."""
        if self._after_grad is None:
            self._after_grad = OrderedDict()
        handle = RemovableHandle(self._after_grad)
        self._after_grad[handle.id] = hook
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class PartOfGrad(torch.Tensor):
    """A gradient of which other ranks have parts. It is there, and can be emptied, but its values cannot be used."""

    @staticmethod
    def of(grad: torch.Tensor) -> "PartOfGrad":
        """Return the stand-in for a gradient."""
        # On the meta device it has shape and dtype for code that only asks whether there is a gradient, and no memory.
        return torch.empty_like(grad, device="meta").as_subclass(PartOfGrad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            raise StreamingError(
                "each rank keeps a part of every gradient in host memory, so other code cannot read or change them; clip with "
                "horizon_lm.AdamW(max_grad_norm=...), whose grad_norm is that of all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _before_accumulation(param: nn.Parameter | None) -> None:
    if isinstance(param, StreamedParameter):  # PEFT may have removed it from the model
        param._hand_out_grad()


def _hand_out_weights(values: Iterable[Any]) -> None:
    """Wait for the updates of all streamed parameters among these values."""
    for param in _streamed_in(values):
        owner = param.owner()
        if owner is not None:
            owner.hand_out_weight()


def _follow_if_in_graph(result: Any, values: Iterable[Any]) -> None:
    """Let `follow_accumulation` watch the streamed parameters among these values, if a result of other code is in a graph of autograd,
    which then adds to their gradients by itself, and must wait until the engine's have landed.
    """
    results = result if isinstance(result, (list, tuple)) else (result,)
    if any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in results):
        for param in _streamed_in(values):
            param.follow_accumulation()


def _streamed_in(values: Iterable[Any]) -> Iterator[StreamedParameter]:
    """Yield the streamed parameters among these values."""
    for value in values:
        if isinstance(value, StreamedParameter):
            yield value
        # torch.cat and the _foreach functions of optimizers take lists.
        elif isinstance(value, (list, tuple)):
            yield from _streamed_in(value)


_copies_data = False  # True inside `copying_data`


@contextmanager
def copying_data() -> Iterator[None]:
    """Context manager: inside, ``param.data = x`` copies x into the weight's memory, for code that keeps no tensor of the old values;
    outside, only wider casts of the present values are accepted.
    """
    global _copies_data
    before, _copies_data = _copies_data, True
    try:
        yield
    finally:
        _copies_data = before


_PRODUCTS = {
    F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.mm,
    torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.addmm, torch.Tensor.bmm,
}  # fmt: skip


class HeadParameter(StreamedParameter):
    """The weight of the head. Multiplying by it directly is rejected, because the product would be computed on the
    host.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            raise StreamingError(_DIRECT_PRODUCT)
        return super().__torch_function__(func, types, args, kwargs)


_DIRECT_PRODUCT = (
    "code computes with the weight of the language model's head or embedding directly (usually a trainer's fused or chunked "
    "loss). The weight of a streamed model lives in host memory. Call model(input_ids, labels=...) for the loss, "
    "or stream with head='whole' for logits, and turn the fused loss off (TRL: use_liger_kernel=False and loss_type='nll')."
)


class StandIn(torch.Tensor):
    """A tensor that replaces the weight of the head or the embedding in a forward pass; it has metadata, but no values.

    Models read the dtype and device of these weights and cast hidden states to them. The real weight has the storage
    dtype and is in host memory; the stand-in has the dtype and device of computations.
    """

    _read: Callable[[Any], torch.Tensor] | None = None

    @staticmethod
    def of(
        param: nn.Parameter, dtype: torch.dtype, device: torch.device, read: Callable[[Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return a stand-in for a parameter.

        Args:
            param: the parameter.
            dtype: the dtype of computations.
            device: the device of computations.
            read: function that returns rows of the parameter on the device, by index; None if it cannot be indexed.
        """
        with torch._C.DisableTorchFunctionSubclass():
            shape, needs_grad = param.shape, param.requires_grad
        # One element that is expanded to the whole shape: a stand-in for a large table takes no memory.
        stand_in = torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(StandIn)
        stand_in._read = read
        return stand_in.requires_grad_(needs_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0]._read is not None:
            return args[0]._read(args[1])
        if func not in METADATA:
            raise StreamingError(_DIRECT_PRODUCT)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def adopt(param: nn.Parameter, cls: type[StreamedParameter], owner: ParameterOwner) -> None:
    """Turn a parameter into a streamed parameter. It remains the same object and keeps its post-accumulate hooks."""
    require_plain(param)
    hooks = param._post_accumulate_grad_hooks
    if hooks:
        # torch would call these hooks before the gradient has landed. It gets an empty dict, because after None it would go on with
        # the old one; the old dict is kept, from which handles remove their hooks.
        param._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[assignment]
        param._after_grad = hooks  # type: ignore[attr-defined]
    param.__class__ = cls
    param._owner = weakref.ref(owner)  # type: ignore[attr-defined]


def require_plain(param: nn.Parameter) -> None:
    """Raise StreamingError if a parameter cannot be streamed because of its class or a hook."""
    if param.is_inference():
        raise StreamingError(
            "a parameter was created in inference mode, so it cannot be streamed; load the model outside of it"
        )
    if type(param) is not nn.Parameter and not isinstance(param, StreamedParameter):
        raise StreamingError(f"a parameter of type {type(param).__name__} cannot be streamed; load the model plainly")
    own_hooks = int(getattr(param, "_is_followed", False))  # the hook of `follow_accumulation`
    if len(param._backward_hooks or ()) > own_hooks:
        raise StreamingError(
            "a parameter has a hook (register_hook), which a streamed model would never call; remove it before "
            "horizon_lm.stream(), and use register_post_accumulate_grad_hook"
        )


def call_after_grad(param: nn.Parameter) -> None:
    """Call a parameter's post-accumulate hooks."""
    # A copy of the hooks, since one may remove itself.
    for hook in list((getattr(param, "_after_grad", None) or {}).values()):
        hook(param)
