"""Choose the layers of a model that get new adapters: not those of components that are frozen."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from horizon_lm.common.near_misses import most_similar_first
from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component, component_of_modules, modules_of

_ALL_LINEAR = "all-linear"


class TargetLayers:
    """The layers of a model that may get adapters.

    Args:
        model: a model, without PEFT's own part.
        frozen: its components that get none.

    Attributes:
        left_out: regular expression of the names of the modules that get none, as PEFT has it; None if all may get some.
    """

    def __init__(self, model: Any, frozen: Collection[Component]) -> None:
        self._model, self._frozen = model, frozen
        self._components = component_of_modules(model) if frozen else {}
        paths = modules_of(self._components, frozen)
        self.left_out = rf"({'|'.join(map(re.escape, paths))})(\..*)?" if paths else None
        self._names = [name for name, _ in model.named_modules()]

    def _is_left_out(self, name: str) -> bool:
        return self._components.get(name) in self._frozen

    def usual(self, peft: Any) -> tuple[str, ...]:
        """Return the names of the layers that PEFT adapts by default in this type of model; if it has none, attention's linear layers."""
        defaults = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        usual = defaults.get(getattr(self._model.config.get_text_config(), "model_type", None), ())
        modules = {name: each for name, each in self._model.named_modules() if not self._is_left_out(name)}
        found = {name.rpartition(".")[2] for name in modules} & set(usual)
        if not found:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            found = {name.rpartition(".")[2] for name in linear if "attn" in name or "attention" in name}
        return tuple(sorted(found))

    def require(self, wanted: str | Sequence[str] | None) -> None:
        """Raise ConfigError if nothing in the model has one of the wanted names, or only what is left out.

        Args:
            wanted: ends of names, a regular expression of whole names, or all-linear; None for the usual layers.
        """
        if isinstance(wanted, str):
            found = [] if wanted == _ALL_LINEAR else [name for name in self._names if re.fullmatch(wanted, name)]
            self._require_some("lora_target_modules", wanted, found)
            return
        # PEFT, too, compares the ends of names; it would leave out the names that it does not find, without an error.
        matches = {end: [name for name in self._names if f".{name}".endswith(f".{end}")] for end in wanted or ()}
        if missing := [end for end, found in matches.items() if not found]:
            remedy = layers_remedy(self._model, missing) or "remove it"
            raise ConfigError(f"lora_target_modules: the model has no {' and no '.join(missing)}; {remedy}")
        for end, found in matches.items():
            self._require_some("lora_target_modules", end, found)

    def parameters(self, wanted: Sequence[str]) -> list[str]:
        """Return the names of parameters that get adapters, as PEFT takes them, which knows none that are left out: the ends of names that
        are wanted, or whole names instead of an end that parameters of frozen components have, too.

        Raises:
            ConfigError: only parameters that are left out have a wanted end.
        """
        names, chosen = [name for name, _ in self._model.named_parameters()], list[str]()
        for end in wanted:
            found = [name for name in names if f".{name}".endswith(f".{end}")]
            owners = [name.rpartition(".")[0] for name in found]
            self._require_some("lora_target_parameters", end, owners)
            kept = [name for name, owner in zip(found, owners, strict=True) if not self._is_left_out(owner)]
            chosen += [end] if kept == found else kept
        return chosen

    def _require_some(self, setting: str, wanted: str, found: Sequence[str]) -> None:
        """Raise ConfigError if modules were found for a wanted name, and all of them are left out."""
        components = {self._components[name] for name in found if self._is_left_out(name)}
        if components and all(map(self._is_left_out, found)):
            names = " and the ".join(each.title for each in Component if each in components)
            settings = " and ".join(f"{each.setting}: false" for each in Component if each in components)
            rows = "" if Component.LANGUAGE_MODEL in components else " and add rows with images"
            raise ConfigError(
                f"{setting}: {wanted} is only in the {names}, which is frozen; set {settings}{rows}, or name other layers"
            )


def layers_remedy(model: Any, wanted: str | Iterable[str] | None) -> str:
    """Return the remedy for names that no layer of a model has: the names of its linear layers without the head, the most similar first."""
    typed = [wanted] if isinstance(wanted, str) else wanted or ()
    head = model.get_output_embeddings()
    linear = (name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head)
    last_parts = {name.rpartition(".")[2] for name in linear}
    names = ", ".join(most_similar_first(last_parts, [each.rpartition(".")[2] for each in typed]))
    return f"set lora_target_modules to linear layers of the model: {names}" if names else ""
