"""Memory mappings of exactly the requested size, from which slabs are taken."""

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from horizon_lm.common.constants import PAGE
from horizon_lm.common.quantities import page_aligned

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE_PAGE = 2 * 2**20


class Arena:
    """A memory mapping of exactly the requested size, whose pages are allocated when first written.

    torch's own allocators round up (pinned memory to powers of two), which would break the byte budget.

    Args:
        num_bytes: the size.
        sparse: only parts of it will ever be used, so the system reserves none (MAP_NORESERVE), and huge pages lie within such parts.
    """

    def __init__(self, num_bytes: int, sparse: bool = False) -> None:
        self.num_bytes, self._is_sparse = num_bytes, sparse
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if sparse else 0)
        self._map = mmap.mmap(-1, max(num_bytes, PAGE), flags=flags)
        # With MADV_DONTFORK, a forked child does not get the mapping.
        for advice in ("MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", "MADV_DONTFORK"):  # absent on macOS
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError:  # a kernel without huge pages, which is only slower
                    continue
        self._position = 0  # the byte at which the next slab begins

    def take(self, numel: int, dtype: torch.dtype, used: slice | None = None) -> torch.Tensor:
        """Return the next ``numel`` elements, page-aligned, as a 1-D tensor that keeps the mapping alive.

        ``used``: the elements of a sparse arena's slab that will be used.
        """
        num_bytes = numel * dtype.itemsize
        if self._position + num_bytes > self.num_bytes:
            raise AssertionError(f"arena of {self.num_bytes} bytes: {self._position} used, {num_bytes} more asked for")
        start, self._position = self._position, page_aligned(self._position + num_bytes)
        if self._is_sparse and used is not None:
            self._use_huge_pages(start + used.start * dtype.itemsize, start + used.stop * dtype.itemsize)
        return self.at(start, numel, dtype)

    def _use_huge_pages(self, start: int, stop: int) -> None:
        """Allow huge pages in these bytes of a sparse arena, as far as they fill whole huge pages."""
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE") and start < stop:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, start, stop - start)

    def release(self, start: int, stop: int) -> None:
        """Give the memory of the whole pages among these bytes back to the system. They become zero."""
        start, stop = page_aligned(start), stop // PAGE * PAGE
        if start < stop and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    @property
    def position(self) -> int:
        """Offset of the next slab in bytes."""
        return self._position

    def at(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``start`` on, as a 1-D tensor with a separate storage."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)


def as_array(tensor: torch.Tensor) -> Any:
    """Return the same memory as a numpy array; numpy has no bf16, so bf16 appears as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()
