"""Benchmark CPU optimizers: nanoseconds per parameter of a step, and the fraction of memory bandwidth.

All optimizers live in one process and take turns, so that a noisy machine disturbs them all alike. Ours is measured from
`optimizer.step()` to the last weight written, on a model with SmolLM2-135M's blocks and random weights; torch's and
DeepSpeed's on tensors of the same shapes. The bandwidth is that of ``x.mul_(c)`` over as many fp32 numbers, which an
in-place update can exceed only by the hits in its caches.

    python benchmarks/optimizer.py [--rounds 9] [--layers 22] [--output FILE.md]

DeepSpeed is optional (``DS_BUILD_OPS=0 pip install deepspeed ninja``, and a C++ compiler).
"""

import argparse
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions

import horizon_lm

LEARNING_RATE, WEIGHT_DECAY = 1e-5, 0.01
WEIGHT_BYTES = {"float32": 8, "bf16": 4, "fp32_master": 8}  # read and written
MOMENT_BYTES = {"float32": 16, "bfloat16": 8, "8bit": 4}

Step = Callable[[], None]


def model_config(layers: int) -> Any:
    """Return the config of SmolLM2-135M with another depth."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip


def ours(config: Any, precision: str, moments: str) -> tuple[Step, int]:
    """Return a step of Horizon-LM's AdamW, and its bytes of traffic per parameter."""
    model = horizon_lm.from_config(config, precision=precision)
    optimizer = horizon_lm.AdamW(model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, moments=moments)
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()

    def step() -> None:
        optimizer.step()
        horizon_lm.synchronize(model)

    grads = 4 if precision == "float32" else 2
    return step, grads + WEIGHT_BYTES[precision] + MOMENT_BYTES[moments]


def tensors(shapes: list[torch.Size], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter((0.02 * torch.randn(shape)).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = (1e-3 * torch.randn(param.shape)).to(dtype)
    return params


def torch_adamw(shapes: list[torch.Size], **options: Any) -> tuple[Step, int]:
    params = tensors(shapes, torch.float32)
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options).step, 28


def deepspeed_adam(shapes: list[torch.Size], dtype: torch.dtype) -> tuple[Step, int]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params = tensors(shapes, dtype)
    optimizer = DeepSpeedCPUAdam(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fp32_optimizer_states=True)
    return optimizer.step, 28 if dtype == torch.float32 else 22


def build(layers: int) -> tuple[dict[str, tuple[Step, int]], int]:
    """Return all installed systems, and the number of parameters."""
    config = model_config(layers)
    skeleton = horizon_lm.from_config(config, precision="bf16")
    shapes = [param.shape for param in skeleton.parameters()]
    del skeleton
    systems = {
        f"Horizon-LM {precision}, {moments} moments": ours(config, precision, moments)
        for precision, moments in (
            *itertools.product(("fp32_master", "bf16"), ("float32", "bfloat16", "8bit")), ("float32", "float32"),
        )
    }  # fmt: skip
    systems["torch fused, float32"] = torch_adamw(shapes, fused=True)
    systems["torch foreach, float32"] = torch_adamw(shapes, foreach=True)
    try:
        systems["DeepSpeedCPUAdam, float32"] = deepspeed_adam(shapes, torch.float32)
        systems["DeepSpeedCPUAdam, bf16 weights"] = deepspeed_adam(shapes, torch.bfloat16)
    except Exception as error:  # not installed, or without a compiler
        print(f"leaving DeepSpeed out: {type(error).__name__}: {error}", file=sys.stderr)
    return systems, sum(shape.numel() for shape in shapes)


def measure(
    systems: dict[str, tuple[Step, int]], numel: int, rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Return nanoseconds per parameter of each system and of the in-place pass, by round."""
    array = torch.ones(numel)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    in_place = []
    for round_number in range(rounds + 1):  # the first warms up
        for name, (step, _) in systems.items():
            array.mul_(1.0)
            start = time.perf_counter()
            array.mul_(1.0)
            middle = time.perf_counter()
            step()
            end = time.perf_counter()
            if round_number:
                in_place.append((middle - start) / numel * 1e9)
                seconds[name].append((end - middle) / numel * 1e9)
        print(f"round {round_number} of {rounds}", file=sys.stderr, flush=True)
    return seconds, in_place


def report(
    systems: dict[str, tuple[Step, int]], seconds: dict[str, list[float]], in_place: list[float], numel: int,
    arguments: argparse.Namespace,
) -> str:  # fmt: skip
    bandwidth = 8 / statistics.median(in_place)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    fused, bf16 = medians["torch fused, float32"], medians.get("DeepSpeedCPUAdam, bf16 weights")
    lines = [
        "# The optimizer step on the host",
        "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores. {versions('torch', 'numba', 'deepspeed')}.",
        f"{numel / 1e6:.1f}M parameters, {arguments.rounds} interleaved rounds in one process, medians (min to max). "
        f"In-place bandwidth in the same run: {bandwidth:.1f} GB/s ({8 / max(in_place):.1f} to {8 / min(in_place):.1f}).",
        "",
        f"Command: `python benchmarks/optimizer.py --rounds {arguments.rounds} --layers {arguments.layers}`",
        "",
        "| optimizer | bytes of traffic per parameter | ns per parameter | share of in-place bandwidth | "
        "time relative to torch fused | times as fast as DeepSpeed bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        traffic = systems[name][1]
        lines.append(
            f"| {name} | {traffic} | {medians[name]:.2f} ({min(values):.2f} to {max(values):.2f}) "
            f"| {traffic / medians[name] / bandwidth:.2f} | {medians[name] / fused:.2f} "
            f"| {'' if bf16 is None else format(bf16 / medians[name], '.1f')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--layers", type=int, default=22, help="22 layers have 106M parameters, and all systems together need 16 GB"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    systems, numel = build(arguments.layers)
    seconds, in_place = measure(systems, numel, arguments.rounds)
    text = report(systems, seconds, in_place, numel, arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
