"""Trainers of transformers and TRL with several processes: they train as with a plain model in DistributedDataParallel."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", reason="needs the whole installation")

import datasets
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import horizon_lm
from horizon_lm.errors import ConfigError, StreamingError
from tests.distributed.pool import Pool
from tests.e2e import tiny
from tests.seams.compare import difference
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import history
from tests.support.trl_trainers import TRAINERS, make
from tests.trainer import rows

pytestmark = pytest.mark.filterwarnings("ignore")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "sft packed": EVALUATING,
    "sft assistant only": {"weight_decay": 0.1, "max_grad_norm": 0.1},
    "sft neftune": {"average_tokens_across_devices": False, "neftune_noise_alpha": None},
    "dpo with a reference": {},
    "kto": {},
}


def run(world: int, name: str, folder: str, output: str, settings: dict[str, Any], streams: bool) -> Any:
    """Return a trainer that has trained."""
    more = dict(settings)
    file, resume, adapters = (more.pop(key, None) for key in ("file", "resume", "adapters"))
    if file:
        more["train_dataset"] = datasets.load_dataset("json", data_files=file, split="train", cache_dir=f"{file}-cache")
    if "eval_strategy" in settings:
        more["eval_dataset"] = datasets.Dataset.from_list(rows.of_kind(name.split()[0], 6))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    if streams:
        model = horizon_lm.stream(model, "cpu", "float32")
    cls = TRAINERS[name][0]
    trainer = make(name, horizon_lm.trainer(cls) if streams else cls, model, Path(output), **more)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{output}/last")
    return trainer


def as_rank(rank: int, world: int, *args: Any) -> list[dict[str, float]]:
    """Train as one of the processes that torchrun would start."""
    os.environ |= dict(zip(ENVIRONMENT, (str(rank), str(world), str(rank), str(world), "localhost", "1"), strict=True))
    try:
        return history(run(world, *args))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for variable in ENVIRONMENT:
            del os.environ[variable]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    file = "adapter_model.safetensors" if (folder / "last" / "adapter_config.json").is_file() else "model.safetensors"
    return load_file(folder / "last" / file)


def compare(pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Compare two processes that stream a model with two that have a plain one."""
    folder, given = str(tiny.save_model(tmp_path / "model")), {"gradient_accumulation_steps": 2, **settings}
    lines = []
    for streams in (False, True):
        if "file" in settings:
            given["file"] = str(tiny.write_jsonl(tmp_path / f"{streams}.jsonl", rows.of_kind("dpo")))
        found = pool.run(2, as_rank, 2, name, folder, str(tmp_path / str(streams)), given, streams)
        lines.append([{key: round(value, 6) for key, value in line.items()} for line in found[0]])
    assert difference(*lines, 2e-5) is None
    plain, streamed = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert streamed.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.allclose(streamed[key], value, atol=2e-4), key


@pytest.mark.parametrize("name", thinned(CASES, every=3))
def test_equal_to_distributed_data_parallel(pool: Pool, tmp_path: Path, name: str) -> None:
    compare(pool, tmp_path, name, CASES[name])


LORA = LoraConfig(r=4, target_modules="all-linear")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("sft assistant only", {"adapters": True}, marks=pytest.mark.slow),
        pytest.param("sft assistant only", {"peft_config": LORA}, marks=pytest.mark.slow),
        ("dpo with a reference", {"peft_config": LORA}),
    ],
)
def test_adapters(pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    compare(pool, tmp_path, name, settings)


def test_reference_on_disk(pool: Pool, tmp_path: Path) -> None:
    """Rows in a file: the reference is computed once, by all ranks, and kept in a file that all of them find."""
    compare(pool, tmp_path, "dpo with a reference", {"file": True, "precompute_ref_log_probs": True})


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}


def test_checkpoints_resume_exactly(pool: Pool, tmp_path: Path) -> None:
    folder, name = str(tiny.save_model(tmp_path / "model")), "sft assistant only"
    whole = pool.run(2, as_rank, 2, name, folder, str(tmp_path / "whole"), SAVING, True)
    assert (tmp_path / "whole" / "checkpoint-2" / "horizon" / "manifest.json").is_file()
    later = SAVING | {"resume": str(tmp_path / "whole" / "checkpoint-2")}
    resumed = pool.run(2, as_rank, 2, name, folder, str(tmp_path / "resumed"), later, True)
    assert resumed[0][-2:] == whole[0][-2:]
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "resumed")[key], value), key


class NanOnOneRank(Trainer):
    """A trainer whose loss is NaN on one rank, while its gradients are zero there."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 0 + float("nan") if dist.get_rank() == 1 else loss


def skipped(rank: int, world: int, folder: str, output: str) -> int:
    """Return the number of skipped steps of a rank on a machine of its own, which has a copy of the model."""
    os.environ |= dict(zip(ENVIRONMENT, (str(rank), str(world), "0", "1", "localhost", "1"), strict=True))
    try:
        model = horizon_lm.stream(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "cpu", "float32")
        optimizer = horizon_lm.AdamW(model, lr=1e-3, non_finite="skip")
        args = TrainingArguments(output, use_cpu=True, max_steps=1, save_strategy="no", report_to="none")
        tokens = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 32
        optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        horizon_lm.trainer(NanOnOneRank)(model, args, train_dataset=tokens, optimizers=optimizers).train()
        return optimizer.num_skipped
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for variable in ENVIRONMENT:
            del os.environ[variable]


def test_all_copies_skip_a_step(pool: Pool, tmp_path: Path) -> None:
    folder = str(tiny.save_model(tmp_path / "model"))
    assert pool.run(2, skipped, 2, folder, str(tmp_path / "out")) == [1, 1]


def rejected(rank: int, world: int, name: str, folder: str, settings: dict[str, Any]) -> str:
    try:
        as_rank(rank, world, name, folder, f"{folder}-out", settings, True)
    except (ConfigError, StreamingError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("grpo with a reference", {}, "GRPOTrainer generates"),
        ("dpo with a reference", {"adapters": True}, "horizon-lm (objective: dpo), which needs no copy"),
        ("sft assistant only", {**SAVING, **EVALUATING, "eval_steps": 2, "load_best_model_at_end": True, "save_only_model": True},
         "load_best_model_at_end needs whole checkpoints"),
    ],
)  # fmt: skip
def test_rejected(pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any], problem: str) -> None:
    folder = str(tiny.save_model(tmp_path / "model"))
    assert all(problem in error for error in pool.run(2, rejected, 2, name, folder, settings))
