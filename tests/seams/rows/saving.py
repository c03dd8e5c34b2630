"""Saving a model."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import AutoModelForCausalLM

import horizon_lm
from tests.seams.rows.trainers import fresh_accelerator
from tests.seams.seam import EITHER, Case, row
from tests.seams.use import adamw, evaluated, gradients, train
from tests.support import tiny_models

SECTION = "Saving"


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


def _names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _edited(model: Any) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 for name, value in model.state_dict().items()}


ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "nothing": lambda model: {},
    "as-trainer": lambda model: {"state_dict": model.state_dict()},
    "state_dict": lambda model: {"state_dict": _edited(model)},
    "main-process": lambda model: {"is_main_process": True},
    "other-process": lambda model: {"is_main_process": False},
    "safe_serialization": lambda model: {"safe_serialization": True},
    "max_shard_size": lambda model: {"max_shard_size": "5GB"},
    "shards": lambda model: {"max_shard_size": "20KB"},
    "variant": lambda model: {"variant": "fp16"},
    "push_to_hub": lambda model: {"push_to_hub": False},
    "token": lambda model: {"token": None},
    "originals": lambda model: {"save_peft_format": True, "save_original_format": True},
    "accelerate": lambda model: {"is_main_process": True, "save_function": fresh_accelerator().save},
    "accelerate-state": lambda model: {
        "save_function": torch.save,
        "state_dict": fresh_accelerator().get_state_dict(model),
    },
    "for-the-hub": lambda model: {
        "token": "none",
        "private": True,
        "repo_id": "a/b",
        "commit_message": "end",
        "create_pr": True,
    },
}


@row(
    "saving.arguments",
    SECTION,
    "`save_pretrained` with transformers' arguments: `state_dict`, `is_main_process`, `safe_serialization`, `max_shard_size`, "
    "`variant`, `push_to_hub=False`, `token`, and with accelerate's `save_function` and `get_state_dict`",
    cases={each: Case(arguments={"which": each}) for each in ARGUMENTS},
    edits=True,
)
def save_arguments(model: Any, which: str) -> Any:
    train(model, adamw(model), steps=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **ARGUMENTS[which](model))
        files = [name for name in _names(folder) if "-of-" not in name]
        return {"files": files, "tensors": _tensors(folder)}


@row("saving.unknown-argument", SECTION, "`save_pretrained` with an argument that has no effect: the model is saved all the same",
     cases={name: Case(arguments={"given": {name: value}}) for name, value in
            (("unknown_argument", 1), ("safe_serialization", False))}, warns=True)  # fmt: skip
def save_unknown(model: Any, given: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **given)
        return _tensors(folder)


@row(
    "saving.reload",
    SECTION,
    "Load the folder that `save_pretrained` wrote with plain transformers",
    cases={f"{family}-{p}": Case(partial(tiny_models.build, family), {"precision": p}) for family in ("llama", "gpt2", "mixtral")
           for p in ("float32", "bf16", "fp32_master")},
)  # fmt: skip
def reload(model: Any) -> Any:
    """Return whether a plain model loaded from the folder has the same loss."""
    train(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return round(evaluated(other) - evaluated(model), 2)


@row("saving.accelerate", SECTION, "`Accelerator.save_model`: all tensors are written",
     cases={family: Case(partial(tiny_models.build, family)) for family in ("llama", "gpt2")})  # fmt: skip
def accelerate_save_model(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        fresh_accelerator().save_model(model, folder)
        return _tensors(folder)


@row("saving.accelerate-state", SECTION, "`Accelerator.save_state` and `load_state`", EITHER, edits=True)
def accelerate_state(model: Any) -> Any:
    accelerator = fresh_accelerator()
    model, optimizer = accelerator.prepare(model, adamw(model))
    train(model, optimizer)
    before = evaluated(model)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        train(model, optimizer)
        accelerator.load_state(folder)
    return [before, evaluated(model), train(model, optimizer)]


@row("saving.safetensors", SECTION, "`safetensors.torch.save_file(model.state_dict())`, or `save_model` and `load_model`",
     cases={how: Case(arguments={"how": how}) for how in ("save_file", "save_model", "tensors")})  # fmt: skip
def safetensors(model: Any, how: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if how == "save_model":
            save_model(model, str(path))
            written = load_file(path)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            load_model(model, path)
            return [written, gradients(model)]
        save_file(dict(model.state_dict()) if how == "save_file" else dict(model.named_parameters()), path)
        return load_file(path)


@row("saving.torch-save", SECTION, "`torch.save(model.state_dict())`, loaded into a plain model and back",
     cases={p: Case(options={"precision": p}) for p in ("float32", "bf16")})  # fmt: skip
def torch_save(model: Any) -> Any:
    train(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        size = path.stat().st_size
        saved = torch.load(path)
    other = tiny_models.build("llama", seed=3)
    other.load_state_dict(saved)
    expected = evaluated(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    model.load_state_dict(saved)
    numbers = sum(value.numel() * value.element_size() for value in saved.values())
    return {"plain": round(evaluated(other) - expected, 4), "back": round(evaluated(model) - expected, 4),
            "no more than the weights": size < 1.5 * numbers}  # fmt: skip


@row("saving.state-dict", SECTION, "`state_dict()` as of a plain model: `keep_vars`, `prefix`, of a module, in torch's checkpoints",
     cases={how: Case(arguments={"how": how}) for how in ("keep_vars", "prefix", "module", "torch")})  # fmt: skip
def state_dict(model: Any, how: str) -> Any:
    from torch.distributed.checkpoint import state_dict as torch_state

    made = {
        "keep_vars": lambda: model.state_dict(keep_vars=True),
        "prefix": lambda: model.state_dict(prefix="a."),
        "module": lambda: model.model.layers[1].state_dict(),
        "torch": lambda: torch_state.get_model_state_dict(model),
    }[how]()
    return {name: value.detach().clone() for name, value in made.items()}


@row("saving.after-step", SECTION, "`state_dict()` of the model or of a module right after `optimizer.step()`",
     cases={how: Case(arguments={"how": how}) for how in ("model", "decoder", "block", "embedding")})  # fmt: skip
def after_step(model: Any, how: str) -> Any:
    module = {"model": "", "decoder": "model", "block": "model.layers.1", "embedding": "model.embed_tokens"}[how]
    optimizer = adamw(model)
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()
    return {name: value.clone() for name, value in model.get_submodule(module).state_dict().items()}


@row("saving.kept", SECTION, "Keep a `state_dict()` during training: its tensors follow, as in a plain model")
def kept(model: Any) -> Any:
    state = model.state_dict()
    train(model, adamw(model))
    model.state_dict()
    return dict(state)


@row("saving.load-strict", SECTION, "`load_state_dict` with missing or unknown tensors, or other shapes", EITHER,
     cases={how: Case(arguments={"how": how}) for how in ("missing", "unknown", "shape", "partial", "assign")})  # fmt: skip
def load_strict(model: Any, how: str) -> Any:
    """Return the names in the error, if there is one, and the loss afterwards."""
    state = {name: value.clone() for name, value in tiny_models.build("llama", seed=4).state_dict().items()}
    if how in ("missing", "partial"):
        state.pop("model.norm.weight")
    if how == "unknown":
        state["nobody.knows.this"] = torch.zeros(3)
    if how == "shape":
        state["model.norm.weight"] = torch.zeros(5)
    try:
        model.load_state_dict(state, strict=how != "partial", assign=how == "assign")
        raised = ""
    except RuntimeError as error:
        if isinstance(error, horizon_lm.errors.HorizonError):
            raise
        raised = "norm.weight" if "norm.weight" in str(error) else "nobody" if "nobody" in str(error) else "?"
    return [raised, gradients(model)]
