"""Law: what is saved is what was trained, in checkpoints, in exported models and in adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytest.importorskip("xxhash", reason="needs the whole installation")

import horizon_lm
from tests.laws.trainings import ADAPTERS, Folders, Training, engine_of, of_models, of_optimizers, open_training, train
from tests.support.training_steps import masters

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT saves embeddings whose adapters are trained


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def trained(training: Training, folders: Folders) -> tuple[Any, Any]:
    model, optimizer = open_training(training, folders)
    train(training, model, optimizer, range(2))
    horizon_lm.synchronize(model)
    return model, optimizer


def as_saved(training: Training, model: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights in float32, by the names that they are saved under."""
    if not training.is_adapted:
        return masters(model)
    store = engine_of(model).store
    found = {}
    for name, param in model.named_parameters():
        own = name.removeprefix("base_model.model.")
        if param.requires_grad:
            saved_as = (
                name.replace(".modules_to_save.default", "")
                .replace("_vector.default.weight", "_vector")
                .replace(".default", "")
            )
            found[saved_as] = (store.master(own) if own in store.unit_of else param.detach().float()).clone()
    return found


@pytest.mark.parametrize("training", [*of_optimizers(keep=["bf16"]), *of_models()])
def test_a_saved_model_is_the_trained_one(training: Training, folders: Folders, tmp_path: Path) -> None:
    """As transformers reads it, as PEFT has it, and as a checkpoint is exported."""
    model, optimizer = trained(training, folders)
    expected = as_saved(training, model)
    if training.model in ADAPTERS:
        model.peft_config["default"].base_model_name_or_path = "base"  # without which adapters cannot be exported
    model.save_pretrained(tmp_path / "model", **({} if training.is_adapted else {"dtype": torch.float32}))
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    horizon_lm.export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported", dtype="float32")
    saved, exported = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "exported")
    if training.is_adapted:
        for name, each in expected.items():
            assert torch.equal(each.to(saved[name].dtype), saved[name]), name
            assert torch.equal(each, exported[name]), name
        return
    assert saved.keys() == exported.keys()
    assert all(torch.equal(each, exported[name]) for name, each in saved.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, param in again.named_parameters():
        assert torch.equal(param, expected[name]), name


@pytest.mark.parametrize("training", of_optimizers())
def test_a_checkpoint_has_every_byte_under_its_name(training: Training, folders: Folders, tmp_path: Path) -> None:
    """Files are safetensors with the names of the parameters, aligned to pages."""
    model, optimizer = trained(training, folders)
    horizon_lm.save_checkpoint(tmp_path / "one", model, optimizer)
    found = {}
    for path in sorted((tmp_path / "one" / "units").iterdir()):
        assert path.stat().st_size % 4096 == 0
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if not name.startswith(".padding")}  # noqa: SIM118
    store = engine_of(model).store
    expected = {name: store.weight(name) for name in store.unit_of}
    for slab in store.slabs:
        for name in slab.layout if slab.low is not None else ():
            expected[f"{name}.low"] = slab.layout.view(slab.low, name)
        for name in slab.grad_layout:
            state = optimizer.moments.state(slab, name)
            expected |= {f"{name}.{key}": value for key, value in state.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


# Controls


def test_a_flipped_bit_is_noticed(folders: Folders, tmp_path: Path) -> None:
    model, _ = trained(Training(precision="fp32_master"), folders)
    expected = masters(model)
    engine_of(model).store.slab_of("lm_head.weight").low[7] ^= 1
    model.save_pretrained(tmp_path, dtype=torch.float32)
    different = [name for name, each in tensors_of(tmp_path).items() if not torch.equal(each, expected[name])]
    assert different == ["lm_head.weight"]
