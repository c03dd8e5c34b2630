"""What a block's computation takes on the device: tried there, or found by running it on the meta device.

Devices that can tell what memory is in use are asked. On the meta device, for all others, nothing is computed: storages
are followed from the operation that makes them until Python drops them, as a device's allocator would, and an attention
kernel that keeps its inputs, its output and a number per query and head stands in for the fused ones.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from horizon_lm.model.skeleton import meta_copy
from horizon_lm.model.template import BoundBlock

_FUSED = "horizon_lm_fused"  # in the place of sdpa, flash_attention_2 and our own
_IS_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "varlen")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one computation of a block, its weights, their gradients' slots and its inputs not counted.

    Attributes:
        graph: what its outputs keep for a later backward, themselves included.
        peak: the most that forward and backward hold at once.
    """

    graph: int
    peak: int


def block_footprint(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[Footprint, Any]:
    """The footprint of a block called with arguments of these shapes and dtypes, and its output on the meta device.

    Args:
        block: a decoder block, with weights anywhere.
        args, kwargs: as the model's forward passes them, with tensors on any device.
        dtype: of the weights on the device.
    """
    module = meta_copy(block)
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                owner._parameters[name] = nn.Parameter(param.to(dtype)) if param.is_floating_point() else param
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to("meta")
    args, kwargs = tree_map(_on_meta, (args, kwargs))
    (args[0] if args else kwargs["hidden_states"]).requires_grad_()
    module.train(block.training)
    given = [*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs))]
    with _fused_attention(module), _Storages(given) as storages, torch.enable_grad():
        output = module.forward(*args, **kwargs)
        tensors = _differentiable(output)
        graph = storages.live
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(_drop)  # into its slot
        torch.autograd.backward(tensors, [torch.empty_like(t) for t in tensors])
    return Footprint(graph, storages.peak), _detached(output)


def measured_footprint(
    bound: BoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device,
    meter: AbstractContextManager[Any],
) -> tuple[Footprint, Any]:  # fmt: skip
    """The footprint of a block as its template runs it on a device, compiled if it is; and its output.

    Weights are drawn for it, all of them trainable, whatever the template was bound to before.

    Args:
        bound: the block.
        args, kwargs: as in `block_footprint`, on the device.
        dtype: of the weights.
        meter: gives the bytes in use inside, as ``current`` and ``peak``.
    """
    template = bound.template
    params = {  # plain tensors, as in training: another class would be compiled for again
        name: (0.02 * torch.randn(param.shape, dtype=dtype, device=device)).requires_grad_()
        for name, param in template.module.named_parameters()
    }
    for param in params.values():
        param.register_post_accumulate_grad_hook(_drop)
    template.set_training(bound.training_flags())
    template.bind(bound, params)
    args, kwargs = _detached((args, kwargs))
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden.requires_grad_()
    for _ in range(2):  # the first time, compilers and tuning take memory of their own
        hidden.grad = None
        with meter as used, torch.enable_grad():
            output = template.forward(*args, hooked=False, **kwargs)
            tensors = _differentiable(output)
            graph = used.current
            torch.autograd.backward(tensors, [torch.zeros_like(t) for t in tensors])
            peak = used.peak
        output = _detached(output)
        del tensors
    template.bind(bound, {name: param.detach().to("meta") for name, param in params.items()})  # frees what was drawn
    return Footprint(graph, peak), output


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _drop(param: torch.Tensor) -> None:
    param.grad = None


class _Storages(TorchDispatchMode):
    """Counts the bytes of storages that are made inside, from their first tensor to their last."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live -= num_bytes


class _Fused(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    return _Fused.apply(query, key, value).transpose(1, 2), None


@contextmanager
def _fused_attention(module: nn.Module) -> Iterator[None]:
    """Inside, a copied block's attention is the stand-in, if it was a fused one."""
    from transformers import AttentionInterface

    AttentionInterface.register(_FUSED, _attend)
    for part in module.modules():
        config = part.__dict__.get("config")
        if config is not None and getattr(config, "_attn_implementation", None) in _IS_FUSED:
            config._attn_implementation = _FUSED
    yield
