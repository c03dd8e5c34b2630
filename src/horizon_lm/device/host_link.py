"""Transfers where the device is host memory, too."""

from concurrent.futures import ThreadPoolExecutor

import torch

from horizon_lm.device.cores import usable_cores
from horizon_lm.device.moves import Squares
from horizon_lm.store.arena import as_array

_ROWS_ELEMENTS = (
    1 << 19
)  # of rows that one thread lands at a time: a millisecond's work for a hand-over of microseconds


class HostLink:
    """Copies, and landings that square in the same pass.

    Rows land in several threads: those of the embedding come at the end of the backward, when nothing hides them.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        destination.copy_(table.index_select(0, rows))

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> Squares:
        from horizon_lm.kernels.landing import landing_kernel

        kernel = landing_kernel(dtype_name(destination), dtype_name(source), add)
        return kernel(as_array(destination), as_array(source))

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> Squares:
        from horizon_lm.kernels.landing import rows_kernel

        kernel = rows_kernel(dtype_name(table), add)
        target, values, indices = as_array(table), as_array(source.to(table.dtype).contiguous()), rows.numpy()
        step = max(1, _ROWS_ELEMENTS // table.shape[1])
        pieces = [slice(start, start + step) for start in range(0, len(indices), step)]
        if len(pieces) < 2:
            return kernel(target, values, indices)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(usable_cores(), "horizon-rows")
        # Rows are distinct, and sums are added in the rows' order, so the number of threads changes nothing.
        return sum(self._threads.map(lambda piece: kernel(target, values[piece], indices[piece]), pieces))


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` or ``bfloat16``, as kernels call it."""
    return str(tensor.dtype).removeprefix("torch.")
