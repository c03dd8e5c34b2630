"""Arguments with which a script loads a model: kept, left out with a line, or rejected.

transformers itself loads the model, in host memory, and takes all arguments that do not say where it is placed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from horizon_lm.engine.opening.hf_arguments import FROM_PRETRAINED, Unsupported
from horizon_lm.errors import ConfigError

# Where weights are placed and how they are read; neither concerns a model whose weights stay in host memory.
_LEFT_OUT = (
    "device_map", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict", "low_cpu_mem_usage", "from_tf", "_fast_init",
    "use_kernels",
)  # fmt: skip
_KINDS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # of distributed training
_REJECTED = ("load_in_8bit", "tp_plan", "variant", "use_kernels")


def kept_arguments(given: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that are given to transformers.

    Args:
        given: the script's arguments.
        say: prints a line about an argument that is left out or changed.

    Raises:
        ConfigError: an argument is not supported.
    """
    for name in _REJECTED:
        rule = FROM_PRETRAINED[name]
        assert isinstance(rule, Unsupported)
        if name in given and not rule.accepts(given[name]):
            raise ConfigError(f"{name}={given[name]!r} is not supported by a streamed model: {rule.remedy}")
    if _is_8bit(given.get("quantization_config")):
        raise ConfigError(
            "quantization to 8 bits is not supported by a streamed model; use load_in_4bit=True, or leave it out"
        )
    kept = dict(given)
    for name in _LEFT_OUT:
        if (value := kept.pop(name, None)) not in (None, False):
            say(f"{name}={value!r} is left out: weights stay in host memory")
    for name in ("dtype", "torch_dtype"):
        if kept.get(name) in (torch.float16, "float16"):
            kept[name] = torch.bfloat16
            say(f"{name}=float16 is bfloat16: its range needs no scaling of the loss")
    return kept


def _is_8bit(config: Any) -> bool:
    """Return whether a quantization config, or a dict of one, asks for 8 bits of bitsandbytes."""
    values = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    return bool(values.get("load_in_8bit") or values.get("_load_in_8bit"))


def asks_for_codes(config: Any, kept: Mapping[str, Any]) -> bool:
    """Return whether a model is loaded with quantized weights, or decoded from such.

    Args:
        config: the model's config.
        kept: the arguments of ``from_pretrained``.
    """
    asked = kept.get("load_in_4bit") or kept.get("quantization_config") is not None
    return bool(asked or getattr(config, "quantization_config", None))


def reject_unsupported(accelerator: Any) -> None:
    """Raise ConfigError if an `Accelerator` is set up for what a streamed model does not support."""
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision='fp16' is not supported by a streamed model: use bf16, which needs no scaling of the loss"
        )
    kind = accelerator.distributed_type.value
    if kind in _KINDS:
        raise ConfigError(
            f"accelerate is set up for {kind}, which a streamed model does not need; start the script without it"
        )
