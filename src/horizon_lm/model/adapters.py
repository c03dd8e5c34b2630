"""The adapters of a run: PEFT's own, on a model with or without weights."""

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from horizon_lm.common.near_misses import closest_setting
from horizon_lm.common.paths import lasting_name
from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.model import hf_config, hub
from horizon_lm.model.adapter_config import (
    ADAPTER_CONFIG,
    NO_PEFT,
    read_adapter_config,
    require_adapter_config,
    require_quick_names,
    require_weights,
)
from horizon_lm.model.adapter_kinds import adapted_model, require_kind_that_streams
from horizon_lm.model.components import Component, frozen_components
from horizon_lm.model.finite import require_finite
from horizon_lm.model.generation import read_generation_config
from horizon_lm.model.source import ModelSource
from horizon_lm.model.target_layers import TargetLayers, layers_remedy

PREFIX = "base_model.model."  # before the names of the base in those of PEFT's tensors
_COPY, _RANK = ".modules_to_save.", ".ranknum."  # in names of PEFT's tensors
_OF_OTHER_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # tasks whose adapters come with a head


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters to train on a frozen model, with PEFT's names.

    Attributes:
        r, lora_alpha, lora_dropout, target_modules, target_parameters, modules_to_save, use_rslora, use_dora: as in
            ``peft.LoraConfig``.
        folder: folder or hub id of adapters to go on with, whose own settings are used; None for new adapters.
        frozen: components of the model that get no new adapters.
    """

    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.05
    target_modules: str | tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    folder: str | None = None
    frozen: frozenset[Component] = frozenset()

    @classmethod
    def of(cls, run: Any) -> "Adapters | None":
        """Return the adapters of a run's settings; None if the run trains none."""
        if not run.use_peft:
            return None
        if run.adapter_name_or_path is not None:
            return cls(folder=run.adapter_name_or_path)
        modules = run.lora_target_modules
        if isinstance(modules, str) and modules.isidentifier():
            modules = [modules]  # a name, which PEFT would take for a regular expression of whole names
        return cls(
            r=run.lora_r, lora_alpha=run.lora_alpha, lora_dropout=run.lora_dropout,
            target_modules=modules if isinstance(modules, str) else _tuple(modules),
            target_parameters=_tuple(run.lora_target_parameters), modules_to_save=_tuple(run.lora_modules_to_save),
            use_rslora=run.use_rslora, use_dora=run.use_dora, frozen=frozen_components(run),
        )  # fmt: skip

    @property
    def setting_that_copies(self) -> str:
        """The name of the setting by which new adapters begin with copies of weights of the base; empty if it is not set."""
        if self.folder is None and self.use_dora:
            return "use_dora"
        return "lora_modules_to_save" if self.folder is None and self.modules_to_save else ""

    def add_to(self, model: Any, *, draw: bool, name: str = "default") -> Any:
        """Add the adapters to a model, which is frozen and whose layers are replaced in place, and return the PEFT model. Adapters in a
        folder bring their generation config, which replaces that of the model.

        Args:
            model: a plain model, or a PEFT model that gets more adapters.
            draw: give the adapters their values, drawn or read from the folder; without it, they are on the meta device.
            name: PEFT's name of the adapters.

        Raises:
            ConfigError: PEFT is not installed, or rejects the adapters for this model.
        """
        peft = _peft()
        with _rejections(self.folder, lambda: layers_remedy(adapted_model(model), self.target_modules)):
            folder = None if self.folder is None else hub.local_folder(self.folder)
            config = self._new_config(peft, model) if folder is None else open_adapter_config(folder, model)
            require_kind_that_streams(config, model)  # before PEFT opens further adapters, or repeats layers
            if folder is not None and (generation_config := read_generation_config(folder)) is not None:
                adapted_model(model).generation_config = generation_config  # with the tokens that end the trained turns
            if folder is not None and draw:
                values = read_values(folder)  # rejects values that are not finite, and pickles, which PEFT would accept
                adapted = peft.PeftModel.from_pretrained(model, folder, name, is_trainable=True, config=config)
                if not config.is_prompt_learning:  # PEFT reads the values of prompts without the model
                    # Read again, because only this call returns the missing and unexpected names. PEFT ignores them, so that adapters of
                    # another base would be read in part.
                    require_all_read(adapted, peft.set_peft_model_state_dict(adapted, values, name), folder)
                return adapted
            if isinstance(model, peft.PeftModel):
                model.add_adapter(name, config, low_cpu_mem_usage=not draw)
                return model
            return peft.get_peft_model(model, config, name, low_cpu_mem_usage=not draw)

    def _new_config(self, peft: Any, model: Any) -> Any:
        """Return PEFT's config of new LoRA adapters for a model, with lists and numbers of the types that PEFT saves."""
        layers, modules = TargetLayers(adapted_model(model), self.frozen), self.target_modules
        if modules is None and self.target_parameters is None:
            modules = layers.usual(peft)
        if isinstance(modules, str):
            require_quick_names({"target_modules": modules}, _module_names(model), "lora_target_modules")
        layers.require(self.target_modules)
        _require_names("lora_modules_to_save", self.modules_to_save, _module_names(model))
        parameters = [f".{name}" for name, _ in adapted_model(model).named_parameters()]
        _require_names("lora_target_parameters", self.target_parameters, parameters, separator=".")
        return peft.LoraConfig(
            task_type="CAUSAL_LM", r=self.r, lora_dropout=self.lora_dropout, use_rslora=self.use_rslora, use_dora=self.use_dora,
            lora_alpha=int(self.lora_alpha) if self.lora_alpha == int(self.lora_alpha) else self.lora_alpha,
            target_modules=list(modules) if isinstance(modules, tuple) else modules, exclude_modules=layers.left_out,
            target_parameters=None if self.target_parameters is None else layers.parameters(self.target_parameters),
            modules_to_save=None if self.modules_to_save is None else list(self.modules_to_save),
        )  # fmt: skip


class PresentAdapters:
    """The adapters that a streamed model has, to be added to a skeleton of it.

    Args:
        model: a model with PEFT's adapters, or the PEFT model around it.
        trained: full names, in the model without PEFT's own part, of the parameters that are trained.
    """

    def __init__(self, model: Any, trained: Collection[str]) -> None:
        self._trained = frozenset(trained)
        self._configs = {name: copy.deepcopy(config) for name, config in model.peft_config.items()}
        for config in self._configs.values():
            if isinstance(getattr(config, "init_lora_weights", None), str):
                config.init_lora_weights = True  # an initialisation with a name needs values of the base

    def add_to(self, model: Any, *, draw: bool) -> Any:
        """Add the adapters to a skeleton, and return the PEFT model. See `Adapters.add_to`."""
        peft = _peft()
        with _rejections():
            for name, config in self._configs.items():
                if isinstance(model, peft.PeftModel):
                    model.add_adapter(name, config, low_cpu_mem_usage=not draw)
                else:
                    model = peft.get_peft_model(model, config, name, low_cpu_mem_usage=not draw)
            for name, param in adapted_model(model).named_parameters():
                param.requires_grad_(name in self._trained)
        return model


def base_of_adapters(folder: Path) -> str | None:
    """Return the name of the model that the adapters in a folder belong to; None if the folder has no adapters.

    Raises:
        ConfigError: the adapters' config cannot be read, or names no model.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{path} names no base_model_name_or_path; write the folder or hub id of the base model into it"
        )
    return name


def open_base(adapter: Path, name: str) -> Path:
    """Return the folder of the base ``name`` of the adapters in ``adapter``. Raise ConfigError if it is not found."""
    try:
        return hub.local_folder(name)
    except ConfigError as error:
        raise ConfigError(
            f"{adapter} has adapters of {name}, which is not found ({error}); name the base with --base, or write its folder or hub "
            f"id into {ADAPTER_CONFIG}"
        ) from error


def class_of_adapters(adapters: Adapters | None, config: Any) -> Any:
    """Return the class of transformers in which adapters of a folder were trained; None for that of their base (`hf_config.auto_class`).

    A type with and without a tower, such as Qwen 3.5, has other names for the layers of text in each class. It is the class that has
    modules for more of the names of their values.
    """
    if adapters is None or adapters.folder is None or len(classes := hf_config.auto_classes(config)) < 2:
        return None
    folder = hub.local_folder(adapters.folder)
    names = [name.removeprefix(PREFIX).split(".") for name in read_values(folder)]

    def num_found(model_class: Any) -> int:
        """Return the number of modules on the paths of all values."""
        model = ModelSource(config, config.name_or_path, model_class=model_class).skeleton()
        modules = {name for name, _ in model.named_modules()}
        return sum(each in modules for name in names for each in accumulate(name, "{}.{}".format))

    return max(classes, key=num_found)


def read_values(folder: Path) -> dict[str, Any]:
    """Return the values of the adapters in a folder.

    Raises:
        ConfigError: there are none in safetensors, the file cannot be read, or has values that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = require_weights(folder)
    try:
        state: dict[str, Any] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); download it again") from error
    for name, value in state.items():
        if value.is_floating_point():
            require_finite(name, value, path)
    return state


def require_all_read(model: Any, result: Any, folder: Path) -> None:
    """Raise ConfigError if a PEFT model has no place for a value of the adapters in a folder, or if the folder lacks a trained parameter.

    ``result`` is what PEFT returns when it reads the values.
    """
    # A parameter that several layers share is there if one of its names is. PEFT does not save AdaLoRA's numbers of ranks,
    # and writes trained copies of a resized table twice.
    params = dict(model.named_parameters(remove_duplicate=False))
    read = {id(param) for name, param in params.items() if name not in result.missing_keys}
    missing = [name for name, param in params.items() if param.requires_grad and id(param) not in read]
    for problem, names in (
        ("has tensors that the model has no place for", [n for n in result.unexpected_keys if _COPY not in n]),
        ("lacks tensors", [name for name in missing if _RANK not in name]),
    ):
        if names:
            raise ConfigError(
                f"{require_weights(folder)} {problem}, for example {names[0]}; it does not belong to a "
                f"{type(adapted_model(model)).__name__} of this base"
            )


def load_adapters(model: Any, folder: Path) -> None:
    """Load saved values of the adapters of a streamed PEFT model, which stay where they are. Raise ConfigError if there are
    none in safetensors.
    """
    _peft().set_peft_model_state_dict(adapted_model(model), read_values(folder))


def open_adapter_config(folder: Path, model: Any) -> Any:
    """Return PEFT's config of the adapters in a folder, for a causal language model. Raise ConfigError if it cannot be used."""
    require_adapter_config(folder)
    require_quick_names(read_adapter_config(folder), _module_names(model), folder / ADAPTER_CONFIG)
    config = _peft().PeftConfig.from_pretrained(folder)
    if config.task_type in _OF_OTHER_HEADS:
        raise ConfigError(
            f"{folder} has adapters and a head of its own for {config.task_type}; only those of causal language models are opened "
            "here. PEFT's merge_and_unload merges others"
        )
    config.inference_mode = False
    config.base_model_name_or_path = lasting_name(config.base_model_name_or_path or "") or None
    return config


def _module_names(model: Any) -> list[str]:
    return [name for name, _ in adapted_model(model).named_modules()]


def _require_names(setting: str, wanted: Iterable[str] | None, found: Sequence[str], separator: str = "") -> None:
    """Raise ConfigError if a name in a setting, with a separator before it, is the end of none of the names in the model, ``found``."""
    for name in wanted or ():
        if not any(each.endswith(separator + name) for each in found):
            meant = closest_setting(name.rpartition(".")[2], {each.rpartition(".")[2] for each in found})
            hint = "; name one of the model's" if meant is None else f"; did you mean {meant}?"
            raise ConfigError(f"{setting}: {name}: the model has nothing of this name{hint}")


def _tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _peft() -> Any:
    """Return the package PEFT; raise ConfigError if it is not installed."""
    try:
        with without_bitsandbytes_messages():
            import peft
    except ImportError as error:
        raise ConfigError(NO_PEFT) from error
    return peft


@contextmanager
def without_bitsandbytes_messages() -> Iterator[None]:
    """Context manager: import PEFT, or code of transformers that imports it, without what bitsandbytes logs meanwhile.

    It logs an error if it has no library for this version of CUDA, and a warning if it has no kernels for a CPU with AVX-512;
    nothing here needs them.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Context manager: ignore the warning of transformers that PEFT asks for activation checkpointing by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextmanager
def _rejections(folder: str | None = None, layers_remedy: Callable[[], str] = str) -> Iterator[None]:
    """Context manager: raise ConfigError, with a remedy, if PEFT rejects the adapters of a folder or of settings.

    Args:
        folder: folder of the adapters; None for adapters of settings.
        layers_remedy: returns the remedy for layers that the model does not have; an empty text for the usual remedy.
    """
    try:
        with without_peft_warnings():
            yield
    except HorizonError:
        raise
    except Exception as error:  # PEFT raises anything
        # The first line of torch's message about other shapes says nothing; the second names the first tensor.
        _, _, shapes = str(error).partition("Error(s) in loading state_dict for")
        detail = shapes.split("\n")[1].strip() if "\n" in shapes else first_line(error)
        place = "" if folder is None else f"{folder}: "
        remedy = "give them the base and the vocabulary that they were trained on"
        if folder is None:
            remedy = (layers_remedy() if "target modules" in detail.lower() else "") or "correct the lora_ settings"
        raise ConfigError(f"{place}PEFT cannot add these adapters to the model ({detail}); {remedy}") from error
