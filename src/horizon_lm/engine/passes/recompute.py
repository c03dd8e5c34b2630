"""Record the context of a block's forward pass, so that it is recomputed in the same context.

A recompute in another context would be silently wrong: another random state changes dropout, and a backward pass
outside of autocast would compute in float32 what the forward pass computed in bfloat16.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

from horizon_lm.device.base import Device, same_rng_state
from horizon_lm.model import capture

_OUTSIDE = 1 << 61  # tells the seed of code outside of blocks from that of a micro-batch
T = TypeVar("T")


class RecomputeContext:
    """The context variables, autocast settings and attention backends at the time of its construction."""

    def __init__(self, device_type: str) -> None:
        self._variables = capture.copy_context()
        self._device_types = {device_type, "cpu"}
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self._device_types}
        self._attention = _attention_kernels()

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the recorded context and return its result."""

        def call() -> T:
            with ExitStack() as stack:
                for device_type, (enabled, dtype) in self._autocast.items():
                    # Without a cache, for the reason given in `no_autocast_cache`.
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
                before = _attention_kernels()
                if before != self._attention:
                    stack.callback(_set_attention_kernels, *before)
                    _set_attention_kernels(*self._attention)
                return function()

        return self._variables.run(call)


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


class MicroBatchRandomness:
    """The random states of the micro-batches of one forward pass.

    A single micro-batch uses the global generators, as plain Hugging Face does. If there are several, each has a random
    stream, seeded by one draw from the global generator (`micro_batch_seeds`), which continues from block to block.

    Code outside of blocks draws from the global generators, which are the same on all ranks at the begin of a pass. So with
    several ranks, they are replaced meanwhile.

    Args:
        device: the model's device.
        num_micro_batches: the number of micro-batches.
        num_before: number of micro-batches of the ranks before this one.
        num_everywhere: number of micro-batches of all ranks; None for one rank. All ranks draw the seeds of all micro-batches, so
            that a micro-batch has the same one on any rank.
        draws: let the draw advance the global generator, if a micro-batch uses its random numbers. In evaluation plain
            Hugging Face draws nothing, so the generator is reset afterwards, and training continues as if there had been
            no evaluation.
    """

    def __init__(
        self, device: Device, num_micro_batches: int, draws: bool = True, num_before: int = 0,
        num_everywhere: int | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        # The state of each micro-batch's random stream; None if there is one micro-batch, which uses the global generators.
        self._streams: list[Any] | None = None
        self._draws = draws
        self._outside: Any = None  # the state of the global generators, while they are replaced
        self._num_seeds = num_micro_batches if num_everywhere is None else num_everywhere
        if self._num_seeds > 1:
            self._before_draw = torch.get_rng_state()
            seeds = micro_batch_seeds(self._num_seeds)[num_before : num_before + num_micro_batches]
            self._after_draw = torch.get_rng_state()
            # The draw is taken back: `finish` repeats it if a micro-batch has used its numbers.
            torch.set_rng_state(self._before_draw)
            self._seeded = [device.seeded_rng_state(seed) for seed in seeds]
            self._streams = list(self._seeded)
            # Seeded by this rank's first micro-batch, so that each rank draws other numbers outside of blocks.
            if num_everywhere is not None and draws:
                self._outside, self._replaced = device.rng_state(), device.seeded_rng_state(seeds[0] ^ _OUTSIDE)
                device.set_rng_state(self._replaced)

    @property
    def has_streams(self) -> bool:
        """True if micro-batches have random streams of their own."""
        return self._streams is not None

    def restore(self) -> bool:
        """Put the global generators back, if they were replaced. Return whether numbers were drawn while they were."""
        if self._outside is None:
            return False
        was_drawn_from = not same_rng_state(self._device.rng_state(), self._replaced)
        self._device.set_rng_state(self._outside)
        self._outside = None
        return was_drawn_from

    def finish(self) -> None:
        """Advance the global generator by the draw of the seeds, if any number was drawn from what they seeded.

        Without dropout a plain model draws nothing in its blocks, so the next numbers outside of them, such as noise on
        embeddings, must not move on either. Ranks decide alike, because they run the same model.
        """
        drawn_outside = self.restore()
        if self._streams is None or not self._draws:
            return
        drawn_in_blocks = not all(map(same_rng_state, self._streams, self._seeded))
        if not (drawn_in_blocks or drawn_outside):
            return
        # If other code has drawn from the global generator since, the seeds are drawn once more, after its numbers.
        if torch.equal(self._before_draw, torch.get_rng_state()):
            torch.set_rng_state(self._after_draw)
        else:
            micro_batch_seeds(self._num_seeds)

    @contextmanager
    def drawing(self, index: int) -> Iterator[Any]:
        """Context manager: draw from a micro-batch's random stream. Yield its initial state."""
        if self._streams is None:
            # Nothing is put back: the global generators go on, as in a plain model.
            yield self._device.rng_state()
            return
        with self._device.rng_state_restored(self._streams[index]):
            yield self._streams[index]
            self._streams[index] = self._device.rng_state()


def micro_batch_seeds(num_micro_batches: int) -> list[int]:
    """Return seeds for the micro-batches of a forward pass, using one draw from the global host generator."""
    return torch.randint(2**62, (num_micro_batches,), dtype=torch.int64).tolist()
