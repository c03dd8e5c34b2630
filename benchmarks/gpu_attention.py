"""Compare attention kernels, forward and backward, for several row lengths and with grouped key and value heads.

    python3 benchmarks/gpu_attention.py [cuda]

prints milliseconds as JSON. cuDNN builds a plan for each new shape: "new lengths" is the time for rows of unseen lengths, and
"seen lengths" for the same rows again. The shapes are those of Qwen2.5-7B with 8k tokens per pass, or toys on a CPU.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from horizon_lm.model.attention import Segments
from horizon_lm.model.segment_attention import segment_attention

_ROUNDS = 5


def measure_attention(device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a forward and backward, by case."""
    on_gpu = device.type == "cuda"
    heads, kv_heads, width, tokens = (28, 4, 128, 8192) if on_gpu else (4, 2, 16, 256)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def tensors(rows: int, length: int, num_kv_heads: int) -> list[torch.Tensor]:
        sizes = [(rows, count, length, width) for count in (heads, num_kv_heads, num_kv_heads)]
        return [torch.randn(size, dtype=dtype, device=device, requires_grad=True) for size in sizes]

    results: dict[str, float] = {}
    kernels = {"flash": SDPBackend.FLASH_ATTENTION} | ({"cuDNN": SDPBackend.CUDNN_ATTENTION} if on_gpu else {})
    lengths = [tokens // 4 - 37 * i for i in range(1, 9)] if on_gpu else [40, 56]
    for name, backend in kernels.items():
        with sdpa_kernel(backend):

            def attend(inputs: list[torch.Tensor]) -> torch.Tensor:
                return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

            results[f"{name}, one length"] = _milliseconds(
                device, attend, [tensors(2, tokens // 2, kv_heads)], warm=True
            )
            batches = [tensors(4, length, kv_heads) for length in lengths]
            results[f"{name}, new lengths"] = _milliseconds(device, attend, batches, warm=False)
            results[f"{name}, seen lengths"] = _milliseconds(device, attend, batches, warm=True)
            padded = [tensors(4, -(-length // 128) * 128, kv_heads) for length in lengths]
            results[f"{name}, new lengths, padded to 128"] = _milliseconds(device, attend, padded, warm=False)

    rows = Segments([[tokens // 8] * 4] * 2, device).offsets(0, 2)

    def by_segment(inputs: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = inputs
        times = query.shape[1] // key.shape[1] if repeats else 1
        return segment_attention(query, *(t.repeat_interleave(times, dim=1) for t in (key, value)), rows)

    inputs = [tensors(2, tokens // 2, kv_heads)]
    for repeats in (False, True):
        name = "segments, " + ("keys and values repeated" if repeats else "fewer heads as they are")
        results[name] = _milliseconds(device, by_segment, inputs, warm=True)
    return results


def _milliseconds(
    device: torch.device, attend: Callable[[list[torch.Tensor]], torch.Tensor], batches: list[list[torch.Tensor]], warm: bool
) -> float:  # fmt: skip
    """Return the mean milliseconds per batch in the best round, or in the first round if it is not warm."""
    rounds = []
    for _ in range(1 + _ROUNDS * warm):
        _synchronize(device)
        start = time.perf_counter()
        for inputs in batches:
            output = attend(inputs)
            torch.autograd.grad(output, inputs, torch.ones_like(output))
        _synchronize(device)
        rounds.append(time.perf_counter() - start)
    return round(1e3 * min(rounds[warm:]) / len(batches), 4)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(measure_attention(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")), indent=1))
