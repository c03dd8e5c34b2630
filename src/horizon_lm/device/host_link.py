"""Transfers where the device is host memory, too."""

import torch

from horizon_lm.device.moves import Squares
from horizon_lm.store.arena import as_array


class HostLink:
    """Copies, and landings that square in the same pass."""

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
        return kernel(as_array(table), as_array(source.to(table.dtype).contiguous()), rows.numpy())


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` or ``bfloat16``, as kernels call it."""
    return str(tensor.dtype).removeprefix("torch.")
