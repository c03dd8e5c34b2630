"""Compute with the settings of another thread, or of an earlier time.

A recompute with other settings than those of the forward pass would be silently wrong: outside of autocast it would compute in float32
what the forward pass computed in bfloat16.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

from horizon_lm.model import capture

T = TypeVar("T")
_DEVICE_TYPES = ("cpu", "cuda")


class Ambient:
    """The settings at the time of construction that the results of a computation depend on, besides its random state.

    These are context variables and autocast, and others of two kinds: those that torch keeps for each thread, for a computation
    in another thread meanwhile; or attention kernels, which are the same for all threads, for one that comes later. The latter
    is a recompute, for which autograd has chosen thread and stream.

    Args:
        later: the computation comes later.
    """

    def __init__(self, later: bool = False) -> None:
        self._variables = capture.copy_context() if later else contextvars.copy_context()
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in _DEVICE_TYPES]
        # For a recompute without a cache, for the reason given in `no_autocast_cache`.
        self._autocast_cache = not later and torch.is_autocast_cache_enabled()
        self._enter_others = _attention() if later else _of_thread()

    def run(self, function: Callable[[], T]) -> T:
        """Call a function with these settings and return its result."""

        def call() -> T:
            with ExitStack() as stack:
                for device_type, enabled, dtype in self._autocast:
                    current = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
                    if current != (enabled, dtype):
                        stack.enter_context(torch.autocast(device_type, dtype, enabled, self._autocast_cache))
                self._enter_others(stack)
                return function()

        # A copy, because a context can be entered once at a time, and the members of a lock-step share this one.
        return self._variables.copy().run(call)


def _of_thread() -> Callable[[ExitStack], None]:
    """Return a function that enters the settings which torch keeps for each thread, and which this one has now."""
    grad, num_threads, device = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device()
    # A member of a lock-step on another stream would compute beside the events that order computation and copies.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter(stack: ExitStack) -> None:
        # Each thread has its own number, and sums of another number of threads have other bits.
        torch.set_num_threads(num_threads)
        if device != torch.get_default_device():
            stack.enter_context(device)
        if stream is not None:
            # A thread begins on the first GPU. Going back to it, as the stream does at its end, would make a context there.
            torch.cuda.set_device(stream.device)
            stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.set_grad_enabled(grad))

    return enter


def _attention() -> Callable[[ExitStack], None]:
    """Return a function that enables those kernels of torch's attention that are enabled now."""
    kernels = _attention_kernels()

    def enter(stack: ExitStack) -> None:
        before = _attention_kernels()
        if before != kernels:
            stack.callback(_set_attention_kernels, *before)
            _set_attention_kernels(*kernels)

    return enter


def _attention_kernels() -> tuple[list[SDPBackend], list[int]]:
    """Return which kernels of torch's attention are enabled, and the order in which torch tries them."""
    return _cur_sdpa_kernel_backends(), torch._C._get_sdp_priority_order()


def _set_attention_kernels(enabled: list[SDPBackend], order: list[int]) -> None:
    """Set what `_attention_kernels` has returned."""
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
