"""A process that sees several GPUs, and trains on one of them: as a model that a ``device_map`` has split, without copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import horizon_lm
from horizon_lm.errors import StreamingError
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.trainer_runs import history, train
from tests.support.trl_trainers import TRAINERS, make

pytestmark = pytest.mark.filterwarnings("ignore")


def show_two_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let arguments say that there are two GPUs, until the Trainer says that it uses one."""
    patch.setattr(TrainingArguments, "n_gpu", property(lambda self: 1 if vars(self).get("_n_gpu") == 1 else 2))


def opened(folder: Path, **arguments: Any) -> Any:
    return horizon_lm.from_pretrained(folder, "cpu", "float32", **arguments)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_map_to_anywhere_is_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_map: str) -> None:
    tiny_models.build("llama", seed=2).save_pretrained(tmp_path / "model")
    models = [opened(tmp_path / "model"), opened(tmp_path / "model", device_map=device_map)]
    expected = train(horizon_lm.trainer(Trainer), models[0], tmp_path / "one")
    show_two_gpus(monkeypatch)
    found = train(horizon_lm.trainer(Trainer), models[1], tmp_path / "two")
    assert difference(history(expected), history(found), 0.0) is None
    assert difference(*map(copied_weights, models), 0.0) is None


@pytest.mark.parametrize("name", ["sft packed", "dpo with a reference", "kto", "grpo with a reference"])
def test_trls_trainers_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """TRL rejects copies when it makes a trainer. The adapters are added after the model was opened."""
    folder, lines = tiny.save_model(tmp_path / "model"), []
    for arguments in ({}, {"device_map": "auto"}):
        torch.manual_seed(1)
        model = get_peft_model(opened(folder, **arguments), LoraConfig(target_modules=["q_proj"], r=2))
        if arguments:
            show_two_gpus(monkeypatch)
        trainer = make(name, horizon_lm.trainer(TRAINERS[name][0]), model, tmp_path / str(len(lines)), max_steps=2)
        trainer.train()
        lines.append([{key: value for key, value in line.items() if "loss" in key} for line in history(trainer)])
    assert lines[0] == lines[1]


@pytest.mark.parametrize("arguments", [{}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}], ids=str)
def test_copies_are_rejected_without_such_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """A plain model is copied then, and a step has the rows of all GPUs."""
    tiny_models.build("llama", seed=2).save_pretrained(tmp_path / "model")
    model = opened(tmp_path / "model", **arguments)
    show_two_gpus(monkeypatch)
    with pytest.raises(StreamingError, match=r"torchrun, or .* CUDA_VISIBLE_DEVICES"):
        train(horizon_lm.trainer(Trainer), model, tmp_path / "two")
