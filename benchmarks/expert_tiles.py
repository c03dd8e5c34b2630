"""Train adapters on a block as wide as DeepSeek-V3's, whole and with its experts in tiles: bytes, device memory, time of a step.

    python benchmarks/expert_tiles.py [--experts 8 16] [--tile 4] [--tokens 16] [--rounds 3] [--output FILE.md]

Random weights in bf16, frozen, adapters on the attention's output. Each row is measured in a process of its own; the gradients of
whole blocks and tiles are compared bit for bit.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions
from peft import LoraConfig, get_peft_model
from transformers import DeepseekV3Config

import horizon_lm

PER_TOKEN = 8
EXPERT_BYTES = 3 * 7168 * 2048 * 2


def config(experts: int) -> DeepseekV3Config:
    """Return the published widths, with one block of experts, fewer of them and a small vocabulary."""
    return DeepseekV3Config(
        num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=experts, n_group=2, topk_group=2, vocab_size=4096,
        num_experts_per_tok=PER_TOKEN,
    )  # fmt: skip


def measure(experts: int, tile: int | None, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the bytes that a step copies to the device, its peak there, and its median seconds."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # autograd adds the gradients of tokens in several threads otherwise
    model = horizon_lm.from_config(
        config(experts), device="cpu", precision="bf16", expert_tile=tile, activation_checkpoints="host",
    )  # fmt: skip
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["o_proj"], init_lora_weights=False))
    rows = torch.arange(3, 3 + tokens)[None]
    seconds = []
    for _ in range(rounds):
        clock = time.perf_counter()
        model(input_ids=rows, labels=rows).loss.backward()
        seconds.append(time.perf_counter() - clock)
    stats = horizon_lm.stats(model)
    copied = sum(n for name, n in stats["moved_bytes"].items() if name.startswith("stream_in:block"))
    gradients = [param.grad.double().sum().item() for param in model.parameters() if param.grad is not None]
    return {
        "copied": copied / rounds, "peak": stats["device_bytes_peak"], "seconds": statistics.median(seconds), "gradients": gradients,
    }  # fmt: skip


def measured(experts: int, tile: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return what `measure` returns in a new process."""
    command = [sys.executable, __file__, "--measure", str(experts), str(tile or 0)]
    options = ["--tokens", str(args.tokens), "--rounds", str(args.rounds)]
    found: dict[str, Any] = json.loads(
        subprocess.run([*command, *options], check=True, stdout=-1).stdout.splitlines()[-1]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--tile", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        experts, tile = args.measure
        print(json.dumps(measure(experts, tile or None, args.tokens, args.rounds)))
        return
    lines = [
        "# A block as wide as DeepSeek-V3's, whole and with its experts in tiles",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers', 'peft')}.",
        f"Medians of {args.rounds} steps of {args.tokens} tokens, {PER_TOKEN} experts a token ({EXPERT_BYTES / 2**20:.0f} MiB each), frozen weights in bf16, "
        "adapters on the attention's output, computed in float32 on the CPU, whose buffers stand for a device's.",
        "",
        "| experts | in tiles of | MiB copied a step | device peak, MiB | s a step | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for experts in args.experts:
        whole, tiled = (measured(experts, tile, args) for tile in (None, args.tile))
        assert whole["gradients"] == tiled["gradients"]
        for name, found in (("-", whole), (str(args.tile), tiled)):
            lines.append(
                f"| {experts} | {name} | {found['copied'] / 2**20:,.1f} | {found['peak'] / 2**20:,.1f} | {found['seconds']:.2f} | equal |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
