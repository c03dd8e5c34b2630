"""Leave out what a recompute of a block computes for nobody.

A block is computed again for the sake of its graph: of the tensors that autograd saves. What the block returns is known, and nobody
reads it. So the last products of a block, such as that of its down projection, and the sums that they go into, are computed for
nothing: a quarter of the operations of a dense block.

While `LazyProducts` is active, a matrix product, a sum or a multiplication by a number is not computed when it is called, but as soon
as another operation reads its result. What is never read is never computed. Autograd makes the same graph as always, because it
works on another level; and it saves no result of these operations without another operation that reads it: a product and
a sum save inputs alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from horizon_lm.model.of_thread import OfThread

STAND_INS = "_stand_ins_of_weights"
"""The attribute of a module that has the tensors which its products read instead of its weights, in nested tuples."""

_aten = torch.ops.aten
# Products save their inputs for the backward pass, so these are computed before. Sums, and products with a number, save none.
_PRODUCTS = {_aten.mm.default: _aten.mm.out, _aten.addmm.default: _aten.addmm.out, _aten.bmm.default: _aten.bmm.out}
_SUMS = {_aten.add.Tensor: _aten.add.out, _aten.mul.Tensor: _aten.mul.out}


def _multiply_in_float8(*args: Any, out: torch.Tensor) -> None:
    """Compute a product in FP8 into a tensor; on the meta device, for which torch has no such operation, there is nothing to compute."""
    if out.device.type != "meta":
        _aten._scaled_mm.out(*args, out=out)


# Called by an autograd.Function of this package, which reads no result, and saves none.
_FLOAT8 = {_aten._scaled_mm.default: _multiply_in_float8}
_OUT_DTYPE = 6  # its place among their arguments
_OUT: dict[Any, Any] = {**_PRODUCTS, **_SUMS, **_FLOAT8}


class _Kind(Enum):
    """The way in which an operation treats tensors that are not computed yet."""

    PRODUCT = "is put off; its inputs are not"
    SUM = "is put off, with its inputs"
    FLOAT8 = "is put off in `plain_operations`"
    VIEW = "reads nothing"
    READS = "reads its arguments"
    BARRIER = "may read anything"


class PutOff(NamedTuple):
    """An operation that is not computed yet.

    Attributes:
        op: the operation.
        args, kwargs: its arguments.
        result: the tensor for its result, without a value.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: torch.Tensor


class LazyProducts(TorchDispatchMode):
    """A mode of this thread in which matrix products and sums are computed when their results are read.

    Bits do not depend on it. After it has ended, a tensor that no operation has read has no value.

    Attributes:
        left_out: the operations that were never computed, once it has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._put_off: dict[int | None, PutOff] = {}  # by the storage of the result, which it keeps alive
        self.left_out: list[PutOff] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not wrap `__torch_dispatch__`, which would import torch's compiler, and cost as much as all that is done here."""
        return False

    def __enter__(self) -> "LazyProducts":
        super().__enter__()
        _modes.value = (*_modes.value, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _modes.value = _modes.value[:-1]
        self.left_out = list(self._put_off.values())
        self._put_off = {}
        super().__exit__(kind, error, traceback)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put an operation off, or compute what it reads and call it."""
        kwargs = kwargs or {}
        # A view in another dtype comes with the plain class, and anything else with those of other packages' tensors.
        kind = _Kind.BARRIER if any(each is not torch.Tensor for each in types) else _kind(op)
        if kind is _Kind.VIEW:
            return op(*args, **kwargs)
        is_plain = _is_plain.value
        if kind is _Kind.FLOAT8 and is_plain:
            self.compute(_tensors(args))
            return self._call_later(op, args, kwargs)
        # Gradients are off inside an autograd.Function, which may read and save tensors in ways that are not seen here.
        if kind is _Kind.BARRIER or not (torch.is_grad_enabled() or is_plain):
            self._compute_all()
            return op(*args, **kwargs)
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        # A result without a gradient, such as an index, may be read in ways that are not seen here, too.
        # A sparse result has no storage, by which it would be found again.
        is_dense = all(tensor.layout == torch.strided for tensor in tensors)
        may_wait = is_dense and any(tensor.requires_grad for tensor in tensors)
        if may_wait and kind is _Kind.SUM and _saves_nothing(op, args):
            return self._call_later(op, args, kwargs)
        if self._put_off:
            self.compute(tensors)
        if may_wait and kind is _Kind.PRODUCT:
            return self._call_later(op, args, kwargs)
        return op(*args, **kwargs)

    def _call_later(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Put an operation off, and return a tensor without a value for its result, which is computed when the tensor is read."""
        result = _empty_result(op, args, kwargs)
        self._put_off[_storage(result)] = PutOff(op, args, kwargs, result)
        return result

    def compute(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute these tensors, if they are not computed yet."""
        for tensor in tensors:
            call = self._put_off.pop(_storage(tensor), None)
            if call is None:
                continue
            self.compute(_tensors(call.args))
            # Autograd knows the result already: it must take this neither for an operation, nor for a change of what it saved.
            with torch._C._AutoDispatchBelowAutograd(), torch.autograd._unsafe_preserve_version_counter(call.result):
                _OUT[call.op](*call.args, **call.kwargs, out=call.result)

    def _compute_all(self) -> None:
        while self._put_off:
            self.compute([next(iter(self._put_off.values())).result])


class LazyTail:
    """The last part of a block, in which its recomputes are lazy.

    Each operation costs some microseconds more while `LazyProducts` is active. So the first recompute finds the module that computes
    the first product that nobody reads, and later ones are lazy from that module on.
    """

    def __init__(self) -> None:
        self._first: nn.Module | None = None  # None if nothing is left out
        self._is_found = False

    @contextmanager
    def lazy(self, block: nn.Module) -> Iterator[None]:
        """Context manager: compute a block, whose weights are bound, without what nobody reads."""
        products = LazyProducts()
        if not self._is_found and not _compiles(block):
            with products:
                yield
            self._first, self._is_found = _owner(block, products.left_out), True
        elif self._first is None:
            yield
        elif self._first is block:
            with products:
                yield
        else:
            with _beginning_at(self._first, products):
                yield


def _compiles(block: nn.Module) -> bool:
    """Return whether transformers compiles the attention of a block, which torch would leave uncompiled while a mode is active."""
    configs = (getattr(module, "config", None) for module in block.modules())
    return any(getattr(config, "_attn_implementation", None) == "flex_attention" for config in configs)


def _owner(block: nn.Module, calls: Sequence[PutOff]) -> nn.Module | None:
    """Return the module in a block that has a weight of the first matrix product among some calls; None if there is no product.

    Return the block itself if none of its modules has the weight, as with weights that autocast converts.
    """
    product = next((call for call in calls if call.op in _PRODUCTS or call.op in _FLOAT8), None)
    if product is None:
        return None
    # By identity, because a quantized weight that is not on the device has no memory whose place could be compared.
    weights = {id(tensor if tensor._base is None else tensor._base) for tensor in _tensors(product.args)}
    modules = (module for module in block.modules() if any(id(each) in weights for each in _weights(module)))
    return next(modules, block)


def _weights(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """Yield the weights of a module, and the tensors that its products read instead of them."""
    yield from module._parameters.values()
    yield from _tensors(module.__dict__.get(STAND_INS, ()))


@contextmanager
def _beginning_at(module: nn.Module, mode: LazyProducts) -> Iterator[None]:
    """Context manager: enter a mode when a module is called for the first time, and leave it at the end."""
    instance_forward, forward = module.__dict__.get("forward"), module.forward
    with ExitStack() as stack:

        def enter_and_call(*args: Any, **kwargs: Any) -> Any:
            put_back()
            stack.enter_context(mode)
            return forward(*args, **kwargs)

        def put_back() -> None:
            module.__dict__.pop("forward", None)
            if instance_forward is not None:
                module.__dict__["forward"] = instance_forward

        module.__dict__["forward"] = enter_and_call
        try:
            yield
        finally:
            put_back()


def require_computed(*tensors: torch.Tensor) -> None:
    """Compute these tensors, if they are not computed yet. Call it before code reads them without an operation of torch, or later."""
    for mode in _modes.value:
        mode.compute(tensors)


def plain_operations() -> AbstractContextManager[None]:
    """Context manager: read tensors by torch's operations alone, so that what they do not read can wait: in an autograd.Function."""
    return _is_plain.replaced(True)


_modes = OfThread(())  # each `LazyProducts` that is active in this thread
_is_plain = OfThread(False)  # this thread reads tensors by torch's operations alone


@cache
def _kind(op: Any) -> _Kind:
    """Return how an operation treats tensors that are not computed yet."""
    if op in _PRODUCTS:
        return _Kind.PRODUCT
    if op in _SUMS:
        return _Kind.SUM
    if op in _FLOAT8:
        return _Kind.FLOAT8
    if not isinstance(op, torch._ops.OpOverload):
        return _Kind.BARRIER
    schema = op._schema
    if op.namespace != "aten" or schema.is_mutable:  # a changed input would be seen by what is computed later
        return _Kind.BARRIER
    if op is _aten._unsafe_view.default:
        return _Kind.VIEW
    is_view = [each.alias_info is not None for each in schema.returns]
    return _Kind.VIEW if is_view and all(is_view) else _Kind.READS


def _saves_nothing(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether autograd saves none of the tensors that are multiplied or added."""
    first, second = args
    return isinstance(first, torch.Tensor) and (op is _aten.add.Tensor or not isinstance(second, torch.Tensor))


def _empty_result(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor without values, in the shape, dtype and strides of the result of an operation."""
    if op in _FLOAT8:
        left, right, *_ = args
        return left.new_empty((left.shape[0], right.shape[1]), dtype=args[_OUT_DTYPE])
    tensors = list(_tensors(args))
    first, last = tensors[0], tensors[-1]
    if op in _PRODUCTS:  # the factors are the last two tensors, also of addmm; the result is contiguous
        return last.new_empty((*tensors[-2].shape[:-1], last.shape[-1]))
    if first.is_contiguous() and last.is_contiguous() and (first.shape, first.dtype) == (last.shape, last.dtype):
        return first.new_empty(first.shape)
    on_meta = tree_map_only(torch.Tensor, _to_meta, (args, dict(kwargs)))
    like = op(*on_meta[0], **on_meta[1])
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=max(tensors, key=lambda each: each.ndim).device
    )


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, dtype and strides that has no memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's memory; None for a sparse one, which shares none with another tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
