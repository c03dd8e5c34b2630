"""The state of a forward pass that its backward pass needs: boundaries, leases of buffers, and the autograd anchor.

A boundary is the input of a block, kept from the forward pass to the backward pass: its activation checkpoint.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import EMBED, Unit
from horizon_lm.device.base import Device, Task
from horizon_lm.errors import StreamingError


class Anchor:
    """A tensor that all autograd nodes of a streamed model take as an input, and that depends on the trained
    parameters.

    Nodes do not take the parameters themselves, whose gradients never pass through autograd. Without the anchor, autograd
    would skip a node whose other inputs need no gradient. It depends on the parameters, so that a backward pass restricted
    to one of them reaches our nodes, which reject it. Its sentinel shows whether a backward pass covers the whole graph. One
    anchor serves all forward passes until other parameters are trained.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        # A backward pass that is restricted to some inputs (torch.autograd.grad) does not run the node of this leaf.
        sentinel = torch.zeros((), requires_grad=True)
        self._sentinel = torch.autograd.graph.get_gradient_edge(sentinel).node
        self.tensor: torch.Tensor = _Anchor.apply(sentinel, *params)

    def sees_whole_backward(self) -> bool:
        """Return False in a backward pass restricted to some tensors: ``backward(inputs=...)`` or ``torch.autograd.grad``."""
        return torch._C._will_engine_execute_node(self._sentinel)


class _Anchor(torch.autograd.Function):
    """The autograd node of an anchor, which returns no gradient for any input. The parameters are inputs only so that the anchor
    depends on them for autograd.
    """

    @staticmethod
    def forward(ctx: Any, sentinel: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.num_inputs = 1 + len(params)
        ctx.set_materialize_grads(False)
        return sentinel.detach().clone()  # a new tensor, whose grad_fn is this node

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        # None, and not zeros, which autograd would accumulate into `.grad` beside the gradients that land there.
        return (None,) * ctx.num_inputs


class _Order(torch.autograd.Function):
    """The autograd node of an anchor that comes after other tensors, which get no gradient from it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_inputs = 1 + len(tensors)
        ctx.set_materialize_grads(False)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        return (None,) * ctx.num_inputs


def anchor_after(anchor: torch.Tensor, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return an anchor whose nodes autograd runs before the nodes that have made these tensors."""
    result: torch.Tensor = _Order.apply(anchor, *(each for each in tensors if each.grad_fn is not None))
    return result


def is_executed(node: "weakref.ref[Any]") -> bool:
    """Return whether the backward pass which runs now executes an autograd node, or has executed it; False for a node that is gone."""
    alive = node()
    return alive is not None and torch._C._will_engine_execute_node(alive)


@dataclass(frozen=True, slots=True)
class PassOrder:
    """The units that a pass computes between the outer parameters and the head.

    Attributes:
        units: the embedding, unless the caller passes ``inputs_embeds``, and the blocks, in the order in which they are computed.
        differentiated: blocks that gradients flow through if a backward pass follows.
        absent: blocks that only other ranks have inputs for. This rank takes part in moving their weights and gradients.
    """

    units: tuple[Unit, ...]
    differentiated: frozenset[int]
    absent: frozenset[int] = frozenset()


class ForwardState:
    """The state of a recorded forward pass. Autograd's nodes refer to it; its buffers are freed with the last node.

    Attributes:
        version: version of the weights used in the forward pass.
        order: the units that are computed.
        keeps: blocks whose boundary is kept.
        trained: full names of the parameters that were trained, by unit.
        config: the model's config, as comparable values.
        anchor: the input shared by all autograd nodes of the forward pass.
        graphs: blocks whose autograd graph is kept on the device, so that they are not recomputed.
        boundaries: buffers in host memory, by block; a boundary takes the first bytes of its buffer.
        boundary_bytes: bytes of each boundary.
        nodes: autograd nodes of blocks on whose output a loss may not depend. They refer to this object, so it refers to them weakly.
        offloads: the copies of boundaries to host memory, by block.
        has_head_grads: the head's gradients were computed in this forward pass and are in the head's buffer.
        consumed: the backward pass has run, or a fault or other options made it impossible.
        given_up: the engine was given other options since.
    """

    def __init__(
        self, version: int, order: PassOrder, trained: dict[Unit, list[str]], config: Any, anchor: Anchor
    ) -> None:
        self.version = version
        self.order, self.keeps = order, order.differentiated
        self.trained = trained
        self.config = config
        self.anchor = anchor
        self.graphs: frozenset[int] = frozenset()
        self.boundaries: dict[int, torch.Tensor] = {}
        self.boundary_bytes: dict[int, int] = {}
        self.nodes: dict[int, weakref.ref[Any]] = {}
        self.offloads: dict[int, Task] = {}
        self.has_head_grads = False
        self.consumed = self.given_up = False

    def boundary(self, block: int) -> torch.Tensor:
        """Return the host copy of a block's boundary, as bytes."""
        return self.boundaries[block][: self.boundary_bytes[block]]

    def executed(self) -> list[Unit]:
        """Return the embedding and the blocks that the backward pass which runs now differentiates, in the order of the forward pass."""
        return [unit for unit in self.order.units if unit == EMBED or self._is_executed(unit.block_index)]

    def _is_executed(self, block: int) -> bool:
        """Return whether the backward pass which runs now differentiates a block."""
        return is_executed(self.nodes[block]) if block in self.nodes else block in self.keeps

    def check_usable(self, version: int, config: Any) -> None:
        """Raise StreamingError if the backward pass would compute wrong gradients.

        Args:
            version: the current version of the weights.
            config: the model's current config, as comparable values.
        """
        if self.given_up:
            raise StreamingError(
                "the model was given other options between this forward pass and its backward pass, by a smaller micro-batch or by the "
                "first call of run_together. Call backward before, or set device_micro_batch_size when the model is streamed."
            )
        if self.consumed:
            raise StreamingError(
                "backward was called a second time on the same forward pass. A streamed model frees its activation "
                "checkpoints, so retain_graph has no effect: call the model again, or add the losses and call backward once."
            )
        if self.version != version:
            raise StreamingError(
                "the weights were changed between this forward pass and its backward pass, so its gradients would mix two sets "
                "of weights. Call backward before optimizer.step(), and before weights are edited."
            )
        if self.config != config:
            raise StreamingError(
                "the model's config was changed between this forward pass and its backward pass, which recomputes the "
                "blocks; change it (set_attn_implementation, for example) before the forward pass"
            )


class BufferLease:
    """A resource that only one forward pass at a time can use, until its backward pass is over or it is dropped."""

    def __init__(self) -> None:
        self._holder: weakref.ref[ForwardState] | None = None

    @property
    def holder(self) -> ForwardState | None:
        """The forward pass that uses the resource; None if it is free."""
        forward_state = self._holder() if self._holder is not None else None
        return None if forward_state is None or forward_state.consumed else forward_state

    def take(self, forward_state: ForwardState) -> None:
        """Give the resource to a forward pass. The reference is weak, so a dropped forward pass returns the resource."""
        self._holder = weakref.ref(forward_state)

    def release(self) -> None:
        """Take the resource back."""
        self._holder = None


class BoundaryPool:
    """Host memory for boundaries: equal buffers for each list of blocks, as large as the largest batch needs.

    One buffer per block thus serves batches of every length, and page-locked memory does not grow with the variety of
    lengths. If a forward pass is dropped while a boundary is being copied, the buffer is reused only after that copy.

    Args:
        device: the device.
        lists: the indices of the blocks of each list.
    """

    def __init__(self, device: Device, lists: Sequence[range]) -> None:
        self._device, self._lists = device, lists
        self._sizes = dict.fromkeys(lists, 0)  # size of each buffer in bytes, by list
        # Free buffers, each with the last copy to it, by list.
        self._free: dict[range, list[tuple[torch.Tensor, Task | None]]] = {each: [] for each in lists}
        self._is_closed = False
        self.num_bytes = 0

    def take(self, forward_state: ForwardState, block: int, num_bytes: int, largest: int = 0) -> torch.Tensor:
        """Return the first bytes of a uint8 buffer, which returns to the pool when the forward pass's state is freed.

        Args:
            forward_state: the forward pass that uses the buffer.
            block: the block whose boundary it stores.
            num_bytes: size of the boundary in bytes.
            largest: size in bytes that later batches will need, if known, so that buffers need not be replaced.
        """
        blocks = self._list_of(block)
        size = self._sizes[blocks] = max(self._sizes[blocks], num_bytes, largest)
        buffer = self._take_free(self._free[blocks], size)
        if buffer is None:
            buffer = self._device.host_buffer(size)
            self.num_bytes += size
        if not forward_state.boundaries:
            # The finalizer takes the dictionaries, because an argument that refers to the state would keep it alive.
            # At exit there is no pass left that could use the buffers.
            weakref.finalize(
                forward_state, self._give_back, forward_state.boundaries, forward_state.offloads
            ).atexit = False
        forward_state.boundaries[block], forward_state.boundary_bytes[block] = buffer, num_bytes
        return forward_state.boundary(block)

    def _list_of(self, block: int) -> range:
        """Return the list that a block is in."""
        return next(each for each in self._lists if block in each)

    def _take_free(self, free: list[tuple[torch.Tensor, Task | None]], size: int) -> torch.Tensor | None:
        """Remove a buffer of at least this size from the free ones of a list of blocks, and return it, or None. Smaller buffers are freed
        for good on the way.
        """
        is_idle = False
        while free:
            buffer, task = free.pop()
            if buffer.numel() >= size:
                if task is not None:
                    self._device.wait([task])
                return buffer
            if not is_idle:  # a backward pass may be fetching from it
                self._device.synchronize()
                is_idle = True
            self._free_host(buffer)
        return None

    def _free_host(self, buffer: torch.Tensor) -> None:
        """Free a buffer for good."""
        self._device.free_host(buffer)
        self.num_bytes -= buffer.numel()

    def close(self) -> None:
        """Free all buffers: those that are in use once they are given back. The device must be idle, and stay so."""
        self._is_closed = True
        for free in self._free.values():
            while free:
                buffer, _ = free.pop()
                self._free_host(buffer)

    def release(self, forward_state: ForwardState) -> None:
        """Take back a failed forward pass's buffers now, because a traceback may keep its state alive for a long time."""
        self._give_back(forward_state.boundaries, forward_state.offloads)

    def _give_back(self, boundaries: dict[int, torch.Tensor], offloads: dict[int, Task]) -> None:
        """Take back the buffers of a forward pass, each with its last copy (`ForwardState.offloads`), and empty ``boundaries``."""
        while boundaries:
            block, buffer = boundaries.popitem()
            if self._is_closed:  # the device is idle for good (`close`), so no copy is running
                self._free_host(buffer)
            else:
                self._free[self._list_of(block)].append((buffer, offloads.get(block)))


class BetweenPasses:
    """State that a pass leaves for later passes.

    Attributes:
        head_grads_lease, graphs_lease: the leases of the head's gradient buffer, and of the room for autograd graphs.
        recorded: the states of forward passes, as long as a backward pass may follow.
        structure: kept blocks, residency and trained parameters of the last recorded pass; empty before the first one.
        outer_version: version of the outer parameters on the device; -1 if they have to be streamed in again.
        resident_versions: version of each resident block on the device; a block without one has to be streamed in again.
        after_grad: parameters with hooks to call when autograd's graph is finished.
    """

    def __init__(self) -> None:
        self.head_grads_lease, self.graphs_lease = BufferLease(), BufferLease()
        self.recorded: weakref.WeakSet[ForwardState] = weakref.WeakSet()
        self.structure: tuple[Any, ...] = ()
        self.outer_version = -1
        self.resident_versions: dict[int, int] = {}
        self.after_grad: dict[str, None] = {}
        self._anchor: Anchor | None = None

    def anchor_of(self, params: list[nn.Parameter]) -> Anchor:
        """Return the anchor of the trained parameters: the last anchor, unless it belongs to other parameters."""
        # By identity. The anchor holds its parameters, so no other one can have got their ids.
        if self._anchor is None or list(map(id, params)) != list(map(id, self._anchor.params)):
            with torch.enable_grad():
                self._anchor = Anchor(params)
        return self._anchor

    def awaits_backward(self) -> bool:
        """Return whether the backward pass of a recorded forward pass has not run yet."""
        return not all(state.consumed for state in self.recorded)

    def give_up_recorded(self) -> None:
        """Let no backward pass of an earlier forward pass begin: what it keeps on the device is freed or placed otherwise."""
        for state in self.recorded:
            if not state.consumed:
                state.consumed = state.given_up = True

    def forget_weights(self) -> None:
        """Stream the outer parameters and the resident blocks in again with the next pass."""
        self.outer_version, self.resident_versions = -1, {}
