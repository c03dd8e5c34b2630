"""Train a small llama with products in FP8 beside bfloat16: the same steps on the same real text, and their losses.

    python benchmarks/float8_losses.py ROWS.jsonl [--steps 200] [--output FILE.md]

``ROWS.jsonl`` has questions with answers, of which the model learns the bytes. Blocks compute in bfloat16 on the CPU, which emulates FP8
slowly: losses are compared, and no times. A third run rounds its weights stochastically (`precision: bf16`), as a measure of a
difference that is known to be harmless.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import horizon_lm

ROWS, LENGTH, LEARNING_RATE, HELD_OUT, LAST = 4, 64, 3e-3, 32, 50
MODES = {
    "bf16": {"precision": "fp32_master", "products": "plain"},
    "FP8": {"precision": "fp32_master", "products": "float8"},
    "bf16, stochastic rounding": {"precision": "bf16", "products": "plain"},
}


def sequences_of(rows: Path) -> torch.Tensor:
    """Return the bytes of all rows, one after the other, cut into sequences (N, LENGTH)."""
    lines = map(json.loads, rows.read_text(encoding="utf-8").splitlines())
    text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in lines).encode()
    whole = len(text) // LENGTH * LENGTH
    return torch.tensor(list(text[:whole])).view(-1, LENGTH)


def build() -> LlamaForCausalLM:
    """Return a model with random weights, the same every time."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(sequences: torch.Tensor, steps: int, options: dict[str, str]) -> Iterator[float]:
    """Yield the loss of each step, and at the end that of the held-out sequences."""
    model = build()
    trained = horizon_lm.stream(model, "cpu", compute_dtype=torch.bfloat16, activation_checkpoints="device", **options)
    optimizer = horizon_lm.AdamW(trained, lr=LEARNING_RATE)
    for step in range(steps):
        first = HELD_OUT + ROWS * step
        batch = sequences[first : first + ROWS]
        loss = trained(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss)
    yield held_out_loss(trained, sequences[:HELD_OUT])


@torch.no_grad()
def held_out_loss(model: Any, sequences: torch.Tensor) -> float:
    """Return the mean loss of sequences, computed as in training."""
    model.eval()
    return statistics.fmean(float(model(input_ids=each, labels=each).loss) for each in sequences.split(ROWS))


def report(losses: dict[str, list[float]], steps: int) -> list[str]:
    """Return the lines of a page about the losses of each run, whose last one is that of held-out sequences."""
    base, *_ = losses.values()
    num_parameters = build().num_parameters()
    lines = [
        "# Products in FP8: losses beside bfloat16", "",
        f"{date.today()}. torch {torch.__version__}, transformers {transformers.__version__}. A llama with "
        f"{num_parameters / 1e6:.1f}M parameters from random weights, {steps} steps of {ROWS} sequences of {LENGTH} bytes of real text (questions and "
        f"answers of GSM8K), AdamW, learning rate {LEARNING_RATE}. "
        f"Blocks compute in bfloat16 on a CPU, which emulates FP8. Differences are to the first run, step by step.", "",
        f"| products | mean of the first {LAST} losses | mean of the last {LAST} | held out, {HELD_OUT} sequences | largest difference of a step "
        "| mean difference | mean absolute difference |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, (*of_steps, held_out) in losses.items():
        off = [a - b for a, b in zip(of_steps, base[:-1], strict=True)]
        figures = (
            statistics.fmean(of_steps[:LAST]), statistics.fmean(of_steps[-LAST:]), held_out, max(map(abs, off)), statistics.fmean(off),
            statistics.fmean(map(abs, off)),
        )  # fmt: skip
        lines.append(" | ".join(["| " + name, *(f"{each:.4f}" for each in figures)]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sequences = sequences_of(arguments.rows)
    losses: dict[str, list[float]] = {}
    for name, options in MODES.items():
        losses[name] = []
        for step, loss in enumerate(train(sequences, arguments.steps, options)):
            losses[name].append(loss)
            if step % 10 == 0:
                print(f"{name}: step {step}: {loss:.4f}", flush=True)
    text = "\n".join(report(losses, arguments.steps)) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
