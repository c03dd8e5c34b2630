"""Trainers of transformers and TRL with several processes, which train what one process trains."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the whole installation")

import datasets
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import horizon_lm
from tests.distributed.pool import Pool
from tests.e2e import tiny
from tests.trainer import rows
from tests.trainer.test_held_batches import history
from tests.trainer.test_trainers import TRAINERS, make

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # not finished
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
CASES: dict[str, dict[str, Any]] = {
    "sft packed": {"average_tokens_across_devices": True, **EVALUATING},
    "sft assistant only": {"weight_decay": 0.1, "max_grad_norm": 0.1},
    "dpo with a reference": {},
    "kto": {},
}


def model_of(folder: str, adapters: bool = False) -> Any:
    if not adapters:
        return horizon_lm.from_pretrained(folder, "cpu", "float32")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return horizon_lm.stream(get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")), "cpu", "float32")


def trained(name: str, folder: str, output: str, settings: dict[str, Any], adapters: bool, resume: bool = False) -> Any:
    cls = horizon_lm.trainer(TRAINERS[name][0])
    more = dict(settings)
    if "eval_strategy" in settings:
        more["eval_dataset"] = datasets.Dataset.from_list(rows.of_kind(name.split()[0], 6))
    trainer = make(name, cls, model_of(folder, adapters), Path(output), **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def as_rank(
    rank: int, world: int, name: str, folder: str, output: str, settings: dict[str, Any], adapters: bool, resume: bool
) -> Any:
    values = (str(rank), str(world), str(rank), str(world), "localhost", "1")
    os.environ |= dict(zip(ENVIRONMENT, values, strict=True))
    try:
        trainer = trained(name, folder, output, settings, adapters, resume)
        trainer.save_model(f"{output}/last")
        return history(trainer)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for variable in ENVIRONMENT:
            del os.environ[variable]


def compare(pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any], adapters: bool = False) -> None:
    """Compare two processes with one that accumulates twice as many micro-batches."""
    folder = str(tiny.save_model(tmp_path / "model"))
    given = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 0, **settings}
    found = pool.run(2, as_rank, 2, name, folder, str(tmp_path / "ranks"), given, adapters, False)
    alone = trained(name, folder, str(tmp_path / "one"), given | {"gradient_accumulation_steps": 4}, adapters)
    alone.save_model(str(tmp_path / "one" / "last"))
    expected = history(alone)
    assert len(found[0]) == len(expected)
    for ours, theirs in zip(found[0], expected, strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "mean_token_accuracy"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-6), (key, ours, theirs)
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    weights = [load_file(tmp_path / each / "last" / file) for each in ("ranks", "one")]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert torch.allclose(weights[0][key], value, atol=2e-4), key


@pytest.mark.parametrize("name", CASES)
def test_losses_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    compare(pool, tmp_path, name, CASES[name])
