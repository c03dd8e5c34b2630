"""A Trainer goes on from its checkpoint as if it had not been interrupted, and the folder is an ordinary one."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import horizon_lm
from horizon_lm.common.disk import Disk
from horizon_lm.errors import ConfigError
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import StopAt, masters, require_resumes, train

CLS = horizon_lm.trainer(Trainer)
BETWEEN = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}  # an epoch has four steps


def build(precision: str = "float32", family: str = "llama", **config: Any) -> Any:
    return horizon_lm.stream(tiny_models.build(family, **config), precision=precision)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        pytest.param("float32", {}, marks=pytest.mark.slow),
        ("fp32_master", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
        ("bf16", {"optim": "adamw_8bit"}),
        (
            "float32",
            {"dropout": 0.1, "bf16": True, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
        ),
    ],
    ids=str,
)
def test_resume_in_mid_epoch_is_bit_exact(tmp_path: Path, precision: str, settings: dict[str, Any]) -> None:
    settings = BETWEEN | settings
    config = {"attention_dropout": settings.pop("dropout", 0.0)}
    require_resumes(lambda name, **more: train(CLS, build(precision, **config), tmp_path / name, **settings, **more))


def test_the_folder_is_an_ordinary_one_and_nothing_of_ours_is_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train(CLS, build("fp32_master"), tmp_path, **BETWEEN, save_total_limit=2)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-7"}
    last = tmp_path / "checkpoint-7"
    opened = horizon_lm.stream(AutoModelForCausalLM.from_pretrained(last), precision="fp32_master")
    assert difference(masters(opened), masters(trainer.model), 0.0) is None
    assert {path.name for path in last.iterdir()} == {
        "config.json", "generation_config.json", "horizon", "model.safetensors", "rng_state.pth", "trainer_state.json",
        "training_args.bin",
    }  # fmt: skip
    assert not [path for path in (last / "horizon").rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    (last / "training_args.bin").write_bytes(b"not read")
    loaded: list[str] = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda file, *args, **more: loaded.append(str(file)) or load(file, *args, **more)
    )
    train(CLS, build("fp32_master"), tmp_path, **BETWEEN, resume=True, max_steps=8)
    assert [Path(file).name for file in loaded] == ["rng_state.pth"]  # by transformers, with weights_only


@pytest.mark.parametrize(
    "family", thinned(["mixtral", "llama"], every=2)
)  # whose folder has other names than the model
def test_best_model(tmp_path: Path, family: str) -> None:
    settings = BETWEEN | {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    settings |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # so it is the first one
    kept: dict[int, Any] = {}

    class Keep(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kept[state.global_step] = masters(model)

    trainer = train(CLS, build("fp32_master", family), tmp_path, **settings, callbacks=[Keep()])
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert difference(masters(trainer.model), kept[6], 0.0) is not None
    assert difference(masters(trainer.model), kept[2], 0.0) is None


def test_checkpoints_that_cannot_be_resumed_from(tmp_path: Path) -> None:
    train(CLS, build(), tmp_path / "model only", **BETWEEN, save_only_model=True)
    with pytest.raises(ConfigError, match="save_only_model"):
        train(CLS, build(), tmp_path / "model only", **BETWEEN, resume=True)
    train(CLS, build(), tmp_path / "whole", **BETWEEN)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    shutil.copytree(checkpoint, tmp_path / "kept")
    unit = sorted((checkpoint / "horizon").rglob("*.safetensors"))[0]
    data = bytearray(unit.read_bytes())
    data[-1] ^= 1
    unit.write_bytes(data)
    with pytest.raises(ConfigError, match=unit.name):
        train(CLS, build(), tmp_path / "whole", **BETWEEN, resume=str(checkpoint))
    with pytest.raises(ConfigError, match="precision"):
        train(CLS, build("bf16"), tmp_path / "whole", **BETWEEN, resume=str(tmp_path / "kept"))


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[dict[str, Any]] = []

    class Job:
        def is_done(self) -> bool:
            return True

        done = is_done

        def result(self) -> None:
            return None

    class Hub:
        def create_repo(self, *args: Any, **kwargs: Any) -> Any:
            return type("Url", (str,), {"repo_id": "someone/model"})("https://hub/someone/model")

        def upload_folder(self, **given: Any) -> Any:
            uploads.append({"files": {path.name for path in Path(given["folder_path"]).iterdir()}})
            return Job()

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer = train(CLS, build(), tmp_path, **BETWEEN, push_to_hub=True, hub_model_id="someone/model", hub_token="none")
    assert uploads
    trainer.push_to_hub()
    assert {"model.safetensors", "README.md", "config.json"} <= uploads[-1]["files"]
    card = (tmp_path / "README.md").read_text()
    assert "learning_rate: 0.001" in card
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", thinned(["model.safetensors", "manifest.json"], every=2))
def test_a_save_that_fails_leaves_the_model_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The script gets the error of the system; what was trained is in memory, and can be saved elsewhere."""
    model, create = build(), Disk.create

    def fail(self: Disk, path: Path, **options: Any) -> Any:
        if name in path.name and "checkpoint-4" in str(path):
            raise OSError(errno.EROFS, "Read-only file system")
        return create(self, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", fail)
        with pytest.raises(OSError, match="Read-only file system"):
            train(CLS, model, tmp_path / "run", **BETWEEN)
    model.save_pretrained(tmp_path / "elsewhere")
    whole = train(CLS, build(), tmp_path / "whole", **BETWEEN, callbacks=[StopAt(4)])
    opened = horizon_lm.stream(AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere"), precision="float32")
    assert difference(masters(opened), masters(whole.model), 0.0) is None
