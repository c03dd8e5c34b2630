"""PEFT's layers in a model, the parameters of its adapters, and the methods that a streamed model would not compute as plain PEFT does."""

from typing import Any

import torch
from torch import nn

from horizon_lm.errors import ModelNotSupportedError


def adapted_model(model: Any) -> Any:
    """Return the model inside a PEFT model; the PEFT model if it has parameters of its own, as for prompts; other models as they are."""
    if not hasattr(model, "get_base_model"):
        return model
    inside = model.get_base_model()
    own = {id(param) for param in inside.parameters()}
    return inside if all(id(param) in own for param in model.parameters()) else model


def is_adapter_model(model: Any) -> bool:
    """Return whether a model is a PEFT model, or has adapters that transformers saves in PEFT's format."""
    return type(model).__module__.partition(".")[0] == "peft" or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_params(model: Any) -> set[int]:
    """Return the identities of the parameters of PEFT's adapters, active or not.

    A layer with adapters has the names of its attributes that belong to them in ``adapter_layer_names``, and of others, few
    of which are parameters, in ``other_param_names``.
    """
    attributes = (
        getattr(layer, name, None)
        for layer in model.modules()
        if is_adapter_layer(layer)
        for name in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ()))
    )
    modules = (each for each in attributes if isinstance(each, nn.Module))
    return {id(param) for module in modules for param in module.parameters()}


def replaced_params(model: Any) -> set[int]:
    """Return the identities of the base's parameters of which PEFT trains copies, with `modules_to_save` and in norms. The
    copies take the place of these parameters when PEFT unloads the adapters.
    """
    pairs = (("modules_to_save", "original_module"), ("ln_tuning_layers", "base_layer"))
    replaced = []
    for module in model.modules():
        children = dict(module.named_children())
        replaced += [children[original] for copies, original in pairs if {copies, original} <= children.keys()]
    return {id(param) for module in replaced for param in module.parameters()}


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is one of PEFT's layers with adapters, by its class, because its attributes may not exist yet."""
    return bool(getattr(type(module), "adapter_layer_names", ()))


_IN_CACHE = "its prefixes are keys and values of a cache, which blocks would keep without their gradients"
_REASONS = {
    "PREFIX_TUNING": _IN_CACHE,
    "CARTRIDGE": _IN_CACHE,
    "ADAPTION_PROMPT": "it calls attention layers on its own, outside of their blocks",
    "CPT": "its loss needs the gradients of a hook on a parameter",
    "MULTITASK_PROMPT_TUNING": "it was not compared with plain PEFT",
    "OSF": "it changes gradients by a hook on a parameter",
    "POLY": "it was not compared with plain PEFT",
    "SHADOW": "it was not compared with plain PEFT",
    "XLORA": "it runs the model twice for each batch",
}
# Methods, and options of LoRA, of which PEFT's layers for the 4 bits of bitsandbytes decode weights themselves, or which these ignore.
_NOT_ON_4_BITS = ("HIRA", "SHIRA", "use_bdlora", "monteclora_config", "kasa_config", "init_lora_weights='mica'")


def require_adapters_that_stream(model: Any) -> None:
    """Raise ModelNotSupportedError if a model has PEFT's adapters of a kind that is not streamed.

    Args:
        model: a PEFT model, the model inside it, or any other model.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        require_kind_that_streams(config, model)


def require_kind_that_streams(config: Any, model: Any) -> None:
    """Raise ModelNotSupportedError if adapters with this config of PEFT are not streamed in a model."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    used = {kind, f"init_lora_weights={getattr(config, 'init_lora_weights', None)!r}"}  # as in `_NOT_ON_4_BITS`
    used |= {name for name in _NOT_ON_4_BITS if getattr(config, name, None)}
    if getattr(model, "is_loaded_in_4bit", False) and (unfit := used.intersection(_NOT_ON_4_BITS)):
        raise ModelNotSupportedError(
            f"PEFT's {min(unfit)} is not supported on weights in the 4 bits of bitsandbytes; use LoRA without it, or leave load_in_4bit out"
        )
    if kind in _REASONS:
        raise ModelNotSupportedError(f"PEFT's {kind} is not streamed: {_REASONS[kind]}; use LoRA, or prompt tuning")
    if getattr(config, "layer_replication", None):
        raise ModelNotSupportedError(
            "PEFT's layer_replication is not streamed: its layers share their weights; leave it out"
        )


def is_differentiable_cache(cache: Any) -> bool:
    """Return whether keys or values in a cache need gradients, as those of prefix tuning do."""
    tensors = [value for layer in getattr(cache, "layers", ()) for value in vars(layer).values()]
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


def num_prompt_tokens(model: Any) -> int:
    """Return the number of virtual tokens that a PEFT model puts before the tokens of each row; 0 for other models."""
    config: Any = getattr(model, "active_peft_config", None)
    return int(config.num_virtual_tokens) if getattr(config, "is_prompt_learning", False) else 0
