"""A Trainer whose micro-batches are held back trains like one that computes them one by one, and loads each block twice."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainingArguments

import horizon_lm
from horizon_lm.integrations.held_batches import HeldBatches
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models

STEPS, ACCUMULATION = 7, 4  # 26 rows in batches of two: the last step of an epoch has one batch


class HeldTrainer(HeldBatches, Trainer):
    """The mixin alone."""


def rows(number: int = 26) -> datasets.Dataset:
    batch = tiny_models.batch(rows=number, seed=1)
    return datasets.Dataset.from_dict({name: value.tolist() for name, value in batch.items()})


def train(cls: Any, model: Any, folder: Path, resume: bool | str | None = None, **settings: Any) -> Any:
    """Train on a few rows, and return the trainer. Settings that are no arguments of training go to the trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    given = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": ACCUMULATION, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    data = {"train_dataset": rows(), "eval_dataset": rows(4)}
    own = set(inspect.signature(Trainer).parameters) & set(settings)
    data |= {name: settings.pop(name) for name in own}
    trainer = cls(model, TrainingArguments(**(given | settings)), **data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def history(trainer: Any) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return [{k: float(line[k]) for k in kept if k in line} for line in trainer.state.log_history]


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_equal_to_the_plain_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = tiny_models.build("llama")
    expected = train(Trainer, plain, tmp_path / "plain", **settings)
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="whole")
    got = train(HeldTrainer, model, tmp_path / "streamed", **settings)
    assert len(history(got)) > STEPS
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(model), 1e-5) is None


class Loads(TrainerCallback):
    """Counts the loads of blocks in each step."""

    def __init__(self, model: Any) -> None:
        self.model, self.counts, self.before = model, list[float](), 0

    def count(self) -> int:
        moved = self.model._horizon.engine.device.counters.moved
        return sum(number for operation, number in moved.items() if operation.startswith("stream_in:block"))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = self.count()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        units = self.model._horizon.engine.store.units
        blocks = sum(slabs.weights.nbytes for unit, slabs in units.items() if unit.startswith("block"))
        self.counts.append((self.count() - self.before) / blocks)


def test_each_block_is_loaded_twice_a_step(tmp_path: Path) -> None:
    counts = {}
    for cls in (Trainer, HeldTrainer):
        model = horizon_lm.stream(tiny_models.build("llama", num_hidden_layers=6), precision="float32")
        train(cls, model, tmp_path / cls.__name__, callbacks=[loads := Loads(model)], eval_strategy="no")
        counts[cls] = loads.counts
    assert max(counts[HeldTrainer]) <= 2
    assert max(counts[Trainer]) > 6


@pytest.mark.parametrize("head", ["chunked", "whole"])
def test_label_smoothing_costs_no_further_load(tmp_path: Path, head: str) -> None:
    """Its loss reads all logits, whatever the head."""
    model = horizon_lm.stream(tiny_models.build("llama", num_hidden_layers=6), precision="float32", head=head)
    settings = {"label_smoothing_factor": 0.1, "eval_strategy": "no"}
    train(HeldTrainer, model, tmp_path, callbacks=[loads := Loads(model)], **settings)
    assert set(loads.counts) == {2}


def test_a_failing_batch_ends_the_step_and_not_the_trainer(tmp_path: Path) -> None:
    calls: list[int] = []

    class Base(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:
                raise ValueError("a row that cannot be used")
            return super().compute_loss(*args, **kwargs)

    cls = type("Failing", (HeldBatches, Base), {})
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    with pytest.raises(ValueError, match="cannot be used"):
        train(cls, model, tmp_path / "failing", eval_strategy="no")
    train(HeldTrainer, model, tmp_path / "again", eval_strategy="no")
