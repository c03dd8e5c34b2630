"""Merge adapters into single layers of a model without weights, by PEFT's own arithmetic.

The model has placeholders of the right shapes and dtypes, to which PEFT adds its layers. One layer at a time gets weights of the
base, and is merged.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.errors import ConfigError, ModelNotSupportedError, first_line
from horizon_lm.model.adapters import (
    open_adapter_config,
    read_values,
    require_all_read,
    require_weights,
    without_peft_warnings,
)
from horizon_lm.model.files.tensors import Tensors

_FROM_THE_BASE = ("olora", "pissa")  # initialisations that take a part of the base, and can be repeated
_LOST = ("corda", "loftq", "lora_ga", "pissa_niter")  # these need data, random numbers or a GPU for that
_NOT_IN_WEIGHTS = ("ADAPTION_PROMPT", "CARTRIDGE", "LILY", "POLY", "SHADOW", "XLORA")
# Kinds whose layers are built without a look at values of the base. Others get a base that is mapped from its files.
_KNOW_NO_VALUES = (
    "LORA", "ADALORA", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA",
    "LOKR", "MISS", "OFT", "PEANUT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VERA", "WAVEFT",
)  # fmt: skip

Place = tuple[nn.Module, str]


@dataclass(slots=True)
class _Layer:
    """An outermost layer of PEFT. ``names``: the base's names of the tensors that it wraps, by their path in the wrapped module."""

    wrapper: Any
    names: dict[str, str]


class MergedLayers:
    """The layers that adapters change, of a model without weights.

    Args:
        model: the base without weights; PEFT's layers are added to it.
        folder: folder of the adapters.
        base: the tensors of the base, by every name that they have in the model.

    Raises:
        ConfigError: the adapters cannot be read, do not belong to this base, have values that are not finite, or are of a kind
            that cannot be merged.
    """

    def __init__(self, model: Any, folder: Path, base: Tensors) -> None:
        self._folder = folder
        with self._errors("read the config of these adapters"):
            config = open_adapter_config(folder, model)
        import peft

        _require_mergeable(config, folder)
        _fill_places(model, base, with_values=config.peft_type not in _KNOW_NO_VALUES)
        self._places = {name: _place_of(model, name) for name in model.state_dict()}
        initialization = str(getattr(config, "init_lora_weights", "")).lower()
        self._initialization_from_base = initialization if initialization in _FROM_THE_BASE else None
        if self._initialization_from_base:
            config.init_lora_weights = True
        state = read_values(folder)
        self._require_vocabulary(model, state)
        with (
            self._errors("add these adapters to the model"),
            torch.random.fork_rng(devices=[]),
            without_peft_warnings(),
        ):
            adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=config.peft_type == "LORA")
        read_places = self._load_values(adapted, state)
        replaced = {name: place for name, place in self._places.items() if place in read_places}
        # Tensors that come whole with the adapters, by the names of those of the base that they replace.
        self._replacements = {name: getattr(module, key).detach() for name, (module, key) in replaced.items()}
        self._layers = list(self._find_layers(adapted))

    @property
    def groups(self) -> list[list[str]]:
        """The names of the tensors of the base that are merged together: first those of each layer, then each of the other tensors
        that come whole with the adapters.
        """
        inside = [list(layer.names.values()) for layer in self._layers]
        known = {name for names in inside for name in names}
        return inside + [[name] for name in self._replacements if name not in known]

    def merge(self, group: int, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the merged tensors of a group.

        Args:
            group: index in `groups`.
            base: tensors of the base, by their names in the model; they may be overwritten.

        Raises:
            ConfigError: PEFT cannot merge the layer.
        """
        replaced = {name: self._replacements[name] for name in base if name in self._replacements}
        values = {**base, **{name: each.to(base[name].dtype, copy=True) for name, each in replaced.items()}}
        if group >= len(self._layers):  # a tensor that comes whole with the adapters
            return values
        layer = self._layers[group]
        # PEFT merges the weights that are in the model. The tensors are put there, and replaced by placeholders once they are merged.
        for name, value in values.items():
            self._set_tensor(name, value.contiguous())
        merged = self._merge_module(layer.wrapper)
        if added := [n for n, _ in merged.named_parameters() if n not in layer.names]:
            raise ModelNotSupportedError(
                f"{self._folder}: merging {next(iter(layer.names.values()))} gives it the parameter {added[0]}, which the base does not "
                "have; use the adapters with their base"
            )
        found = {}
        for path, name in layer.names.items():
            module, attribute = _place_of(merged, path)
            found[name] = getattr(module, attribute).data.to(values[name].dtype)
            self._set_tensor(name, _placeholder(values[name].shape, values[name].dtype))
        return found

    def _merge_module(self, wrapper: Any) -> nn.Module:
        """Merge the adapters of a layer of PEFT into the weights that are in it, and return the module that has the result."""
        with self._errors("merge these adapters"), torch.no_grad():
            if self._initialization_from_base:
                self._subtract_initialization(wrapper)
            merged: nn.Module
            if hasattr(wrapper, "unload_and_optionally_merge_module"):
                merged = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                wrapper.merge()
                merged = wrapper.get_base_layer()
        for each in wrapper.modules():
            getattr(each, "merged_adapters", []).clear()  # or PEFT would not merge this layer again
        return merged

    def _set_tensor(self, name: str, value: torch.Tensor) -> None:
        """Put a value into its place in the model, a buffer or a parameter."""
        module, attribute = self._places[name]
        if attribute in module._buffers:
            module._buffers[attribute] = value
        else:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)

    def _subtract_initialization(self, wrapper: nn.Module) -> None:
        """Subtract from the base's weight in a layer of PEFT the part that the initialisation of its adapters moved into them."""
        layer: Any
        for layer in wrapper.modules():
            for adapter, matrix in dict(getattr(layer, "lora_A", None) or {}).items():
                factors = (matrix.weight, layer.lora_B[adapter].weight)
                trained = [param.data for param in factors]
                # Computes the first adapters again, and subtracts them from the base. The trained adapters are put back.
                if self._initialization_from_base == "olora":
                    layer.olora_init(adapter)
                else:
                    layer.pissa_init(adapter, self._initialization_from_base)
                for param, value in zip(factors, trained, strict=True):
                    param.data = value

    def _find_layers(self, model: nn.Module) -> Iterator[_Layer]:
        """Yield the outermost layers of PEFT in a model, each with the names of the base's tensors inside it."""
        names_of: dict[int, dict[str, str]] = {}  # by the identity of a module: full names of its tensors, by attribute
        for name, (module, attribute) in self._places.items():
            names_of.setdefault(id(module), {})[attribute] = name
        prefixes: tuple[str, ...] = ()  # of the modules inside the outermost layers
        for name, module in model.named_modules():
            wrapped: Any = getattr(module, "original_module", None) or getattr(module, "base_layer", None)
            if wrapped is None or name.startswith(prefixes):
                continue
            prefixes += (f"{name}.",)
            while hasattr(wrapped, "base_layer"):
                wrapped = wrapped.base_layer
            names = {
                f"{path}.{attribute}".removeprefix("."): full
                for path, part in wrapped.named_modules()
                for attribute, full in names_of.get(id(part), {}).items()
            }
            yield _Layer(module, names)

    def _load_values(self, model: Any, state: dict[str, torch.Tensor]) -> set[Place]:
        """Load the adapters' values into a PEFT model, and return their places; raise ConfigError if a value is missing or has no place."""
        import peft

        places: set[Place] = set()

        def load(values: Mapping[str, torch.Tensor], strict: bool) -> Any:
            places.update(self._make_room(model, values))
            return type(model).load_state_dict(model, values, strict=strict)

        # Only PEFT knows the names that the values have in the model, and hands them to this method.
        model.load_state_dict = load
        with self._errors("read these adapters"):
            result: Any = peft.set_peft_model_state_dict(model, state)
        del model.load_state_dict
        require_all_read(model, result, self._folder)
        return places

    def _make_room(self, model: Any, values: Mapping[str, torch.Tensor]) -> set[Place]:
        """Replace placeholders by parameters with memory where values are about to be read, and return the places of all values.

        Args:
            model: the PEFT model.
            values: the values, by their names in the model.
        """
        params = dict(model.named_parameters(remove_duplicate=False))
        rooms: dict[int, nn.Parameter] = {}  # by the parameter that is in the model now
        for name in sorted(values.keys() & params.keys()):
            param, shape = params[name], values[name].shape
            if shape != param.shape:
                raise ConfigError(
                    f"{require_weights(self._folder)}: {name} has shape {tuple(shape)}, and the base needs {tuple(param.shape)}; it "
                    "does not belong to this base"
                )
            rooms[id(param)] = param
            if param.is_meta or 0 in param.stride():
                rooms[id(param)] = nn.Parameter(torch.empty(shape, dtype=param.dtype), param.requires_grad)
        places: set[Place] = set()
        for module in model.modules():
            for key, param in module._parameters.items():
                if id(param) in rooms:
                    module._parameters[key] = rooms[id(param)]
                    places.add((module, key))
        for name in values.keys() - params.keys():  # buffers
            with contextlib.suppress(AttributeError):  # an unexpected name, which PEFT reports
                places.add(_place_of(model, name))
        return places

    def _require_vocabulary(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError if the adapters were trained with another number of tokens than the base has."""
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        module: Any
        for path, module in model.named_modules():
            if not any(module is each for each in tables):
                continue
            height, width = module.weight.shape
            for name, tensor in state.items():
                is_table = f".{path}." in f".{name}" and name.endswith(".weight") and "lora_" not in name
                if is_table and tensor.ndim == 2 and tensor.shape[1] == width and tensor.shape[0] != height:
                    raise ConfigError(
                        f"{self._folder}: its {path} has {tensor.shape[0]:,} rows, and that of the base {height:,}; resize the "
                        "vocabulary of the base (resize_token_embeddings, save_pretrained), and give that folder with --base"
                    )

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Context manager: raise ConfigError for what PEFT rejects."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # PEFT raises anything
            raise ConfigError(f"{self._folder}: PEFT cannot {action} ({first_line(error)})") from error


def _place_of(model: nn.Module, name: str) -> Place:
    """Return the module and the attribute that a name in a model's state stands for; raise AttributeError if there is no such module."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _fill_places(model: nn.Module, base: Tensors, with_values: bool) -> None:
    """Replace the parameters of a model on the meta device by the base's values, or by placeholders."""
    filled: dict[int, nn.Parameter] = {}  # by the parameter on the meta device
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in filled:  # a tied one stays tied
                name = f"{path}.{key}".removeprefix(".")
                new = _placeholder(param.shape, base.meta(name).dtype)
                filled[id(param)] = nn.Parameter(base.read([name])[name], requires_grad=False) if with_values else new
            module._parameters[key] = filled[id(param)]


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that has a shape but the memory of one element."""
    return nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)


def _require_mergeable(config: Any, folder: Path) -> None:
    """Raise ModelNotSupportedError for adapters that are no change of weights, or that need data which their folder lacks."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    initialization = str(getattr(config, "init_lora_weights", "")).lower()
    if config.is_prompt_learning or kind in _NOT_IN_WEIGHTS:
        raise ModelNotSupportedError(
            f"{folder}: PEFT's {kind} cannot be merged, because what it adds is not a change of weights; use the adapters with their base"
        )
    if initialization.startswith(_LOST):
        raise ModelNotSupportedError(
            f"{folder}: init_lora_weights: {initialization} took from the base what this folder does not have; save the adapters with "
            "path_initial_model_for_weight_conversion, which makes ordinary LoRA of them"
        )
    if getattr(config, "layer_replication", None):
        raise ModelNotSupportedError(
            f"{folder}: layer_replication lets several layers use the same weights, which cannot be merged; use the adapters with their base"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise ModelNotSupportedError(
            f"{folder}: activated LoRA (alora_invocation_tokens) changes some tokens of a row only, which weights cannot do; use the "
            "adapters with their base"
        )
