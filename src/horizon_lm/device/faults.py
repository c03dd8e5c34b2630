"""Distinguish faults of a device from other errors.

torch raises ``AcceleratorError`` (a RuntimeError with CUDA's ``error_code``) for errors of CUDA's runtime, and
``OutOfMemoryError`` (a RuntimeError, too) from its allocator. cuBLAS, cuDNN, the driver's interface and Triton still raise
plain RuntimeErrors, which only their messages tell apart. So it is in torch 2.11 to 2.13.
"""

import re

import torch

from horizon_lm.errors import DeviceMemoryError, HorizonError

_CLASSES = (torch.AcceleratorError, torch.OutOfMemoryError, torch.cuda.CudaError, DeviceMemoryError)
_MESSAGE = re.compile(
    r"CUDA (runtime |driver |kernel )?error|CUDA out of memory|cuda runtime error|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_"
    r"|cuDNN error|cuBLAS(Lt)? error|cusolver error|Triton Error \[CUDA\]",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|memory allocation", re.IGNORECASE
)
_CUDA_ERROR_MEMORY_ALLOCATION = 2  # driver_types.h


def is_device_fault(error: BaseException) -> bool:
    """Return whether an error comes from the device or its libraries: a CUDA error, a lost GPU, too little device memory."""
    if isinstance(error, _CLASSES):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, HorizonError) and bool(_MESSAGE.search(str(error)))


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether a device fault is a failed allocation, after which the device can still be used."""
    if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError):
        return True
    if not is_device_fault(error):
        return False
    code = getattr(error, "error_code", None)
    return code == _CUDA_ERROR_MEMORY_ALLOCATION or bool(_OUT_OF_MEMORY.search(str(error)))
