"""Compare post-training by Horizon-LM and by plain Hugging Face: eval figures of a real model on real rows.

Three tasks: fine-tuning on GSM8K, continued pre-training on raw text, preferences. Plain Hugging Face is a short loop over the
same rows in the same order with torch's fused AdamW: in float32, and in bf16 with fp32 master weights, like mixed precision
elsewhere and our `fp32_master`. Plain Hugging Face evaluates all models, with their full weights and with weights rounded to
bf16, as models are published.

    python benchmarks/post_training.py --model .cache/smollm2-135m-instruct --data DATA sft pretrain dpo
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, get_scheduler

import horizon_lm
from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.runs.admission.inputs import fetch_source
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.loader import batch_from
from horizon_lm.runs.training.rows import RunData, load_data
from horizon_lm.runs.training.setup import load_tokenizer

SHARED: dict[str, Any] = {
    "device": "cpu", "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 4, "save_strategy": "no", "export_dtype": "float32",
    "per_device_eval_batch_size": 4,
}  # fmt: skip


PLAIN = {"Hugging Face, float32": torch.float32, "Hugging Face, bf16 and fp32 master": torch.bfloat16}  # compute dtypes
SYSTEMS = {
    "sft": [*PLAIN, "fp32_master"],
    "pretrain": [*PLAIN, "fp32_master", "bf16"],
    "dpo": [*PLAIN, "float32", "fp32_master"],
}


def tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each task."""
    return {
        "sft": {
            "datasets": [{"path": str(data / "gsm8k_train_1000.jsonl"), "columns": {"instruction": "question", "output": "answer"}}],
            "test_split_size": 48, "max_length": 320, "per_device_train_batch_size": 8, "max_steps": 16, "learning_rate": 1e-4,
        },
        "pretrain": {
            "objective": "pretrain", "datasets": [str(data / "wiki_demo.txt")], "test_split_size": 2, "packing": True,
            "packing_strategy": "bfd_split", "max_length": 256, "per_device_train_batch_size": 4, "max_steps": 20,
            "learning_rate": 1e-4,
        },
        "dpo": {
            "objective": "dpo", "datasets": [{"path": str(data / "dpo_en_demo.json"), "fraction": 0.5}], "test_split_size": 24,
            "max_length": 320, "per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 5e-5, "beta": 0.1,
        },
    }  # fmt: skip


@dataclass
class Plain:
    """A training loop of plain Hugging Face on the rows of a run."""

    config: Any
    data: RunData
    reference: Any

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        if self.config.objective != "dpo":
            return model(**batch.inputs(), labels=batch.labels, num_items_in_batch=batch.num_trained).loss
        return -F.logsigmoid(self.margins(model, batch)).mean()

    def margins(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the rewards of the chosen answers minus those of the rejected ones."""
        with torch.no_grad():
            reference = answer_logprobs(self.reference, batch)
        chosen, rejected = (answer_logprobs(model, batch) - reference) * self.config.beta
        return chosen - rejected

    def train(self, model: Any, working: Any = None) -> None:
        """Train a model in float32, or as the fp32 master of ``working``, a bf16 copy that computes."""
        config, steps = self.config, self.config.max_steps
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
        scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, steps)
        computes = (working or model).train()
        for step in range(steps):
            self.loss(computes, self.data.loader.batch(step)).backward()
            for master, weight in zip(model.parameters(), computes.parameters(), strict=True):
                if master is not weight:
                    master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            for master, weight in zip(model.parameters(), computes.parameters(), strict=True):
                if master is not weight:
                    weight.data.copy_(master.data)

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the figures of the eval set."""
        model.eval()
        total, weight, margins = 0.0, 0, []
        (rows,) = self.data.eval_sets.values()
        for batch in (batch_from(rows, first, 4) for first in range(0, len(rows), 4)):
            if self.config.objective == "dpo":
                margins += self.margins(model, batch).tolist()
                continue
            total += self.loss(model, batch).item() * batch.num_trained
            weight += batch.num_trained
        if margins:
            return {"margin": sum(margins) / len(margins), "accuracy": sum(m > 0 for m in margins) / len(margins)}
        return {"loss": total / weight, "perplexity": math.exp(total / weight)}


def answer_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(**batch.inputs()).logits[:, :-1].float()
    labels = batch.labels[:, 1:]
    logprobs = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return (logprobs * (labels != IGNORE_INDEX)).sum(1).view(2, -1)


def open_plain(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def run_task(
    name: str, settings: dict[str, Any], model: str, systems: list[str], output: Path, say: Callable[[str], None]
) -> list[str]:
    """Run a task with several systems, and return the lines of its table."""
    run = {
        **SHARED,
        **settings,
        "model_name_or_path": model,
        "output_dir": str(output / name),
        "overwrite_output_dir": True,
    }
    config = as_config(run)
    data = load_data(config, load_tokenizer(config, fetch_source(config).model))
    plain = Plain(config, data, open_plain(model))
    lines: list[str] = []

    def add_line(label: str, trained: Any, seconds: float) -> list[str]:
        """Add a line to the table, and return the names of its figures."""
        figures = plain.evaluate(trained)
        with torch.no_grad():
            for weight in trained.parameters():
                weight.copy_(weight.to(torch.bfloat16))
        rounded = plain.evaluate(trained)
        shown = " | ".join(f"{figures[each]:.4f} | {rounded[each]:.4f}" for each in figures)
        lines.append(f"| {label} | {shown} | {seconds / 60:.1f} |")
        say(f"{name}: {lines[-1]}")
        return list(figures)

    def train(system: str) -> Any:
        if system in PLAIN:
            dtype, theirs = PLAIN[system], open_plain(model)
            working = None if dtype == torch.float32 else open_plain(model, dtype)
            Plain(config, data, open_plain(model, dtype)).train(theirs, working)
            return theirs
        return open_plain(horizon_lm.train({**run, "precision": system}, print_fn=lambda text: None).model_dir)

    names = add_line("base", open_plain(model), 0.0)
    for system in systems or SYSTEMS[name]:
        start = time.perf_counter()
        found = train(system)
        add_line(system if system in PLAIN else f"Horizon-LM `{system}`", found, time.perf_counter() - start)
    rows, held = len(data.loader.rows), sum(map(len, data.eval_sets.values()))
    heading = [
        f"## {name}", "",
        f"{config.max_steps} steps of {config.rows_per_step} of {rows} rows, max_length {config.max_length}, learning rate "
        f"{config.learning_rate:g}; {held} rows in the eval set.", "",
        f"| | {' | '.join(f'eval {each} | rounded to bf16' for each in names)} | minutes |",
        f"|---|{'---|' * (2 * len(names) + 1)}",
    ]  # fmt: skip
    return [*heading, *lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["sft", "pretrain", "dpo"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="Markdown file. Default: standard output")
    parser.add_argument("--systems", nargs="+", default=[], help="run only these systems of a task")
    parser.add_argument("--runs", type=Path, default=Path("runs/post_training"))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known = tasks(arguments.data)
    lines = [
        "# Post-training of SmolLM2-135M-Instruct on real rows", "",
        "    python benchmarks/post_training.py --model .cache/smollm2-135m-instruct --data DATA " + " ".join(arguments.tasks), "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}. Plain Hugging Face evaluates the exported models in float32. Minutes include loading and "
        "the run's own evaluation, and are not a comparison of speed.", "",
    ]  # fmt: skip
    for name in arguments.tasks:
        lines += run_task(
            name, known[name], arguments.model, arguments.systems, arguments.runs, lambda text: print(text, flush=True)
        )
        print(json.dumps({"done": name}), flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines), encoding="utf-8")
    if not arguments.output:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
