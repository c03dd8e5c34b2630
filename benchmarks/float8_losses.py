"""Train a model with products in FP8 beside bfloat16: the same steps on the same real text, and their losses.

    python benchmarks/float8_losses.py ROWS.jsonl [--model FOLDER] [--steps 200] [--output FILE.md]

``ROWS.jsonl`` has questions with answers. FOLDER is a Hugging Face folder (`make demo` leaves one in .cache/smollm2-135m-instruct);
without one, a small llama with random weights learns the bytes of the text. Blocks compute in bfloat16 on the CPU, which emulates FP8: losses
are compared, and no times. A third run rounds its weights stochastically (`precision: bf16`), as a measure of a difference that
is known to be harmless.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import horizon_lm

HELD_OUT, LAST = 32, 50
MODES = {
    "bf16": {"precision": "fp32_master", "products": "plain"},
    "FP8": {"precision": "fp32_master", "products": "float8"},
    "bf16, stochastic rounding": {"precision": "bf16", "products": "plain"},
}


@dataclass(frozen=True)
class Task:
    """A model and how it is trained.

    Attributes:
        folder: the model's folder; None for a small llama with random weights.
        rows: sequences of a step.
        length: tokens of a sequence.
        learning_rate: of AdamW.
    """

    folder: Path | None
    rows: int
    length: int
    learning_rate: float

    def sequences(self, rows: Path) -> torch.Tensor:
        """Return the tokens of all rows, one after the other, cut into sequences (N, length)."""
        lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        text = "\n\n".join(f"{row['question']}\n{row['answer']}" for row in lines)
        tokens = (
            list(text.encode())
            if self.folder is None
            else AutoTokenizer.from_pretrained(self.folder)(text)["input_ids"]
        )
        whole = len(tokens) // self.length * self.length
        return torch.tensor(tokens[:whole]).view(-1, self.length)

    def build(self) -> PreTrainedModel:
        """Return the model, with the same weights every time."""
        if self.folder is not None:
            return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=self.length,
        )  # fmt: skip
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    def train(self, sequences: torch.Tensor, steps: int, options: dict[str, str]) -> Iterator[float]:
        """Yield the loss of each step, and at the end that of the held-out sequences."""
        trained = horizon_lm.stream(
            self.build(), "cpu", compute_dtype=torch.bfloat16, activation_checkpoints="device", **options
        )
        optimizer = horizon_lm.AdamW(trained, lr=self.learning_rate)
        for step in range(steps):
            first = HELD_OUT + self.rows * step
            batch = sequences[first : first + self.rows]
            loss = trained(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss)
        yield self.held_out_loss(trained, sequences[:HELD_OUT])

    @torch.no_grad()
    def held_out_loss(self, model: Any, sequences: torch.Tensor) -> float:
        """Return the mean loss of sequences, computed as in training."""
        model.eval()
        return statistics.fmean(float(model(input_ids=each, labels=each).loss) for each in sequences.split(self.rows))


def multiply_quickly() -> "torch.library.Library":
    """Let a CPU multiply FP8 matrices by its products in float32, and return what must be kept for as long.

    torch's own kernels for a CPU do the same a hundred times slower: a product of two values of e4m3 is exact in float32, and scales are
    powers of two. Sums may be in another order.
    """

    def scaled_mm(
        left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor, bias: None, result_scale: None,
        out_dtype: torch.dtype, fast: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        return (left.float() @ right.float() * left_scale * right_scale).to(out_dtype)

    def scaled_mm_out(*args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(scaled_mm(*args))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they replace torch's own
        library.impl("_scaled_mm", scaled_mm, "CPU", allow_override=True)
        library.impl("_scaled_mm.out", scaled_mm_out, "CPU", allow_override=True)
    return library


def report(task: Task, losses: dict[str, list[float]]) -> list[str]:
    """Return the lines of a page about the losses of each run, whose last one is that of held-out sequences."""
    base, *_ = losses.values()
    million = task.build().num_parameters() / 1e6
    if task.folder is None:
        model = f"A llama with {million:.1f}M parameters and random weights, which learns bytes"
    else:
        model = f"{task.folder.name} ({million:.0f}M parameters), all of which are trained"
    lines = [
        "# Products in FP8: losses beside bfloat16", "",
        f"{date.today()}. torch {torch.__version__}, transformers {transformers.__version__}. {model}: {len(base) - 1} steps of {task.rows} "
        f"sequences of {task.length} tokens of real text (questions and answers of GSM8K), AdamW, learning rate {task.learning_rate}. Blocks compute "
        f"in bfloat16 on a CPU, which emulates FP8. Differences are to the first run, step by step.", "",
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
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    task = Task(None, 4, 64, 3e-3) if arguments.model is None else Task(arguments.model, 2, 128, 5e-5)
    sequences = task.sequences(arguments.rows)
    kernel = multiply_quickly()
    losses: dict[str, list[float]] = {}
    for name, options in MODES.items():
        losses[name] = []
        for step, loss in enumerate(task.train(sequences, arguments.steps, options)):
            losses[name].append(loss)
            if step % 10 == 0:
                print(f"{name}: step {step}: {loss:.4f}", flush=True)
    del kernel
    text = "\n".join(report(task, losses)) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
