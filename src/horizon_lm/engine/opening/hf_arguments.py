"""Arguments of transformers' ``from_pretrained`` and ``save_pretrained``: honoured, ignored, or rejected with a remedy.

`tests/seams/test_signatures.py` compares the table with the signatures and docstrings of the installed version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from horizon_lm.common.near_misses import closest_setting
from horizon_lm.engine.opening.options import StreamArguments
from horizon_lm.errors import ConfigError, IgnoredArgumentWarning, warn

HONOURED = "honoured"
IGNORED = "ignored, because it changes nothing"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An argument that is rejected: by ``from_pretrained`` with an error, by ``save_pretrained``, which must not lose a training, with
    a warning.

    Attributes:
        remedy: the end of the message.
        neutral: values that change nothing, and are accepted; compared by type, too.
    """

    remedy: str
    neutral: tuple[Any, ...] = (None,)

    def accepts(self, value: Any) -> bool:
        """Return whether a value changes nothing."""
        return any(type(value) is type(each) and value == each for each in self.neutral)


Rule = str | Unsupported
_SINCE_SAFETENSORS = "only safetensors are read; convert the weights first"
_OTHERWISE_LOADED = "load it with transformers and stream() it"
_PARALLEL = "several processes share a streamed model by device_mesh (docs/distributed.md); leave it out"
_KERNELS = "blocks compute with the modules of transformers; leave it out"
DOWNLOAD = ("revision", "cache_dir", "token", "force_download", "local_files_only")
HUB = ("repo_id", "token", "private", "commit_message", "commit_description", "create_pr", "revision", "tags")

FROM_PRETRAINED: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "pretrained_model_name_or_path",
            "config",
            "dtype",
            "torch_dtype",
            "gguf_file",
            "subfolder",
            "trust_remote_code",
            "quantization_config",
            "load_in_4bit",
            "attn_implementation",
            "device_mesh",
            "device_map",
            "max_memory",
            "generation_config",
            "use_auth_token",
            *DOWNLOAD,
        ),
        HONOURED,
    ),
    # How plain weights are read, shown while they are read, or placed, and what transformers itself ignores.
    **dict.fromkeys(
        (
            "low_cpu_mem_usage",
            "offload_folder",
            "offload_buffers",
            "offload_state_dict",
            "weights_only",
            "disable_mmap",
            "tqdm_class",
            "_fast_init",
            "mirror",
            "resume_download",
            "_commit_hash",
            "_from_auto",
            "_from_pipeline",
        ),
        IGNORED,
    ),
    "adapter_kwargs": Unsupported(
        "open the folder of adapters itself, or add them with PeftModel.from_pretrained", (None, {})
    ),
    "adapter_name": Unsupported(
        "open the base, and add the adapters with PeftModel.from_pretrained", (None, "default")
    ),
    "allow_all_kernels": Unsupported(_KERNELS, (None, False)),
    "code_revision": Unsupported("the code of a model is that of its revision; leave it out", (None, "main")),
    "distributed_config": Unsupported(_PARALLEL),
    "experts_implementation": Unsupported("experts are computed with the default of transformers; leave it out"),
    "from_flax": Unsupported(_SINCE_SAFETENSORS, (None, False)),
    "from_tf": Unsupported(_SINCE_SAFETENSORS, (None, False)),
    "fusion_config": Unsupported(_KERNELS, (None, {})),
    "ignore_mismatched_sizes": Unsupported(
        f"weights must fit the model; fix its config, or {_OTHERWISE_LOADED}", (None, False)
    ),
    "kernel_config": Unsupported(_KERNELS),
    "key_mapping": Unsupported(_OTHERWISE_LOADED, (None, {})),
    "load_in_8bit": Unsupported(
        "weights are quantized to 4 bits; use load_in_4bit=True, or leave it out", (None, False)
    ),
    "output_loading_info": Unsupported("missing weights are an error; leave it out", (None, False)),
    "proxies": Unsupported("set HTTPS_PROXY in the environment, or download the model first", (None, {})),
    "state_dict": Unsupported("load the folder's weights first, then use model.load_state_dict()"),
    "tp_plan": Unsupported(_PARALLEL),
    "tp_size": Unsupported(_PARALLEL),
    "use_kernels": Unsupported(_KERNELS, (None, False)),
    "use_safetensors": Unsupported(_SINCE_SAFETENSORS, (None, True)),
    "variant": Unsupported(f"only files with the usual names are read; {_OTHERWISE_LOADED}", (None, "")),
}
_PLAIN_FOLDER = "an ordinary folder in safetensors was written"
SAVE_PRETRAINED: dict[str, Rule] = {
    **dict.fromkeys(
        ("save_directory", "is_main_process", "state_dict", "push_to_hub", "max_shard_size", "variant", "dtype", *HUB),
        HONOURED,
    ),
    "save_function": IGNORED,
    "save_peft_format": IGNORED,  # of a model without adapters
    "safe_serialization": Unsupported(_PLAIN_FOLDER, (None, True)),
    "save_original_format": Unsupported("tensors were written under the names that transformers reads", (None, True)),
    "distributed_checkpoint": Unsupported(_PLAIN_FOLDER, (None, False)),
}


def download_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options for downloading a model, and return them."""
    token = options.pop("use_auth_token", None)  # the older name of ``token``
    if token is not None:
        options.setdefault("token", token)
    return {name: options.pop(name) for name in DOWNLOAD if name in options}


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
    matching = {torch.float32: ("float32", "fp32_master"), torch.bfloat16: ("fp32_master", "bf16")}.get(dtype)
    if matching is None:
        raise ConfigError(f"dtype={dtype} is not supported: use bfloat16 or float32, or choose a precision")
    if precision is not None and precision not in matching:
        raise ConfigError(f"dtype={dtype} does not go with precision={precision!r}; leave one of them out")
    return precision or matching[0]


def config_arguments(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Remove the options that set attributes of the model's config, as in transformers, and return them. Also remove ignored ones.

    Raises:
        ConfigError: an option is unknown, or not supported.
    """
    for name, rule in FROM_PRETRAINED.items():
        if name not in options or rule == HONOURED:
            continue
        value = options.pop(name)
        if isinstance(rule, Unsupported) and not rule.accepts(value):
            raise ConfigError(f"from_pretrained: {name}={value!r} is not supported by a streamed model: {rule.remedy}")
    own_names = {field.name for field in fields(StreamArguments)}
    # An option of ours stays ours, even if a config has an attribute of that name.
    changes = {name: options.pop(name) for name in list(options) if name not in own_names and hasattr(config, name)}
    for name in options.keys() - own_names:
        close = closest_setting(name, [*own_names, *DOWNLOAD])
        raise ConfigError(
            f"from_pretrained does not know {name}{f'; did you mean {close}?' if close else ', nor does the config'}"
        )
    return changes


def hub_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``save_pretrained`` that concern the hub. Warn of arguments that have no effect, though they should."""
    for name, value in given.items():
        rule = SAVE_PRETRAINED.get(name, Unsupported("transformers does not know it", ()))
        if isinstance(rule, Unsupported) and not rule.accepts(value):
            warn(
                f"save_pretrained: {name}={value!r} has no effect on a streamed model: {rule.remedy}",
                IgnoredArgumentWarning,
            )
    return {name: value for name, value in given.items() if name in HUB and value is not None}
