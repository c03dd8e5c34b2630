"""The shapes of published models, which are known by name without a download."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from horizon_lm.common.constants import LANGUAGE_MODEL


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: hub id. A name that ends with "(text)" is the language model of a multimodal one.
        aliases: releases with the same shapes, for example instruction-tuned ones.
        parameters: parameters of the causal language model in transformers. A tied table counts once; modules for
            multi-token prediction and router biases without a gradient do not count.
        config: its config.json, including "model_type". A copy, because transformers modifies the dict that it
            receives.
        quantization: the ``quantization_config`` of its published weights; None if they are not quantized.
        differences: the settings of its config that aliases have otherwise, by alias: the range of their positions.
        needs: what its published folder needs to be opened, as an instruction; empty if it is opened as it is.
    """

    name: str
    aliases: tuple[str, ...]
    parameters: int
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str = ""

    def released_as(self, alias: str) -> "KnownModel":
        """Return the model with the config of an alias."""
        return replace(self, config={**self.config, **self.differences.get(alias, {})})


@cache
def _read() -> tuple[KnownModel, ...]:
    """Read the known models that come with the package, from the smallest to the largest."""
    files = [file for file in (resources.files(__package__) / "published").iterdir() if file.name.endswith(".json")]
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = [
        KnownModel(
            name=entry["name"], aliases=tuple(entry["aliases"]), parameters=entry["parameters"], config=entry["config"],
            quantization=entry.get("quantization_config"), differences=entry.get("differences", {}),
            needs=entry.get("needs", ""),
        )
        for entry in entries
    ]  # fmt: skip
    return tuple(sorted(models, key=lambda model: (model.parameters, model.name)))


def known_models() -> tuple[KnownModel, ...]:
    """Return all known models, smallest first."""
    return deepcopy(_read())


def _normalize(name: str) -> str:
    return name.casefold().removesuffix(LANGUAGE_MODEL)


def find_known(name: str) -> KnownModel | None:
    """Return the known model of this name or alias, with the config of that release.

    Case is ignored. An unambiguous name may omit the organization and "(text)".
    """
    wanted = _normalize(name)
    releases = {_normalize(each): model.released_as(each) for model in _read() for each in (model.name, *model.aliases)}
    if wanted in releases:
        return deepcopy(releases[wanted])
    # By the model's name, so that aliases of one model count once: several organizations may have released it.
    found = {model.name: model for known, model in releases.items() if known.rpartition("/")[2] == wanted}
    return deepcopy(next(iter(found.values()))) if len(found) == 1 else None


def known_config(known: KnownModel) -> Any:
    """Return the config of a known model without downloading anything."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**known.config)


def full_name(name: str) -> str:
    """Return the hub id for a name, which may omit the organization of a known model."""
    known = find_known(name)
    if known is None or "/" in name:
        return name.partition(" ")[0]  # "... (text)" denotes a part of that model
    ids = [each.partition(" ")[0] for each in (known.name, *known.aliases)]
    wanted = name.partition(" ")[0].casefold()
    # One of the ids fits, because `find_known` has found the model by the same comparison.
    return next(each for each in ids if each.rpartition("/")[2].casefold() == wanted)
