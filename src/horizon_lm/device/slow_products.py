"""Warn of a CPU that multiplies matrices of two bytes an element many times slower than float32.

Without instructions for them (AMX, AVX512-BF16), torch does not hand products to oneDNN, and its own loops convert element by element.
"""

from functools import cache

import torch

from horizon_lm.errors import SlowProductsWarning, warn


@cache
def warn_of_slow_products(dtype: torch.dtype) -> None:
    """Warn once in a process if the CPU has no instructions for products of matrices of a dtype."""
    if dtype == torch.float32 or has_instructions(dtype):
        return
    warn(
        f"this step computes in {str(dtype).removeprefix('torch.')} (autocast, or compute_dtype), for which this CPU has no instructions "
        "(such as AMX and AVX512-BF16), so products of matrices take many times as long as in float32; compute in float32: bf16=False "
        "in the arguments of a Trainer, or no autocast",
        SlowProductsWarning,
    )


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether torch hands products of a dtype to oneDNN on this CPU. Without oneDNN this is not known, and True is returned."""
    if not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
