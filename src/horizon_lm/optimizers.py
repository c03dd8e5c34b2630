"""The optimizers that run files and transformers' trainers can name, and where each of them stands.

Only names are here, so that settings can be read without torch. A module of `optim` has everything else of its optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """An optimizer as its name in run files finds it.

    Attributes:
        module, name: its module, and the name of its class there, which is also its name in `horizon_lm`.
        settings: settings of a run that it uses, of those that not all optimizers use.
        others: transformers' names for it, and the kind of moments that each of them stands for; empty if transformers has none.
    """

    module: str
    name: str
    settings: tuple[str, ...]
    others: Mapping[str, str]


_LION = {"lion_32bit": "float32", "paged_lion_32bit": "float32", "lion_8bit": "8bit", "paged_lion_8bit": "8bit"}
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit")
_ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")

OPTIMIZERS: Mapping[str, Listed] = {
    "adamw": Listed(
        "horizon_lm.optim.adamw", "AdamW", ("adam_epsilon", "update_in_backward"), dict.fromkeys(_ADAMW, "float32") | dict.fromkeys(_ADAMW_8BIT, "8bit")
    ),
    "lion": Listed("horizon_lm.optim.lion", "Lion", ("update_in_backward",), _LION),
    "muon": Listed("horizon_lm.optim.muon", "Muon", ("adam_epsilon",), {}),
}  # fmt: skip


def by_other_name(theirs: str) -> tuple[str, str] | None:
    """Return the name here of an optimizer of transformers, and its kind of moments; None if there is none like it."""
    return next(((ours, each.others[theirs]) for ours, each in OPTIMIZERS.items() if theirs in each.others), None)


def users_of(setting: str) -> tuple[str, ...]:
    """Return the names of the optimizers that use a setting."""
    return tuple(name for name, each in OPTIMIZERS.items() if setting in each.settings)


def name_in_transformers(ours: str, moments: str) -> str:
    """Return transformers' name for an optimizer with such moments, or else for the optimizer with any; AdamW's if there is none."""
    others = OPTIMIZERS[ours].others or OPTIMIZERS["adamw"].others
    return next((theirs for theirs, kind in others.items() if kind == moments), next(iter(others)))
