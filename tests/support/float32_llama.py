"""Llama as a type of which transformers keeps some weights in float32: norms, a projection of each block, and the head."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import LlamaForCausalLM

KEPT = ("norm", "gate_proj", "lm_head")


@contextmanager
def float32_llama() -> Iterator[None]:
    """Context manager: let transformers keep weights of Llama in float32."""
    before = LlamaForCausalLM._keep_in_fp32_modules_strict
    LlamaForCausalLM._keep_in_fp32_modules_strict = set(KEPT)
    try:
        yield
    finally:
        LlamaForCausalLM._keep_in_fp32_modules_strict = before
