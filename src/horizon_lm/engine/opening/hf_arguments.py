"""Arguments of transformers' ``from_pretrained``: the ones that streaming has or that have no effect, and remedies for others."""

from dataclasses import fields
from typing import Any

import torch

from horizon_lm.engine.opening.options import StreamArguments
from horizon_lm.errors import ConfigError
from horizon_lm.near_misses import closest_setting

_DOWNLOAD = ("revision", "cache_dir", "token", "force_download", "local_files_only")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # arguments of transformers, with the values that have no effect here
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "weights_only": (True,),
    "ignore_mismatched_sizes": (False,),
    "output_loading_info": (False,),
    "device_map": (None,),
    "load_in_8bit": (None, False),
    "tp_plan": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "variant": (None,),
    "state_dict": (None,),
    "key_mapping": (None,),
    "experts_implementation": (None,),
}
_EIGHT_BITS = "weights are quantized to 4 bits; use load_in_4bit=True, or leave it out"
_REMEDIES = {
    "device_map": "the weights stay in host memory; leave it out, and choose the device with device='cuda'",
    "load_in_8bit": _EIGHT_BITS,
    "tp_plan": "tensor parallelism is not supported; leave it out",
    "max_memory": "use device_memory to limit the bytes on the device",
    "offload_folder": "all weights are in host memory already; leave it out",
    "use_safetensors": "only safetensors are read; convert the weights first",
    "ignore_mismatched_sizes": "weights must fit the model; fix its config, or load it with transformers and stream() it",
    "output_loading_info": "missing weights are an error; leave it out",
    "variant": "only files with the usual names are read; load it with transformers and stream() it",
    "state_dict": "load the folder's weights first, then use model.load_state_dict()",
    "key_mapping": "load it with transformers and stream() it",
    "experts_implementation": "experts are computed with the default of transformers; leave it out",
    "weights_only": "only safetensors are read, which contain nothing but weights; leave it out",
}


def download_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options for downloading a model, and return them."""
    return {name: options.pop(name) for name in _DOWNLOAD if name in options}


def read_precision(options: dict[str, Any]) -> str:
    """Remove ``precision`` and ``dtype`` (or ``torch_dtype``) from the options, and return the precision that matches both.

    Raises:
        ConfigError: no precision has this dtype, or it contradicts the given precision.
    """
    precision: str | None = options.pop("precision", None)
    # The older name of the same argument; if both are given, `dtype` counts.
    dtype = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", dtype)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if dtype in (None, "auto"):
        return precision or "fp32_master"
    # The precisions that have each dtype, first the one that is taken if none is given.
    fits = {torch.float32: ("float32", "fp32_master"), torch.bfloat16: ("fp32_master", "bf16")}.get(dtype)
    if fits is None:
        raise ConfigError(f"dtype={dtype} is not supported: use bfloat16 or float32, or choose a precision")
    if precision is not None and precision not in fits:
        raise ConfigError(f"dtype={dtype} does not go with precision={precision!r}; leave one of them out")
    return precision or fits[0]


def config_arguments(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Remove the options that set attributes of the model's config, as in transformers, and return them.

    Raises:
        ConfigError: an option is unknown, or not supported.
    """
    for name, allowed in _WITHOUT_EFFECT.items():
        value = options.pop(name, allowed[0])
        if not any(value is each for each in allowed):  # not by `==`, for which 1 is True
            raise ConfigError(
                f"from_pretrained: {name}={value!r} is not supported by a streamed model: {_REMEDIES[name]}"
            )
    ours = {field.name for field in fields(StreamArguments)}
    # An option of ours stays ours, even if a config has an attribute of that name.
    changes = {name: options.pop(name) for name in list(options) if name not in ours and hasattr(config, name)}
    for name in options.keys() - ours:
        close = closest_setting(name, [*ours, *_DOWNLOAD])
        raise ConfigError(
            f"from_pretrained does not know {name}{f'; did you mean {close}?' if close else ', nor does the config'}"
        )
    return changes
