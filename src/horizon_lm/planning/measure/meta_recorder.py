"""Run code on the meta device to find its memory and work; nothing is computed, and no weights are needed.

Storages are tracked from the operation that creates them until Python frees them, as a device's allocator would, and the
operations and bytes of each kernel are added up. Code without a meta kernel has a stand-in: fused attention keeps its inputs,
its output and one number per query and head; a grouped product of experts is one product over all routed tokens.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from horizon_lm.model import attention_with_sinks
from horizon_lm.model.sink_attention import add_sinks, grad_of_sinks
from horizon_lm.planning.arithmetic.outline import Work

_STAND_IN = "horizon_lm_fused"  # the name under which transformers finds the stand-in kernels
_FUSED = ("flash_attention_2", "flash_attention_3", "flex_attention", "varlen", attention_with_sinks.NAME)
_BACKWARD = 2.5  # work of a fused backward pass, relative to its forward pass (Dao, "FlashAttention-2", section 4.1)


class Recorder(TorchDispatchMode):
    """Context manager: record the memory and work of operations on meta tensors.

    Args:
        given: existing tensors, in nested structures, which are not counted.
        device: the device whose tensors are counted. On the CPU, where values decide shapes, matrix products are not computed: their
            results are zeros.

    Attributes:
        live, peak: bytes of the storages that were created while recording, now and at their peak.
        work: work of all operations so far.
    """

    def __init__(self, given: Any, device: str = "meta") -> None:
        super().__init__()
        self._device = device
        self.live = self.peak = 0
        self.work = Work()
        self._followed = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = (_run if self._device == "meta" else _run_without_products)(func, args, kwargs)
        results, inputs = _tensors(result), _tensors((args, kwargs))
        if not _is_view(func, results, inputs):
            self._count(func, args, kwargs, result, [*inputs, *results])
        for tensor in results:
            if tensor.device.type == self._device:
                self._follow(tensor.untyped_storage())
        return result

    def attend(self, operations: float) -> None:
        """Count a fused attention kernel."""
        self.work += Work(attention=operations, num_ops=1)

    def multiply(self, operations: float, tensors: list[torch.Tensor]) -> None:
        """Count a matrix product kernel with these inputs and results."""
        self.work += Work(products=operations, product_bytes=_num_bytes(tensors), num_ops=1)

    def _multiply_in_float8(self, operations: float, tensors: list[torch.Tensor]) -> None:
        """Count a matrix product kernel of operands in FP8."""
        self.work += Work(float8=operations, product_bytes=_num_bytes(tensors), num_ops=1)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[torch.Tensor]) -> None:
        """Count an operation: as a matrix product if torch knows its FLOPs, else as bytes that it moves."""
        packet = func._overloadpacket
        if packet in flop_registry:
            multiply = self._multiply_in_float8 if packet is torch.ops.aten._scaled_mm else self.multiply
            multiply(float(flop_registry[packet](*args, **kwargs, out_val=result)), tensors)
        elif not func._schema.name.startswith(_MOVES_NOTHING):
            self.work += Work(moved_bytes=_num_bytes(tensors), num_ops=1)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage until it is freed."""
        if storage._cdata not in self._followed:
            self._followed.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._note_freed, storage._cdata, storage.nbytes())

    def _note_freed(self, address: int, num_bytes: int) -> None:
        """Count a storage as freed. From now on, another storage may get its address."""
        self._followed.discard(address)
        self.live -= num_bytes


_MOVES_NOTHING = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense")


_MAX_RESULTS = 10_000  # operations of some dozen models
# Shape, strides and dtype of results, by operation and arguments.
_results: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the meta device, or make a result like that of an equal one.

    torch derives shapes in Python, which takes most of the time of a trial.
    """
    key = (func, *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items()))
    if key in _results:
        shape, strides, dtype = _results[key]
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.device.type == "meta" and _is_new(func, result, (args, kwargs)):
        if len(_results) == _MAX_RESULTS:
            _results.clear()
        _results[key] = result.shape, result.stride(), result.dtype
    return result


def _run_without_products(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; return zeros in place of the result of a matrix product on the CPU."""
    if func._overloadpacket not in flop_registry or any(t.device.type == "meta" for t in _tensors((args, kwargs))):
        return func(*args, **kwargs)
    on_meta = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
    return tree_map(
        lambda leaf: torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf, on_meta
    )


def _as_meta(value: Any) -> Any:
    """Return a tensor of the same shape, strides and dtype on the meta device, and anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _signature(value: Any) -> Any:
    """Return a hashable description of an argument, with all that the result's shape depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), value


def _is_new(func: Any, result: torch.Tensor, given: Any) -> bool:
    """Return whether an operation has no effect but a new tensor, which `torch.empty_strided` could have made."""
    storage, declared = result.untyped_storage(), (*func._schema.arguments, *func._schema.returns)
    alike = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return (
        not any(each.alias_info for each in declared)
        and all(t.untyped_storage()._cdata != storage._cdata for t in _tensors(given))
        and storage.nbytes() == alike.untyped_storage().nbytes()
    )


def _is_view(func: Any, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    """Return whether an operation only returned views of its inputs, which costs nothing."""
    if func._schema.is_mutable:
        return False
    storages = {t.untyped_storage()._cdata for t in inputs}
    return bool(results) and all(t.untyped_storage()._cdata in storages for t in results)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _tensors(nested: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results of an operation."""
    # These are nested in tuples, lists and dictionaries alone. `tree_leaves` knows more, and took a fifth of the time of an outline.
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, list | tuple):
        return []
    return [tensor for each in nested for tensor in _tensors(each)]


@contextmanager
def recording(module: nn.Module, *given: Any, accelerated: bool) -> Iterator[Recorder]:
    """Context manager: run a module on the meta device, with stand-ins for code that cannot run there.

    Args:
        module: a copy, whose attention implementation is changed permanently.
        given: existing tensors other than its parameters and buffers.
        accelerated: assume the kernels of a GPU.
    """
    recorder = Recorder([*module.parameters(), *module.buffers(), given])
    with _stand_ins(module, recorder, accelerated), recorder:
        yield recorder


@contextmanager
def uncounted(module: nn.Module, accelerated: bool = False) -> Iterator[None]:
    """Context manager: run a module on the meta device as `recording` does, without the cost of counting."""
    with _stand_ins(module, Recorder(()), accelerated):
        yield


@contextmanager
def _stand_ins(module: nn.Module, recorder: Recorder, accelerated: bool) -> Iterator[None]:
    """Context manager: replace all code that cannot run on the meta device, or whose kernels on a GPU are others."""
    attention = _ScaledDotProduct(recorder, accelerated)
    with _fused_attention(module, recorder), _experts(recorder), _no_autocast(), attention:
        yield


# Attention


class _Fused(torch.autograd.Function):
    """A stand-in for fused attention that keeps the same tensors: query, key, value (B, heads, T, D), output,
    mask, and sinks (heads,), whose own operations are counted as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        sinks: torch.Tensor | None, recorder: Recorder, pairs: float,
    ) -> torch.Tensor:  # fmt: skip
        rows, heads, _, width = query.shape
        output = _output_like(query, value.shape[-1])
        per_query = query.new_empty(query.shape[:-1], dtype=torch.float32)  # log-sum-exp, (B, heads, T)
        if sinks is not None:
            by_token, per_query = output.transpose(1, 2), per_query.transpose(1, 2).unsqueeze(-1)
            per_query = add_sinks(by_token, per_query, sinks)[1]  # the log-sum-exp with sinks replaces the one without
        ctx.save_for_backward(query, key, value, output, per_query, mask, sinks)
        ctx.recorder, ctx.operations = recorder, 2.0 * rows * heads * pairs * (width + value.shape[-1])
        recorder.attend(ctx.operations)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, per_query, _, sinks = ctx.saved_tensors
        ctx.recorder.attend(_BACKWARD * ctx.operations)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        of_sinks = None
        if ctx.needs_input_grad[4]:
            of_sinks = grad_of_sinks(grad.transpose(1, 2), output.transpose(1, 2), per_query, sinks)
        return *grads, None, of_sinks, None, None


def _output_like(query: torch.Tensor, width: int) -> torch.Tensor:
    """Return an output with the memory layout of the query (B, heads, T, D), like the kernels."""
    if width == query.shape[-1]:
        return torch.empty_like(query)
    rows, heads, length, _ = query.shape
    return query.new_empty((rows, length, heads, width)).transpose(1, 2)


def _pairs(length: int, window: int | None) -> float:
    """Return the number of query-key pairs in causal attention, with or without a sliding window."""
    window = min(window or length, length)
    return window * length - window * (window - 1) / 2


class _ScaledDotProduct(TorchFunctionMode):
    """A mode that runs torch's scaled dot-product attention as one fused kernel, not as many operations."""

    def __init__(self, recorder: Recorder, accelerated: bool) -> None:
        super().__init__()
        self._recorder, self._accelerated = recorder, accelerated

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if not self._accelerated and (dropout or query.shape[-1] != value.shape[-1]):
            return func(*args, **kwargs)  # torch has no fused kernel for these cases on a CPU
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # kernels add the mask to the scores
        causal = kwargs.get("is_causal") and query.shape[2] == key.shape[2]
        pairs = _pairs(query.shape[2], None) if causal else float(query.shape[2] * key.shape[2])
        return _Fused.apply(query, key, value, mask, None, self._recorder, pairs)


@contextmanager
def _fused_attention(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Context manager: replace kernels that transformers looks up by name and that skip tokens outside of a window. The configs
    are not set back, because ``module`` is a copy.
    """
    from transformers import AttentionInterface

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        """Return an output (B, T, heads, D), as transformers calls a kernel."""
        pairs, sinks = _pairs(query.shape[2], kwargs.get("sliding_window")), kwargs.get("s_aux")
        if isinstance(mask, torch.Tensor):  # the kernel skips nothing; flex_attention has no tensor, and skips blocks
            pairs = float(query.shape[2] * key.shape[2])
        else:
            mask = None
        sinks = None if sinks is None else sinks.float()
        return _Fused.apply(query, key, value, mask, sinks, recorder, pairs).transpose(1, 2), None

    AttentionInterface.register(_STAND_IN, attend)
    configs = {id(c): c for part in module.modules() if (c := part.__dict__.get("config")) is not None}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) in _FUSED:
            config._attn_implementation = _STAND_IN
    yield


# Experts


class _Grouped(torch.autograd.Function):
    """A stand-in for a grouped product that keeps tokens (S, I), sorted by expert, and weight (E, I, O), like the original."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, recorder: Recorder
    ) -> torch.Tensor:
        output = tokens.new_empty(tokens.shape[0], weight.shape[2])
        # The grouped product of compiled blocks in other dtypes computes the gradient of a frozen weight, too.
        kept = tokens if ctx.needs_input_grad[1] or weight.dtype != torch.bfloat16 else None
        ctx.save_for_backward(kept, weight, offsets)
        ctx.recorder, ctx.operations = recorder, 2.0 * tokens.shape[0] * weight.shape[1] * weight.shape[2]
        recorder.multiply(ctx.operations, [tokens, weight, offsets, output])
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        tokens, weight, offsets = ctx.saved_tensors
        of_tokens = grad.new_empty(grad.shape[0], weight.shape[1])
        ctx.recorder.multiply(ctx.operations, [weight, offsets, grad, of_tokens])
        of_weight = None
        if tokens is not None:
            of_weight = torch.empty_like(weight)
            ctx.recorder.multiply(ctx.operations, [tokens, offsets, grad, of_weight])
        return of_tokens, of_weight, None, None


def _experts(recorder: Recorder) -> AbstractContextManager[Any]:
    """Context manager: replace the grouped matrix products of experts by a stand-in.

    On the meta device, torch's grouped product supports only bf16, and transformers' fallback has no backward pass
    before version 5.23.
    """
    from transformers.integrations import moe

    def multiply(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return _Grouped.apply(input.to(weight.dtype), weight, offs, recorder)

    return patch.object(moe, "_grouped_mm", multiply)


# Autocast


def _no_autocast() -> AbstractContextManager[Any]:
    """Context manager: let code switch autocast off on the meta device, for which torch has none.

    PEFT does so around the adapters of stacked experts.
    """
    original: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else original(device_type, *args, **kwargs)

    return patch.object(torch, "autocast", autocast)
