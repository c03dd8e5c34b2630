"""Saving a model, and opening one."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import horizon_lm
from tests import families
from tests.seams.rows.trainers import fresh_accelerator
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_weights, evaluated, gradients, is_streamed, train

SAVING, OPENING = "Saving", "Opening"


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder."""
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
}


@row(
    "saving.arguments",
    SAVING,
    "`save_pretrained` with transformers' arguments: `state_dict`, `is_main_process`, `safe_serialization`, `max_shard_size`, "
    "`variant`, `push_to_hub=False`, `token`",
    cases={each: Case(arguments={"which": each}) for each in ARGUMENTS},
    edits=True,
)
def save_arguments(model: Any, which: str) -> Any:
    train(model, adamw(model), steps=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **ARGUMENTS[which](model))
        files = [name for name in _names(folder) if "-of-" not in name]
        return {"files": files, "tensors": _tensors(folder)}


@row("saving.unknown-argument", SAVING, "`save_pretrained` with an argument that nobody knows", EITHER)
def save_unknown(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, nobody_knows_this=1)
        return _tensors(folder)


@row(
    "saving.reload",
    SAVING,
    "Load what `save_pretrained` wrote with plain transformers",
    cases={f"{family}-{p}": Case(partial(families.build, family), {"precision": p}) for family in ("llama", "gpt2", "mixtral")
           for p in ("float32", "bf16", "fp32_master")},
)  # fmt: skip
def reload(model: Any) -> Any:
    """Return whether a plain model that is loaded from the folder has the loss of this one."""
    train(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return round(evaluated(other) - evaluated(model), 2)


@row("saving.accelerate", SAVING, "`Accelerator.save_model`: all tensors are written",
     cases={family: Case(partial(families.build, family)) for family in ("llama", "gpt2")})  # fmt: skip
def accelerate_save_model(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        fresh_accelerator().save_model(model, folder)
        return _tensors(folder)


@row("saving.accelerate-state", SAVING, "`Accelerator.save_state` and `load_state`", EITHER, edits=True)
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


@row("saving.safetensors", SAVING, "`safetensors.torch.save_file(model.state_dict())`, or `save_model` and `load_model`",
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


@row("saving.torch-save", SAVING, "`torch.save(model.state_dict())`, for a plain model and back",
     cases={p: Case(options={"precision": p}) for p in ("float32", "bf16")})  # fmt: skip
def torch_save(model: Any) -> Any:
    train(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        size = path.stat().st_size
        saved = torch.load(path)
    other = families.build("llama", seed=3)
    other.load_state_dict(saved)
    expected = evaluated(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.3)
    model.load_state_dict(saved)
    numbers = sum(value.numel() * value.element_size() for value in saved.values())
    return {"plain": round(evaluated(other) - expected, 4), "back": round(evaluated(model) - expected, 4),
            "no more than the weights": size < 1.5 * numbers}  # fmt: skip


@row("saving.state-dict", SAVING, "`state_dict()` is as it was: `keep_vars`, `prefix`, a module's, and what torch's checkpoints make of it",
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


@row("saving.after-step", SAVING, "`state_dict()` of the model or of a module right after `optimizer.step()`",
     cases={how: Case(arguments={"how": how}) for how in ("model", "decoder", "block", "embedding")})  # fmt: skip
def after_step(model: Any, how: str) -> Any:
    module = {"model": "", "decoder": "model", "block": "model.layers.1", "embedding": "model.embed_tokens"}[how]
    optimizer = adamw(model)
    model(**families.batch()).loss.backward()
    optimizer.step()
    return {name: value.clone() for name, value in model.get_submodule(module).state_dict().items()}


@row("saving.kept", SAVING, "Keep a `state_dict()` while training goes on: its tensors follow, as in a plain model")
def kept(model: Any) -> Any:
    state = model.state_dict()
    train(model, adamw(model))
    model.state_dict()
    return dict(state)


@row("saving.load-strict", SAVING, "`load_state_dict` with missing, unknown or misshapen tensors", EITHER,
     cases={how: Case(arguments={"how": how}) for how in ("missing", "unknown", "shape", "partial", "assign")})  # fmt: skip
def load_strict(model: Any, how: str) -> Any:
    """Return the names of the error that there is, and the loss afterwards."""
    state = {name: value.clone() for name, value in families.build("llama", seed=4).state_dict().items()}
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


# Opening


def _open(model: Any, folder: str, *args: Any, **arguments: Any) -> Any:
    if not is_streamed(model):
        return AutoModelForCausalLM.from_pretrained(folder, *args, **arguments)
    return horizon_lm.from_pretrained(folder, *args, device="cpu", precision="float32", **arguments)


TAKEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "nothing": lambda config: {},
    "dtype": lambda config: {"dtype": torch.float32},
    "dtype-name": lambda config: {"dtype": "float32"},
    "dtype-auto": lambda config: {"dtype": "auto"},
    "torch_dtype": lambda config: {"torch_dtype": torch.float32},
    "revision": lambda config: {"revision": "main"},
    "cache_dir": lambda config: {"cache_dir": "/tmp"},
    "token": lambda config: {"token": None},
    "local_files_only": lambda config: {"local_files_only": True},
    "force_download": lambda config: {"force_download": False},
    "trust_remote_code": lambda config: {"trust_remote_code": False},
    "attn_implementation": lambda config: {"attn_implementation": "eager"},
    "low_cpu_mem_usage": lambda config: {"low_cpu_mem_usage": True},
    "use_safetensors": lambda config: {"use_safetensors": True},
}


@row(
    "opening.arguments",
    OPENING,
    "`from_pretrained` with transformers' arguments: `dtype`, `revision`, `cache_dir`, `token`, `local_files_only`, `trust_remote_code`, "
    "`attn_implementation`, `low_cpu_mem_usage`, `use_safetensors`",
    cases={each: Case(arguments={"which": each}) for each in TAKEN},
)
def open_arguments(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        families.build("llama", seed=2).save_pretrained(folder)
        return gradients(_open(model, folder, **TAKEN[which](model.config)))


@row("opening.subfolder", OPENING, "`from_pretrained(folder, subfolder='checkpoint')`")
def subfolder(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        families.build("llama", seed=2).save_pretrained(Path(folder) / "checkpoint")
        return gradients(_open(model, folder, subfolder="checkpoint"))


@row("opening.more", OPENING, "`from_pretrained` with `config`, `state_dict`, `variant`, `output_loading_info`, `key_mapping`", EITHER,
     cases={each: Case(arguments={"which": each}) for each in ("config", "variant", "output_loading_info", "key_mapping", "experts")})  # fmt: skip
def open_more(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        other = families.build("llama", seed=2)
        other.save_pretrained(folder, variant="fp16" if which == "variant" else None)
        config = other.config
        config.attention_dropout = 0.2
        arguments: dict[str, Any] = {
            "config": {"config": config}, "variant": {"variant": "fp16"}, "output_loading_info": {"output_loading_info": True},
            "key_mapping": {"key_mapping": {"^nothing": "else"}}, "experts": {"experts_implementation": "eager"},
        }[which]  # fmt: skip
        opened = _open(model, folder, **arguments)
        if which == "output_loading_info":
            opened, info = opened
            return [gradients(opened), sorted(map(str, info["missing_keys"]))]
        return gradients(opened)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "device_map": {"device_map": "auto"},
    "device_map-cpu": {"device_map": {"": "cpu"}},
    "load_in_4bit": {"load_in_4bit": True},
    "load_in_8bit": {"load_in_8bit": True},
    "quantization_config": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "max_memory": {"max_memory": {"cpu": "1GB"}},
    "offload_folder": {"offload_folder": "offload"},
    "tp_plan": {"tp_plan": "auto"},
    "unknown": {"nobody_knows_this": 1},
}


@row(
    "opening.elsewhere",
    OPENING,
    "`from_pretrained` with what streaming replaces or cannot do: `device_map`, `max_memory`, `offload_folder`, `load_in_4bit`, "
    "`load_in_8bit`, `quantization_config`, `tp_plan`, and arguments that nobody knows",
    REJECTED,
    cases={each: Case(arguments={"which": each}) for each in ELSEWHERE},
)
def open_elsewhere(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        families.build("llama", seed=2).save_pretrained(folder)
        return gradients(_open(model, folder, **ELSEWHERE[which]))


@row(
    "opening.mode",
    OPENING,
    "The mode after opening: `from_pretrained` gives a model in evaluation mode, `stream` one in the mode it was in",
)
def mode(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        families.build("llama", seed=2).save_pretrained(folder)
        return [model.training, _open(model, folder).training]


@row("opening.generation-config", OPENING, "Generation settings of the folder are those of the opened model")
def generation_config(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        other = families.build("llama", seed=2)
        other.generation_config.max_new_tokens = 3
        other.generation_config.do_sample = False
        other.save_pretrained(folder)
        opened = _open(model, folder).eval()
        return opened.generate(families.batch(rows=2, padding="none")["input_ids"])


@row("opening.frozen", OPENING, "Stream a model of which a part is frozen, or in bfloat16: `requires_grad` stays",
     cases={"": Case(lambda: _frozen())})  # fmt: skip
def frozen(model: Any) -> Any:
    return [[p.requires_grad for p in model.parameters()], gradients(model), copied_weights(model)]


def _frozen() -> Any:
    model = families.build("llama")
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model
