"""PEFT's layers in a model, and which of its parameters belong to adapters."""

from typing import Any

from torch import nn


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
