"""Measure the memory and work of a block's computation, and find the weights that its forward pass writes."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from horizon_lm.model.block_template import StreamedBlock, structure_key
from horizon_lm.model.float8.casting import cast_tensors
from horizon_lm.model.float8.layers import casting, float8_layers
from horizon_lm.model.lazy_products import LazyProducts
from horizon_lm.model.outer_trial import OuterTrial
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.planning.arithmetic.outline import Footprint, Work
from horizon_lm.planning.measure.meta_recorder import Recorder, recording, uncounted


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The cost of a block's forward and backward pass, as measured on the meta device.

    Attributes:
        footprint: bytes of activations.
        forward_peak: peak bytes of a forward pass without a graph.
        forward, recompute, backward: work of a forward pass, of a recompute (`LazyProducts`), and of a backward pass with an
            existing graph.
        casts: work of casting weights to FP8, for a forward and a backward pass.
        output: output of the block, on the meta device.
    """

    footprint: Footprint
    forward_peak: int
    forward: Work
    recompute: Work
    backward: Work
    casts: Work
    output: Any


def run_on_meta(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, accelerated: bool = False,
    in_float32: Collection[str] = (),
) -> BlockRun:  # fmt: skip
    """Run a block with arguments of these shapes and dtypes on the meta device.

    Args:
        block: decoder block, with weights on any device.
        args, kwargs: arguments as passed by the model, with tensors on any device.
        dtype: dtype of the weights on the device.
        accelerated: assume the kernels of a GPU.
        in_float32: weights in float32 nevertheless, by their names inside the block.
    """
    return measure(*copy_on_meta(block, args, kwargs, dtype, in_float32), accelerated)


def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], accelerated: bool) -> BlockRun:
    """Run a module on the meta device, forward and backward, and measure it. `copy_on_meta` returns it and its arguments."""
    with _casting_on_meta(module) as casts:
        return _measure(module, args, kwargs, accelerated, casts)


class _Casts(NamedTuple):
    """Weights that are cast to FP8, the peak bytes meanwhile, and the work of casting them."""

    tensors: list[torch.Tensor]
    peak: int
    work: Work

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


@contextmanager
def _casting_on_meta(module: nn.Module) -> Iterator[_Casts]:
    """Context manager: cast the weights of a module on the meta device that it multiplies in FP8."""
    with ExitStack() as stack:
        with Recorder(()) as recorder:
            stack.enter_context(casting(float8_layers(module), differentiates=True))
        tensors = [tensor for each in module.modules() for tensor in cast_tensors(each)]
        yield _Casts(tensors, recorder.peak, recorder.work)


def _measure(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], accelerated: bool, casts: _Casts
) -> BlockRun:
    """Measure a module as `measure` does, after its weights are cast. Its parameters keep hooks that drop their gradients."""
    uncounted_tensors = args, kwargs, casts.tensors
    with recording(module, uncounted_tensors, accelerated=accelerated) as recorder, torch.enable_grad():
        output = module.forward(*args, **kwargs)
        tensors = _differentiable(output)
        graph, forward = recorder.live, recorder.work
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_drop_grad)  # slots for gradients are counted elsewhere
        torch.autograd.backward(tensors, [torch.empty_like(t) for t in tensors])
    with recording(module, uncounted_tensors, accelerated=accelerated) as without_graph, torch.no_grad():
        module.forward(*args, **kwargs)
    recompute = forward - _unread_work(module, args, kwargs, accelerated)
    backward = recorder.work - forward
    # The cast weights are counted as ``casts``, so of the peak of casting only what exceeds them counts.
    footprint = Footprint(graph, max(recorder.peak, casts.peak - casts.num_bytes), casts=casts.num_bytes)
    forward_peak = without_graph.peak + casts.num_bytes
    return BlockRun(footprint, forward_peak, forward, recompute, backward, casts.work, _detached(output))


def _unread_work(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], accelerated: bool) -> Work:
    """Return the work of the products of a forward pass whose results nobody reads; a recompute leaves them out."""
    products = LazyProducts()
    with uncounted(module, accelerated), torch.enable_grad(), products:
        module.forward(*args, **kwargs)
    unread = Recorder(())
    with unread:
        for call in products.left_out:
            call.op(*call.args, **call.kwargs)
    return unread.work


def output_on_meta(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype,
    in_float32: Collection[str] = (),
) -> Any:  # fmt: skip
    """Return the output of a block on the meta device. The arguments are those of `run_on_meta`."""
    module, args, kwargs = copy_on_meta(block, args, kwargs, dtype, in_float32)
    with recording(module, args, kwargs, accelerated=False), torch.no_grad():
        return module.forward(*args, **kwargs)


def copy_on_meta(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype,
    in_float32: Collection[str] = (),
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return a copy of a block on the meta device, with weights in these dtypes, and its arguments there; hidden states are differentiable.
    The arguments are those of `run_on_meta`.
    """
    module = meta_copy(block)
    module.__dict__.pop("forward", None)  # the forward override of a streamed block
    for path, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is not None:
                own_dtype = torch.float32 if f"{path}.{name}".lstrip(".") in in_float32 else dtype
                moved = param.to(own_dtype) if param.is_floating_point() else param
                owner._parameters[name] = nn.Parameter(moved, param.requires_grad)
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to("meta")
    args, kwargs = tree_map(_leaf_on_meta, (args, kwargs))
    (args[0] if args else kwargs["hidden_states"]).requires_grad_()
    module.train(block.training)
    return module, args, kwargs


def measured_footprint(
    block: StreamedBlock, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device,
    meter: AbstractContextManager[Any], in_float32: Collection[str] = (),
) -> tuple[Footprint, Any]:  # fmt: skip
    """Measure the footprint of a block on a device, compiled if the block is compiled; also return its output.

    The weights are random.

    Args:
        block: the block.
        args, kwargs: arguments as in `run_on_meta`, on the device.
        dtype: dtype of the weights.
        device: device to measure on.
        meter: context manager that measures bytes in use as ``current`` and ``peak``.
        in_float32: as in `run_on_meta`.
    """
    params = {}  # plain tensors, as in training: torch.compile would recompile for a different tensor class
    for name, param in block.module.named_parameters(remove_duplicate=False):
        own_dtype = torch.float32 if name in in_float32 else dtype
        params[name] = 0.02 * torch.randn(param.shape, dtype=own_dtype, device=device)
        if param.requires_grad:
            params[name].requires_grad_().register_post_accumulate_grad_hook(_drop_grad)
    args, kwargs = _detached((args, kwargs))
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden.requires_grad_()
    for _ in range(2):  # compilation and autotuning allocate memory in the first round
        hidden.grad = None
        with meter as used, torch.enable_grad(), block.bound(params):
            output = block.forward(*args, uncompiled=block.is_hooked(), **kwargs)
            tensors = _differentiable(output)
            graph = used.current
            torch.autograd.backward(tensors, [torch.zeros_like(t) for t in tensors])
            peak = used.peak
            casts = sum(tensor.nbytes for each in block.module.modules() for tensor in cast_tensors(each))
        output = _detached(output)
        del tensors
    return Footprint(graph - casts, peak - casts, casts=casts), output


def _detached(nested: Any) -> Any:
    """Return nested values with their tensors detached."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, nested)


def _differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output that have a graph."""
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]


def _leaf_on_meta(leaf: Any) -> Any:
    """Return a tensor of the same shape on the meta device, and anything else as it is. The bounds of images (N,) keep their values, because
    blocks of towers cut their inputs there.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_bounds = leaf.ndim == 1 and leaf.dtype == torch.int32
    return leaf.cpu() if is_bounds else torch.empty_like(leaf, device="meta")


def _drop_grad(param: torch.Tensor) -> None:
    """Free the gradient of a parameter as soon as it is there."""
    param.grad = None


_WRITES_NO_VALUES = "requires_grad_"  # PEFT sets it where it adapts stacked experts
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


def find_written(parts: ModelParts, trial: OuterTrial | None) -> Mapping[int, frozenset[str]]:
    """Return the weights that blocks may write in a forward pass in training: for each block that does, names inside it.

    ``trial`` has called the blocks; without one nothing is found.
    """
    if trial is None:
        return {}
    written_by_kind: dict[Any, frozenset[str]] = {}
    written = {}
    for index, call in trial.calls.items():
        module = parts.blocks[index]
        kind = structure_key(module)
        if kind not in written_by_kind:
            written_by_kind[kind] = _written(module, *call)
        if written_by_kind[kind]:
            written[index] = written_by_kind[kind]
    return written


def _written(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Return the weights that the forward pass of a block writes in place, by name; they have to be brought back to host memory."""
    module, args, kwargs = copy_on_meta(block, args, kwargs, torch.float32)
    module.train()
    watch = _WriteWatch(module)
    try:
        with uncounted(module), watch, torch.no_grad():
            module.forward(*args, **kwargs)
    except Exception:  # the block cannot run on the meta device: only its writes up to here are known
        pass
    return frozenset(watch.written)


class _WriteWatch(TorchFunctionMode):
    """A mode that records which parameters of a module torch's functions write to, also through their ``data``.

    Attributes:
        written: the names of these parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.written: set[str] = set()
        self._names = {param.untyped_storage()._cdata: name for name, param in module.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != _WRITES_NO_VALUES)
        if writes and args and isinstance(args[0], torch.Tensor):
            storage = args[0].untyped_storage()._cdata
            if storage in self._names:
                self.written.add(self._names[storage])
        return func(*args, **(kwargs or {}))
