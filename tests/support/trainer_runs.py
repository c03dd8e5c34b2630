"""Run a Trainer of transformers on a few rows, and read what it did."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.state import AcceleratorState
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import horizon_lm
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models

STEPS, ACCUMULATION = 7, 4  # 26 rows in batches of two: the last step of an epoch has one batch


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
        blocks = sum(slabs.plain.weights.nbytes for unit, slabs in units.items() if unit.is_block)
        self.counts.append((self.count() - self.before) / blocks)


def masters(model: Any) -> dict[str, torch.Tensor]:
    """Return all bits of the weights."""
    return {name: model.get_parameter(name).float() for name, _ in model.named_parameters()} | {
        f"low of {unit}": slabs.plain.low.clone()
        for unit, slabs in model._horizon.engine.store.units.items()
        if slabs.plain.low is not None
    }


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def require_resumes(run: Callable[..., Any]) -> None:
    """Require that a training which is stopped after two steps and resumed ends as one that was not.

    Args:
        run: trains into the folder of a name, with arguments of the trainer or with ``resume``, and returns the trainer.
    """
    whole, stopped = run("whole"), run("parts", callbacks=[StopAt(2)])
    assert difference(masters(whole.model), masters(stopped.model), 0.0) is not None
    resumed = run("parts", resume=True)
    assert resumed.state.global_step == whole.state.global_step > 2
    assert difference(masters(whole.model), masters(resumed.model), 0.0) is None
    assert history(resumed) == history(whole)
    states = [each.streamed_optimizer.state_dict() for each in (whole, resumed)]
    assert difference(*states, 0.0) is None
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


Settings = dict[str, Any]


def model_of(streamed: bool, trial: Any = None) -> Any:
    """Return a new model."""
    model = tiny_models.build("llama")
    return horizon_lm.stream(model, precision="float32") if streamed else model


def models() -> tuple[Any, Any]:
    """Return a plain model and the same one streamed."""
    return model_of(streamed=False), model_of(streamed=True)


def assert_equal(
    folder: Path, cls: Any = Trainer, make: Callable[[Any], Settings] = lambda model: {}
) -> tuple[Any, Any]:
    """Train a plain and a streamed model alike, assert that all numbers agree, and return both trainers."""
    plain, streamed = models()
    expected = train(cls, plain, folder / "plain", **make(plain))
    got = train(horizon_lm.trainer(cls), streamed, folder / "streamed", **make(streamed))
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(streamed), 1e-5) is None
    return expected, got
