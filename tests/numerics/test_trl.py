"""Whole runs agree with TRL's trainers: the same rows in the same order give the same losses and weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the whole installation")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from horizon_lm.runs.data.loader import Sampler
from horizon_lm.runs.training import rows as run_rows
from horizon_lm.runs.training.train import train
from tests.e2e import tiny

STEPS = 20
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.01, "max_grad_norm": 0.5, "logging_steps": 1,
    "save_strategy": "no", "seed": 7,
}  # fmt: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of TRL, accelerate and transformers about each other
    pytest.mark.timeout(600),
]


def conversations(count: int) -> list[dict[str, Any]]:
    """Return rows of very different lengths, some of them with a system message or many turns."""
    rows = []
    for n in range(count):
        turns = [{"role": "system", "content": f"Be keeper number {n}."}] if n % 3 == 0 else []
        for turn in range(1 + n % 4):
            turns.append({"role": "user", "content": f"What of night {n} and watch {turn}? " * (1 + n % 5)})
            turns.append({"role": "assistant", "content": f"Star {n * turn} rose. " * (1 + (n * 7) % 6)})
        rows.append({"messages": turns})
    return rows


class Recorder:
    """A wrapper of a trainer's collator that records the rows of each micro-batch."""

    def __init__(self, collator: Callable[[list[Any]], Any], key: Callable[[Any], Any]) -> None:
        self._collator, self._key, self.batches = collator, key, []

    def __call__(self, examples: list[Any]) -> Any:
        self.batches.append([self._key(example) for example in examples])
        return self._collator(examples)


def steps_of(batches: list[list[Any]], rows: int, per_step: int = 8) -> list[list[Any]]:
    """Return the rows of each step of a trainer from its micro-batches; the last step of an epoch has the remaining
    rows.
    """
    flat = [each for batch in batches for each in batch]
    steps: list[list[Any]] = []
    for start in range(0, len(flat), rows):
        epoch = flat[start : start + rows]
        steps += [epoch[index : index + per_step] for index in range(0, len(epoch), per_step)]
    return steps


def run_ours(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_file: Path, order: Callable[[Any], list[list[int]]],
    **settings: Any,
) -> tuple[list[dict[str, Any]], Any]:  # fmt: skip
    """Run with the rows in a given order, and return its metrics and model."""

    class Ordered(Sampler):
        def rows(self, step: int) -> list[int]:
            return order_of_table[step]

    order_of_table: list[list[int]] = []
    loader = run_rows.Loader

    def with_order(rows: Any, sampler: Any, *ranks: int) -> Any:
        order_of_table.extend(order(rows))
        return loader(rows, Ordered(sampler.sizes, sampler.rows_per_step, sampler.seed, sampler.weights), *ranks)

    monkeypatch.setattr(run_rows, "Loader", with_order)
    run = {
        "model_name_or_path": str(folder), "datasets": str(rows_file), "output_dir": str(tmp_path / "run"), "device": "cpu",
        "precision": "float32", **SHARED, **settings,
    }  # fmt: skip
    result = train(run, print_fn=lambda text: None)
    lines = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, AutoModelForCausalLM.from_pretrained(result.model_dir, dtype=torch.float32)


def assert_same(
    theirs: Any, logs: list[dict[str, Any]], ours: Any, lines: list[dict[str, Any]], folder: Path, max_grad_norm: float
) -> None:
    """Assert that losses, gradient norms, learning rates and the change of every weight agree within float32 rounding."""
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logs = [log for log in logs if "loss" in log]
    assert len(logs) == len(lines) == STEPS
    for log, line in zip(logs, lines, strict=True):
        assert line["loss"] == pytest.approx(log["loss"], rel=2e-4, abs=2e-5), line["step"]
        assert line["grad_norm"] == pytest.approx(log["grad_norm"], rel=2e-3), line["step"]
        assert line["learning_rate"] == pytest.approx(log["learning_rate"], rel=1e-6)
        assert line["num_tokens"] == log["num_tokens"]
        assert line["entropy"] == pytest.approx(log["entropy"], rel=1e-3), line["step"]
        # Rounding may decide between two tokens that are equally likely.
        assert line["mean_token_accuracy"] == pytest.approx(log["mean_token_accuracy"], abs=5e-3), line["step"]
    assert len({line["mean_token_accuracy"] for line in lines}) > 2
    clipped = sum(line["grad_norm"] > max_grad_norm for line in lines)
    assert clipped > STEPS / 2
    for name, param in theirs.named_parameters():
        moved = param.detach() - start.get_parameter(name)
        difference = (ours.get_parameter(name) - param.detach()).norm() / moved.norm()
        assert difference < 5e-3, (name, float(difference))


def trl_options(tmp_path: Path, max_length: int) -> dict[str, Any]:
    return {
        **SHARED, "output_dir": str(tmp_path / "trl"), "report_to": "none", "bf16": False, "use_cpu": True,
        "activation_checkpointing": False, "disable_tqdm": True, "max_length": max_length,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("packing", "max_length"), [pytest.param(False, 128, marks=pytest.mark.slow), (True, 320)], ids=["padded", "packed"]
)
def test_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool, max_length: int) -> None:
    from trl import SFTConfig, SFTTrainer

    folder = tiny.save_model(tmp_path / "model", tiny.CHATML_WITH_MARKS)
    rows = conversations(100 if packing else 52)
    rows_file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**trl_options(tmp_path, max_length), assistant_only_loss=True, packing=packing),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.data_collator = recorder = Recorder(trainer.data_collator, lambda example: tuple(example["input_ids"]))
    count = len(trainer.train_dataset)
    trainer.train()
    assert count < len(rows)  # rows were packed, or lost all of their targets

    def order(table: Any) -> list[list[int]]:
        number = {tuple(row.sequences[0].ids.tolist()): index for index, row in enumerate(table)}
        assert len(number) == len(table) == count
        return [[number[key] for key in step] for step in steps_of(recorder.batches, count)]

    lines, ours = run_ours(folder, tmp_path, monkeypatch, rows_file, order, max_length=max_length, packing=packing)
    assert count < STEPS * 8  # an epoch ends during the run
    assert_same(model, trainer.state.log_history, ours, lines, folder, SHARED["max_grad_norm"])


def test_sft_evaluation(tmp_path: Path) -> None:
    """Metrics of tokens are means over batches of different sizes."""
    from trl import SFTConfig, SFTTrainer

    folder = tiny.save_model(tmp_path / "model", tiny.CHATML_WITH_MARKS)
    rows = conversations(29)
    rows_file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    options = trl_options(tmp_path, 256) | {"per_device_eval_batch_size": 4}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=SFTConfig(**options, assistant_only_loss=True),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    theirs = trainer.evaluate()
    theirs |= trainer.state.log_history[-1]
    run = {
        "model_name_or_path": str(folder), "datasets": str(rows_file), "eval_datasets": str(rows_file), "device": "cpu",
        "output_dir": str(tmp_path / "run"), "precision": "float32", **SHARED, "max_steps": 1, "max_length": 256,
        "per_device_eval_batch_size": 4,
    }  # fmt: skip
    result = train(run, print_fn=lambda text: None)
    ours = json.loads((result.output_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert ours["step"] == 0
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def preferences(count: int) -> list[dict[str, Any]]:
    """Return several pairs for each prompt; some answers and some prompts exceed the maximum length."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What of night {n // 4}? " * (1 + n // 4 % 8)}],
            "chosen": [{"role": "assistant", "content": f"Star {n} rose. " * (1 + n % 5)}],
            "rejected": [{"role": "assistant", "content": f"Nothing, {n}. " * (1 + n % 7)}],
        }
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("precomputed", "objective"),
    [
        (False, {"loss_type": "sigmoid"}),
        pytest.param(True, {"loss_type": "sigmoid"}, marks=pytest.mark.slow),
        pytest.param(True, {"loss_type": "hinge"}, marks=pytest.mark.slow),
        pytest.param(True, {"loss_type": "ipo"}, marks=pytest.mark.slow),
        pytest.param(True, {"loss_type": "robust", "label_smoothing": 0.1}, marks=pytest.mark.slow),
        (True, {"loss_type": ["sigmoid", "ipo"], "loss_weights": [0.8, 0.2]}),
    ],
    ids=["sigmoid, reference in each step", "sigmoid", "hinge", "ipo", "robust", "sum of two"],
)
def test_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precomputed: bool, objective: dict[str, Any]) -> None:
    from trl import DPOConfig, DPOTrainer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny.save_model(tmp_path / "model")
    rows = preferences(48)
    rows_file = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"learning_rate": 3e-4, "max_grad_norm": 0.05, "beta": 0.5, **objective}
    trainer = DPOTrainer(
        model=model,
        ref_model=None if precomputed else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=DPOConfig(**trl_options(tmp_path, 96) | settings, precompute_ref_log_probs=precomputed),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )

    def key(example: Any) -> Any:
        return tuple(tuple((example["prompt_ids"] + example[name])[:96]) for name in ("chosen_ids", "rejected_ids"))

    trainer.data_collator = recorder = Recorder(trainer.data_collator, key)
    count = len(trainer.train_dataset)
    trainer.train()
    assert count < len(rows)  # some prompts fill a whole row
    assert count % 4 == 0  # otherwise a mean of means is not the mean

    def order(table: Any) -> list[list[int]]:
        # Pairs that are equal after truncation are interchangeable.
        number = {tuple(tuple(s.ids.tolist()) for s in row.sequences): index for index, row in enumerate(table)}
        assert len(table) == count
        return [[number[key] for key in step] for step in steps_of(recorder.batches[-2 * STEPS :], count)]

    lines, ours = run_ours(folder, tmp_path, monkeypatch, rows_file, order, objective="dpo", max_length=96, **settings)
    assert_same(model, trainer.state.log_history, ours, lines, folder, settings["max_grad_norm"])
    for log, line in zip(trainer.state.log_history, lines, strict=False):
        assert line["rewards/margins"] == pytest.approx(log["rewards/margins"], rel=1e-3, abs=1e-4)
