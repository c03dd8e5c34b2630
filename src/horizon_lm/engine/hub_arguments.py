"""Arguments of transformers' ``from_pretrained``, as `horizon_lm.from_pretrained` takes them."""

import difflib
from dataclasses import fields
from typing import Any

import torch

from horizon_lm.engine.settings import Settings
from horizon_lm.errors import ConfigError

_DOWNLOAD = ("revision", "cache_dir", "token", "force_download", "local_files_only")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # and the values with which that is so
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "weights_only": (True,),
    "ignore_mismatched_sizes": (False,),
    "output_loading_info": (False,),
    "device_map": (None,),
    "load_in_4bit": (None, False),
    "load_in_8bit": (None, False),
    "quantization_config": (None,),
    "tp_plan": (None,),
    "device_mesh": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "variant": (None,),
    "state_dict": (None,),
    "key_mapping": (None,),
    "experts_implementation": (None,),
}
_QUANTIZED = "quantized weights are not streamed yet; leave it out, and take precision='bf16' for the least memory"
_DEVICES = "several devices are not supported yet; leave it out"
_REMEDIES = {
    "device_map": "the weights stay in host memory; leave it out, and choose the device with device='cuda'",
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "quantization_config": _QUANTIZED,
    "tp_plan": _DEVICES,
    "device_mesh": _DEVICES,
    "max_memory": "use device_memory for the bytes that buffers on the device may take",
    "offload_folder": "all weights are in host memory already; leave it out",
    "use_safetensors": "only safetensors are read; convert the weights first",
    "ignore_mismatched_sizes": "weights must fit the model; mend its config, or load it with transformers and stream() it",
    "output_loading_info": "weights that are missing are an error; leave it out",
    "variant": "only the usual names of files are read; load it with transformers and stream() it",
    "state_dict": "load the folder's weights first, then use model.load_state_dict()",
    "key_mapping": "load it with transformers and stream() it",
    "experts_implementation": "experts are computed as transformers does by default; leave it out",
    "weights_only": "only safetensors are read, which hold nothing but weights; leave it out",
}


def download_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take what is for downloading out of the options: where a model comes from."""
    return {name: options.pop(name) for name in _DOWNLOAD if name in options}


def read_precision(precision: str | None, options: dict[str, Any]) -> str:
    """Take ``dtype`` (or ``torch_dtype``) out of the options, and return the precision that goes with it.

    Raises:
        ConfigError: a dtype that no precision keeps, or another than that of the given precision.
    """
    dtype = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", dtype)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if dtype in (None, "auto"):
        return precision or "fp32_master"
    fits = {torch.float32: ("float32", "fp32_master"), torch.bfloat16: ("fp32_master", "bf16")}.get(dtype)
    if fits is None:
        raise ConfigError(f"dtype={dtype} is not supported: use bfloat16 or float32, or choose a precision")
    if precision is not None and precision not in fits:
        raise ConfigError(f"dtype={dtype} does not go with precision={precision!r}; leave one of them out")
    return precision or fits[0]


def config_arguments(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Take what changes the model's config out of the options, as transformers does; ConfigError for what is unknown."""
    for name, allowed in _WITHOUT_EFFECT.items():
        value = options.pop(name, allowed[0])
        if not any(value is each for each in allowed):
            raise ConfigError(
                f"from_pretrained: {name}={value!r} is not supported by a streamed model: {_REMEDIES[name]}"
            )
    ours = {field.name for field in fields(Settings)}
    changes = {name: options.pop(name) for name in list(options) if name not in ours and hasattr(config, name)}
    for name in options.keys() - ours:
        close = difflib.get_close_matches(name, [*ours, *_DOWNLOAD], n=1)
        raise ConfigError(
            f"from_pretrained does not know {name}{f'; did you mean {close[0]}?' if close else ', nor does the config'}"
        )
    return changes
