"""transformers' Trainer with its defaults runs equally on a plain and on a streamed model."""

import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import horizon_lm
from horizon_lm.errors import HorizonError
from tests.seams.compare import difference
from tests.seams.use import copied_weights, evaluated
from tests.support import tiny_models

STEPS, ACCUMULATION = 20, 4


def _rows(seed: int, number: int) -> datasets.Dataset:
    """Return rows of tokens, with padding and with a column that no model knows."""
    batch = tiny_models.batch(rows=number, seed=seed)
    columns = {name: value.tolist() for name, value in batch.items()}
    return datasets.Dataset.from_dict({**columns, "place": list(range(number))})


def _trainer(model: Any, folder: Path, **settings: Any) -> Trainer:
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": ACCUMULATION, "eval_strategy": "steps", "eval_steps": 5, "save_steps": 10,
        "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    optimizers = settings.pop("optimizers", (None, None))
    return Trainer(
        model, TrainingArguments(**(given | settings)), train_dataset=_rows(1, 48), eval_dataset=_rows(2, 4),
        optimizers=optimizers,
    )  # fmt: skip


def _history(trainer: Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return [{k: float(line[k]) for k in kept if k in line} for line in trainer.state.log_history]


def _train(model: Any, folder: Path, **settings: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    trainer = _trainer(model, folder, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trainers emit many warnings; the table of rows checks those of streaming
        trainer.train()
    return _history(trainer)


def test_trainer_with_defaults_trains_a_streamed_model_equally(tmp_path: Path) -> None:
    plain = tiny_models.build("llama")
    expected = _train(plain, tmp_path / "plain")
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    got = _train(model, tmp_path / "streamed")
    assert any("eval_loss" in line for line in got)
    assert len([line for line in got if "grad_norm" in line]) == STEPS
    assert difference(expected, got, 1e-6) is None
    assert difference(copied_weights(plain), copied_weights(model), 1e-6) is None
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed" / f"checkpoint-{STEPS}", dtype=torch.float32)
    assert evaluated(saved) == pytest.approx(evaluated(plain), rel=1e-6)


def test_trainer_resumes_a_streamed_model_from_its_checkpoint(tmp_path: Path) -> None:
    settings = {"max_steps": 6, "save_steps": 3, "eval_strategy": "no"}
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="whole")
    expected = _train(model, tmp_path, **settings)
    other = horizon_lm.stream(tiny_models.build("llama", seed=3), precision="float32", head="whole")
    trainer = _trainer(other, tmp_path, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert difference(expected[:6], _history(trainer)[:6], 1e-6) is None
    assert difference(copied_weights(model), copied_weights(other), 1e-6) is None


def test_trainer_with_our_optimizer(tmp_path: Path) -> None:
    settings = {"max_steps": 6, "lr_scheduler_type": "constant"}
    plain = tiny_models.build("llama")
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    expected = _train(plain, tmp_path / "plain", optimizers=(theirs, None), **settings)
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="whole")
    ours = horizon_lm.AdamW(model, lr=1e-3, weight_decay=0.1)
    assert difference(expected, _train(model, tmp_path / "ours", optimizers=(ours, None), **settings), 1e-6) is None
    assert difference(copied_weights(plain), copied_weights(model), 1e-6) is None


def test_trainer_in_mixed_precision(tmp_path: Path) -> None:
    settings = {"bf16": True, "max_steps": 10}
    expected = _train(tiny_models.build("llama"), tmp_path / "plain", **settings)
    model = horizon_lm.stream(tiny_models.build("llama"), precision="bf16")
    got = _train(model, tmp_path / "streamed", **settings)
    for mine, theirs in zip(got, expected, strict=True):
        assert {k: v for k, v in mine.items() if "loss" in k} == pytest.approx(
            {k: v for k, v in theirs.items() if "loss" in k}, rel=2e-2
        )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed" / "checkpoint-10", dtype=torch.float32)
    assert evaluated(saved) == pytest.approx(evaluated(model), rel=1e-3)


def test_trainer_in_half_precision_works_or_is_rejected_by_name(tmp_path: Path) -> None:
    settings = {"fp16": True, "max_steps": 4, "eval_strategy": "no"}
    try:
        expected = _train(tiny_models.build("llama"), tmp_path / "plain", **settings)
    except ValueError as error:
        pytest.skip(f"transformers does not train in fp16 on this machine: {error}")
    try:
        got = _train(
            horizon_lm.stream(tiny_models.build("llama"), precision="float32"), tmp_path / "streamed", **settings
        )
    except HorizonError as error:
        assert "fp16" in str(error) or "float16" in str(error)  # noqa: PT017  (either is fine)
        return
    assert [line["loss"] for line in got if "loss" in line] == pytest.approx(
        [line["loss"] for line in expected if "loss" in line], rel=2e-2
    )
