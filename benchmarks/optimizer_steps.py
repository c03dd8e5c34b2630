"""Benchmark a training step with each optimizer beside AdamW's, in three precisions, on the CPU.

The optimizers have models of their own in one process and take turns step by step, so that a noisy machine disturbs them all
alike. A step is a forward and backward pass and an update with clipping, up to the last weight written.

    python benchmarks/optimizer_steps.py [--rounds 15] [--output FILE.md]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from peers_cpu import processor, versions
from transformers import LlamaConfig, LlamaForCausalLM

import horizon_lm
from horizon_lm.common.optimizers import OPTIMIZERS

CONFIG = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9, num_key_value_heads=3, vocab_size=8192,
)  # fmt: skip
ROWS, LENGTH = 2, 256
PRECISIONS = ("fp32_master", "bf16", "float32")


def step_of(name: str, precision: str) -> Callable[[], None]:
    """Return a function that runs a step with an optimizer of horizon_lm."""
    torch.manual_seed(0)
    model = horizon_lm.stream(LlamaForCausalLM(CONFIG), device="cpu", precision=precision)
    optimizer = getattr(horizon_lm, name)(model, lr=1e-5, max_grad_norm=1.0)
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        horizon_lm.synchronize(model)

    return step


def main() -> None:
    """Measure all, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    names = [each.name for each in OPTIMIZERS.values()]
    num_params = sum(param.numel() for param in LlamaForCausalLM(CONFIG).parameters())
    lines = [
        "# A step with each optimizer",
        "",
        f"{date.today()}, {processor()}, {torch.get_num_threads()} threads. {versions('torch', 'transformers', 'numba')}.",
        f"A llama of {num_params / 1e6:.1f} million parameters, {ROWS} rows of {LENGTH} tokens; medians of {arguments.rounds} steps in turns. The CPU "
        "orthogonalizes Muon's matrices itself; a GPU does so beside the host's updates.",
        "",
        f"Command: `python benchmarks/optimizer_steps.py --rounds {arguments.rounds}`",
        "",
        "| precision | optimizer | seconds a step | beside AdamW |",
        "|---|---|---|---|",
    ]
    for precision in PRECISIONS:
        steps = {name: step_of(name, precision) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(arguments.rounds + 2):  # kernels are compiled in the first
            for name, step in steps.items():
                before = time.perf_counter()
                step()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - before)
        for name in names:
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["AdamW"], strict=True))
            lines.append(f"| {precision} | {name} | {statistics.median(seconds[name]):.3f} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
