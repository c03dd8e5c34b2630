"""Name the kernel that will compute the attention of packed and padded rows on a GPU, from what is installed."""

from importlib.metadata import version
from typing import Any

import torch

from horizon_lm.model.attention import NAME, activated_kernel, flash_attn
from horizon_lm.model.segment_attention import KERNEL_CAPABILITY, kernel_obstacle

_WITH_MASK = {
    "sdpa": "torch's scaled dot-product attention",
    "eager": "eager attention",
    "sinks": "torch's fused attention",
}


def kernel_of_segments(
    config: Any, implementation: str, dtype: torch.dtype, compiled: bool, capability: tuple[int, int] | None = None,
    sinks: bool = False,
) -> str:  # fmt: skip
    """Return the name and version of the kernel for rows with several documents, or with padding.

    Args:
        config: config of the text model.
        implementation: attention implementation of the run.
        dtype: dtype of hidden states.
        compiled: blocks are compiled, for which torch's kernels are used.
        capability: compute capability of the GPU; None if unknown, and taken to be enough.
        sinks: the model has sinks, for which torch's kernels are used.
    """
    if implementation in _WITH_MASK:
        return f"{_WITH_MASK[implementation]} with a mask"
    if implementation != NAME:
        return implementation
    activated = activated_kernel()
    is_half_precision = dtype in (torch.float16, torch.bfloat16)
    if is_half_precision and not compiled and activated is None and not sinks and flash_attn() is not None:
        return f"FlashAttention-2 of flash-attn {version('flash-attn')}"
    widths = head_dimensions(config)
    if sinks:  # `sink_attention` fills heads up to one width, a multiple of 8
        width = -(-max(widths) // 8) * 8
        widths = (width, width)
    obstacle = kernel_obstacle(widths, dtype, getattr(config, "attention_dropout", None) or 0.0)
    if capability is not None and capability < KERNEL_CAPABILITY:
        obstacle = f"compute capability {'.'.join(map(str, capability))}"
    if obstacle:
        return f"torch's scaled dot-product attention, one segment at a time, because its flash kernel does not support {obstacle}"
    return f"{activated or 'FlashAttention-2'} of torch {torch.__version__.partition('+')[0]}"


def head_dimensions(config: Any) -> tuple[int, int]:
    """Return the head dimensions of queries and of values, given the config of a text model with attention."""
    if getattr(config, "kv_lora_rank", None) is not None:  # multi-head latent attention (arXiv 2405.04434)
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width
