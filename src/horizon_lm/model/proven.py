"""Look up a model in the table of types that were compared with plain autograd (``docs/generated/models.md``)."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from horizon_lm.errors import ModelNotSupportedError, warn
from horizon_lm.model.parts import ModelParts

IMAGES, MICRO_BATCHES, VARLEN = "images", "micro_batches", "varlen"
IMAGES_IN_MICRO_BATCHES = "images_in_micro_batches"


@dataclass(frozen=True, slots=True)
class Proof:
    """The proven features of a model type.

    Attributes:
        name: name of the model's class.
        missing: reason why the table has no entry that holds for the model; empty if it has one.
        features: features that were proven, in addition to training on text with the default settings.
    """

    name: str
    missing: str
    features: frozenset[str]

    def reason_against(self, *needed: str) -> str:
        """Return the reason why a model with these features is unproven; empty if it is proven."""
        if self.missing:
            return self.missing
        lacking = [feature for feature in needed if feature not in self.features]
        return f"{self.name} was not proven with {', '.join(lacking)}" if lacking else ""


def find_proof(parts: ModelParts) -> Proof:
    """Look up a model in the table, and return the features that are proven for it, or why there are none.

    The table's entry for its type must be about the same class of transformers, and proven with a head that is tied, or untied, likewise.
    """
    model = parts.model.get_base_model() if hasattr(parts.model, "get_base_model") else parts.model
    cls, kind = _class_of_transformers(type(model)), model.config.model_type
    name, tying = cls.__name__, "tied" if parts.tied else "untied"
    entry = _table()["classifiers" if parts.classifies else "types"].get(kind)
    missing = ""
    if entry is None or entry["class"] != name:
        missing = f"{name} of type {kind!r} is not in the table of proven models"
    elif cls is not type(model) and not hasattr(model, "_horizon"):  # nor the class of a streamed model
        missing = f"{type(model).__name__} changes transformers' {name}"
    elif tying not in entry["features"]:
        missing = f"{name} was not proven with {tying} weights"
    return Proof(name, missing, frozenset() if missing else frozenset(entry["features"]))


def is_proven(kind: str, name: str) -> bool:
    """Return whether models of a type and a class, given by their names, were proven."""
    return bool(_table()["types"].get(kind, {}).get("class") == name)


def require_proven(reason: str) -> None:
    """Raise ModelNotSupportedError if there is a reason why a model is unproven (`Proof.reason_against`)."""
    if reason:
        raise ModelNotSupportedError(
            f"{reason} (docs/generated/models.md: compared with plain autograd, transformers {_table()['transformers']}). Set "
            "allow_unproven_model=True to stream it anyway, and check_gradients to compare its gradients yourself."
        )


@cache  # once in a process
def warn_of_other_version() -> None:
    """Warn if the installed transformers is not the version whose models were compared."""
    import transformers

    compared = _table()["transformers"]
    if transformers.__version__ != compared:
        warn(
            f"models were compared with plain autograd in transformers {compared}, and {transformers.__version__} is installed, in "
            "which a sample of them was; check_gradients compares the gradients of your model"
        )


def _class_of_transformers(cls: type) -> type:
    """Return the class of transformers that a class derives from; the class itself if there is none."""
    return next((each for each in cls.__mro__ if each.__module__.startswith("transformers.models.")), cls)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("proven.json").read_text(encoding="utf-8"))
    return table
