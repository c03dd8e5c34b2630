"""Train three steps of a small model in every mode that differs on a device, before anything is measured.

    python3 benchmarks/gpu_first_steps.py [cuda]

prints a line for each mode: losses, seconds per step, planned and measured device memory, and whether host memory is
page-locked. Nothing is compiled. The script stops at the first error.
"""

import gc
import sys
import time
from typing import Any

import torch
from gpu_models import make_config, toy

import horizon_lm
from horizon_lm.device.cuda import CudaDevice

MIB = 2**20
_SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32_000, "tie_word_embeddings": False,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded rows, by segment": {"attn_implementation": "varlen"},
    "activation checkpoints in host memory": {"activation_checkpoints": "host", "resident_blocks": 0},
    "micro-batches": {"device_micro_batch_size": 2},
    "fp32_master, clipped": {"precision": "fp32_master"},
}


def run(name: str, device: torch.device) -> str:
    """Train three steps in one mode and return the line to print."""
    on_gpu = device.type == "cuda"
    rows, length = (4, 1024) if on_gpu else (4, 32)
    config = make_config(_SIZES if on_gpu else toy(_SIZES), length)
    model = horizon_lm.from_config(config, device.type, **{"precision": "bf16", "compile": False} | MODES[name]).train()
    optimizer = horizon_lm.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    ids = torch.randint(3, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if name.startswith("padded"):
        mask[0, length // 2 :], mask[2, length // 3 :] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    losses, seconds = [], []
    for _ in range(3):
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        horizon_lm.synchronize(model)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    if losses != sorted(losses, reverse=True):
        raise ArithmeticError(f"{name}: the loss of a repeated batch must fall, but is {losses}")
    engine = model._horizon.engine
    plan = model._horizon.planner.plan
    planned = plan.peak if plan is not None else 0
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    unlocked = engine.device.registration_error if isinstance(engine.device, CudaDevice) else None
    return (
        f"{name}: loss {', '.join(f'{loss:.3f}' for loss in losses)}; {', '.join(f'{s:.2f}' for s in seconds)} s; device MiB planned "
        f"{planned / MIB:.0f}, measured {peak / MIB:.0f}; host memory {'not page-locked: ' + unlocked if unlocked else 'page-locked'}"
    )


if __name__ == "__main__":
    chosen = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    for mode in MODES:
        gc.collect()  # the model of the mode before, which would count as this one's memory
        if chosen.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(chosen)
        print(run(mode, chosen), flush=True)
