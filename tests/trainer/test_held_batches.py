"""A Trainer whose micro-batches are held back trains like one that computes them one by one, and loads each block twice."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import horizon_lm
from horizon_lm.errors import StreamingError
from horizon_lm.integrations.held_batches import HeldBatches
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.trainer_runs import STEPS, Loads, history, train


class HeldTrainer(HeldBatches, Trainer):
    """The mixin alone."""


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_equal_to_the_plain_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = tiny_models.build("llama")
    expected = train(Trainer, plain, tmp_path / "plain", **settings)
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="whole")
    got = train(HeldTrainer, model, tmp_path / "streamed", **settings)
    assert len(history(got)) > STEPS
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(model), 1e-5) is None


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


@pytest.mark.parametrize("use", ["read", "drop"])
def test_gradients_between_the_micro_batches_of_a_step_are_rejected(tmp_path: Path, use: str) -> None:
    """A plain trainer has the gradients of the first micro-batches there; none would be a silent difference."""

    class Base(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            for param in model.parameters():
                if use == "drop":
                    param.grad = None
                elif param.grad is not None:
                    param.grad.mul_(0.5)
            return loss

    cls = type("Changing", (HeldBatches, Base), {})
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    with pytest.raises(StreamingError, match="no gradients between them; read or change gradients in a callback"):
        train(cls, model, tmp_path / "held", eval_strategy="no")
    assert next(model.parameters()).grad is None  # the step has ended
    plain = tiny_models.build("llama")
    expected = train(Base, plain, tmp_path / "plain", eval_strategy="no", gradient_accumulation_steps=1)
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    got = train(cls, model, tmp_path / "single", eval_strategy="no", gradient_accumulation_steps=1)
    assert difference(history(expected), history(got), 1e-5) is None
    assert difference(copied_weights(plain), copied_weights(model), 1e-5) is None
