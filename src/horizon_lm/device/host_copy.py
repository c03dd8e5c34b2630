"""Read a few numbers that a device computes without waiting for what it computes after them."""

import torch


class HostCopy:
    """A small tensor on its way to the host, behind the computations that are queued so far.

    Args:
        tensor: values on any device; their graph is not kept.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._arrival = tensor.detach(), None
        if tensor.device.type == "cuda":
            with torch.cuda.device(tensor.device):  # torch page-locks memory through the current device
                self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._values.copy_(tensor.detach(), non_blocking=True)
                self._arrival = torch.cuda.Event(blocking=True)
                self._arrival.record()

    def read(self) -> torch.Tensor:
        """Wait until the values have arrived, and return them on the host."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values.cpu()
