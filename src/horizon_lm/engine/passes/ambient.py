"""Compute with the settings of another thread, or of an earlier time.

A recompute with other settings than those of the forward pass would be silently wrong: outside of autocast it would compute in float32
what the forward pass computed in bfloat16.
"""

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

from horizon_lm.model import capture

T = TypeVar("T")
_DEVICE_TYPES = ("cpu", "cuda")


class Ambient(ABC):
    """The settings at the time of construction that the results of a computation depend on, besides its random state."""

    def __init__(self, variables: contextvars.Context, autocast_cache: bool) -> None:
        self._variables, self._autocast_cache = variables, autocast_cache
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in _DEVICE_TYPES]

    @abstractmethod
    def _enter(self, stack: ExitStack) -> None:
        """Enter, on the stack, the contexts that this kind of computation needs besides context variables and autocast."""

    def run(self, function: Callable[[], T]) -> T:
        """Call a function with these settings and return its result."""

        def call() -> T:
            with ExitStack() as stack:
                for device_type, enabled, dtype in self._autocast:
                    current = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
                    if current != (enabled, dtype):
                        stack.enter_context(torch.autocast(device_type, dtype, enabled, self._autocast_cache))
                self._enter(stack)
                return function()

        # A copy, because a context can be entered once at a time, and the members of a lock-step share this one.
        return self._variables.copy().run(call)


class ThreadAmbient(Ambient):
    """The settings for a computation in another thread, while this one waits: also those that torch keeps for each thread."""

    def __init__(self) -> None:
        super().__init__(contextvars.copy_context(), torch.is_autocast_cache_enabled())
        self._grad, self._num_threads = torch.is_grad_enabled(), torch.get_num_threads()
        self._device = torch.get_default_device()
        # A caller in a lock-step on another stream would compute beside the events that order computation and copies.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def _enter(self, stack: ExitStack) -> None:
        # Each thread has its own number, and sums of another number of threads have other bits.
        torch.set_num_threads(self._num_threads)
        if self._device != torch.get_default_device():
            stack.enter_context(self._device)
        if self._stream is not None:
            # A thread begins on the first GPU. Going back to it, as the stream does at its end, would make a context there.
            torch.cuda.set_device(self._stream.device)
            stack.enter_context(torch.cuda.stream(self._stream))
        stack.enter_context(torch.set_grad_enabled(self._grad))


class RecomputeAmbient(Ambient):
    """The settings for a recompute, whose thread and stream autograd chooses: also the kernels of attention, which all threads share."""

    def __init__(self) -> None:
        super().__init__(capture.copy_context(), autocast_cache=False)
        self._attention = _attention_kernels()

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(no_autocast_cache())
        before = _attention_kernels()
        if before != self._attention:
            stack.callback(_set_attention_kernels, *before)
            _set_attention_kernels(*self._attention)


def _attention_kernels() -> tuple[list[SDPBackend], list[int]]:
    """Return which kernels of torch's attention are enabled, and the order in which torch tries them."""
    return _cur_sdpa_kernel_backends(), torch._C._get_sdp_priority_order()


def _set_attention_kernels(enabled: list[SDPBackend], order: list[int]) -> None:
    """Enable these kernels and set their order, both as returned by `_attention_kernels`."""
    _sdpa_kernel(enabled)
    torch._C._set_sdp_priority_order(order)


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Context manager: turn off autocast's cache. It keeps the cast of a tensor, but the tensor of a slot has other weights later."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context manager: leave inference mode, without recording gradients. Tensors made in it, such as the parameters of new
    adapters or copies of buffers, could not be used by later training steps.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
