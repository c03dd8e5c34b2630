"""Opening a model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import horizon_lm
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import copied_weights, gradients, is_streamed
from tests.support import tiny_models

SECTION = "Opening"


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
    "device_map": lambda config: {"device_map": "auto"},
    "device_map-host": lambda config: {"device_map": {"": "cpu"}},
    "without-effect": lambda config: {
        "from_tf": False,
        "from_flax": False,
        "_fast_init": True,
        "offload_state_dict": True,
        "offload_buffers": False,
        "offload_folder": "offload",
        "use_kernels": False,
        "proxies": None,
        "adapter_kwargs": {},
    },
}


@row(
    "opening.arguments",
    SECTION,
    "`from_pretrained` with transformers' arguments: `dtype`, `revision`, `cache_dir`, `token`, `local_files_only`, `trust_remote_code`, "
    "`attn_implementation`, `low_cpu_mem_usage`, `use_safetensors`, a `device_map` to anywhere or to host memory, and others that change nothing",
    cases={each: Case(arguments={"which": each}) for each in TAKEN},
)
def open_arguments(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build("llama", seed=2).save_pretrained(folder)
        return gradients(_open(model, folder, **TAKEN[which](model.config)))


@row("opening.subfolder", SECTION, "`from_pretrained(folder, subfolder='checkpoint')`")
def subfolder(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build("llama", seed=2).save_pretrained(Path(folder) / "checkpoint")
        return gradients(_open(model, folder, subfolder="checkpoint"))


@row("opening.more", SECTION, "`from_pretrained` with `config`, `state_dict`, `variant`, `output_loading_info`, `key_mapping`", EITHER,
     cases={each: Case(arguments={"which": each}) for each in ("config", "variant", "output_loading_info", "key_mapping", "experts")})  # fmt: skip
def open_more(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        other = tiny_models.build("llama", seed=2)
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
    "device_map": {"device_map": {"model": 0, "lm_head": "cpu"}},
    "load_in_8bit": {"load_in_8bit": True},
    "quantization_config": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "tp_plan": {"tp_plan": "auto"},
    "unknown": {"unknown_argument": 1},
}


@row(
    "opening.elsewhere",
    SECTION,
    "`from_pretrained` with arguments that streaming replaces or does not support: a `device_map` of several devices, `load_in_8bit`, "
    "`quantization_config` of anything but 4 bits or `dequantize=True`, `tp_plan`, and unknown arguments",
    REJECTED,
    cases={each: Case(arguments={"which": each}) for each in ELSEWHERE},
)
def open_elsewhere(model: Any, which: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build("llama", seed=2).save_pretrained(folder)
        return gradients(_open(model, folder, **ELSEWHERE[which]))


@row(
    "opening.mode",
    SECTION,
    "The mode after loading: `from_pretrained` returns a model in eval mode, `stream` keeps its mode",
)
def mode(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build("llama", seed=2).save_pretrained(folder)
        return [model.training, _open(model, folder).training]


@row("opening.generation-config", SECTION, "Generation settings of the folder are loaded with the model")
def generation_config(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        other = tiny_models.build("llama", seed=2)
        other.generation_config.max_new_tokens = 3
        other.generation_config.do_sample = False
        other.save_pretrained(folder)
        opened = _open(model, folder).eval()
        return opened.generate(tiny_models.batch(rows=2, padding="none")["input_ids"])


@row("opening.frozen", SECTION, "Stream a model that is partly frozen, or in bfloat16: `requires_grad` is kept",
     cases={"": Case(lambda: _frozen())})  # fmt: skip
def frozen(model: Any) -> Any:
    return [[p.requires_grad for p in model.parameters()], gradients(model), copied_weights(model)]


def _frozen() -> Any:
    model = tiny_models.build("llama")
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model
