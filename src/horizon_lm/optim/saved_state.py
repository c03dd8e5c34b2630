"""States of the optimizer that somebody kept: checked as a whole before anything of them is used."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horizon_lm.errors import ConfigError

STEPS = "step"  # of the whole optimizer: the noise of rounding follows from it
LOW_HALF = "low_half"
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_WITHOUT_MEANING = ("foreach", "fused", "capturable", "differentiable")  # how torch's AdamW computes
_MEANINGS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}  # what, and how ours does


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that fits an optimizer.

    Attributes:
        entries: by the index of each parameter, its state; None for one that has had no gradient.
        groups: settings of the groups.
        num_steps: of the optimizer.
    """

    entries: Mapping[int, Mapping[str, Any] | None]
    groups: Sequence[Mapping[str, Any]]
    num_steps: int

    def copy_into(self, own: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Copy the entries into an optimizer's own, key by key. A parameter without an entry begins anew."""
        for index, entry in self.entries.items():
            for key, tensor in own[index].items():
                if entry is None and key != LOW_HALF:
                    tensor.zero_()
                elif entry is not None and key in entry:
                    tensor.copy_(torch.as_tensor(entry[key]))


def check_settings(settings: Mapping[str, Any]) -> None:
    """Reject settings of a group that are out of range."""
    lr, betas, eps, weight_decay = (settings[name] for name in _SETTINGS)
    try:
        good = min(lr, eps, weight_decay) >= 0 and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    except (TypeError, ValueError):
        good = False
    if not good or not all(map(math.isfinite, (lr, eps, weight_decay))):
        raise ConfigError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: out of range")


def check_state(given: Any, own: Mapping[str, Any], moments: str) -> SavedState:
    """Check that a state is one of this optimizer, or of a torch.optim.AdamW with the same parameters.

    Args:
        given: what ``state_dict`` of an optimizer gave.
        own: what that of this one gives.
        moments: how this one keeps them.

    Raises:
        ConfigError: anything in it that does not fit.
    """
    if not isinstance(given, Mapping) or not all(isinstance(given.get(k), t) for k, t in _PARTS.items()):
        raise ConfigError("this is no state of an optimizer: give what state_dict() of an AdamW returned")
    index_of = _match_parameters(given["param_groups"], own["param_groups"])
    groups = [_check_group(number, group) for number, group in enumerate(given["param_groups"])]
    entries = _match_entries(given, own["state"], index_of)
    for index, entry in entries.items():
        if entry is not None:
            _check_entry(f"parameter {index}", entry, own["state"][index], moments)
    _require_low_halves_of_all([entry for entry in entries.values() if entry is not None])
    num_steps = _count(f"{STEPS!r}", given[STEPS]) if STEPS in given else 0
    steps = (_count("step", entry["step"]) for entry in entries.values() if entry is not None)
    return SavedState(entries, groups, max([num_steps, *steps]))


_PARTS = {"state": Mapping, "param_groups": Sequence}


def _match_parameters(given: Sequence[Any], own: Sequence[Any]) -> dict[Any, int]:
    """Match the numbers of parameters in a state with ours, by their places in the groups, as torch does."""
    sizes = [[len(group.get("params", ())) for group in groups] for groups in (given, own)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the optimizer state has other parameter groups than this optimizer: {sizes[0]} parameters instead of {sizes[1]}; "
            "make the optimizer with the groups that it had"
        )
    numbers = [number for group in given for number in group["params"]]
    if len(set(numbers)) < len(numbers):
        raise ConfigError("the optimizer state has a parameter twice in its groups; it is damaged")
    return dict(zip(numbers, (index for group in own for index in group["params"]), strict=True))


def _check_group(number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without those that mean nothing here."""
    if lost := [name for name in _SETTINGS if name not in group]:
        raise ConfigError(f"the optimizer state has no {', '.join(lost)} in group {number}; it is not of an AdamW")
    check_settings(group)
    for name, meant in _MEANINGS.items():
        if group.get(name, meant) is not meant:
            raise ConfigError(
                f"the optimizer state was made with {name}={group[name]}, which horizon_lm.AdamW does not do; go on with the "
                "optimizer that made it"
            )
    return {k: v for k, v in group.items() if k not in ("params", *_WITHOUT_MEANING, *_MEANINGS)}


def _match_entries(
    given: Mapping[str, Any], own: Mapping[int, Any], index_of: Mapping[Any, int]
) -> dict[int, Mapping[str, Any] | None]:
    states = given["state"]
    if unknown := [number for number in states if index_of.get(number) not in own]:
        raise ConfigError(
            f"the optimizer state has moments of parameter {unknown[0]}, which is frozen here or in none of the groups; train "
            "the parameters that were trained"
        )
    if own and not states:
        raise ConfigError("the optimizer state has no moments: it was kept before the first step, so leave it out")
    entries: dict[int, Mapping[str, Any] | None] = dict.fromkeys(own)
    entries.update({index_of[number]: entry for number, entry in states.items()})
    lost = [index for index, entry in entries.items() if entry is None]
    if lost and STEPS in given:  # torch's lacks parameters without a gradient; ours has all
        raise ConfigError(f"the optimizer state lacks {len(lost)} of {len(own)} parameters; it is damaged")
    return entries


def _check_entry(place: str, entry: Any, own: Mapping[str, Any], moments: str) -> None:
    if not isinstance(entry, Mapping) or entry.keys() - {LOW_HALF} != own.keys() - {LOW_HALF}:
        found = ", ".join(sorted(map(str, entry))) if isinstance(entry, Mapping) and entry else "nothing"
        raise ConfigError(
            f"the optimizer state has other moments than {moments!r} at {place}: {found} instead of {', '.join(own)}; choose "
            "the optimizer and the kind of moments that it was made with"
        )
    if LOW_HALF in entry and LOW_HALF not in own:
        raise ConfigError(
            f"the optimizer state has {LOW_HALF}, 16 bits of each weight in precision fp32_master; stream the model with that "
            "precision to load it"
        )
    _count(f"'step' at {place}", entry["step"])
    for key, value in entry.items():
        if key == "step":
            continue
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            raise ConfigError(f"the optimizer state has a {type(value).__name__} without values as {key} at {place}")
        if not _is_of_kind(value.dtype, own[key].dtype):
            raise ConfigError(
                f"the optimizer state has other moments than {moments!r} at {place}: {key} is {value.dtype}, and "
                f"{own[key].dtype} here; choose the kind of moments that it was made with"
            )
        if value.shape != own[key].shape:
            raise ConfigError(
                f"the optimizer state has {key} of shape {tuple(value.shape)} at {place}, and the parameter has "
                f"{tuple(own[key].shape)}; it is of another model, or its parameters are in another order"
            )


def _is_of_kind(given: torch.dtype, own: torch.dtype) -> bool:
    """Return whether one dtype may be converted into the other: floating-point numbers may, codes may not."""
    return given == own or (given.is_floating_point and own.is_floating_point)


def _require_low_halves_of_all(entries: Sequence[Mapping[str, Any]]) -> None:
    having = sum(LOW_HALF in entry for entry in entries)
    if having not in (0, len(entries)):
        raise ConfigError(f"the optimizer state has {LOW_HALF} of {having} of {len(entries)} parameters; it is damaged")


def _count(what: str, value: Any) -> int:
    """Return a number of steps, given as a number or a tensor of one."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value % 1:
        raise ConfigError(f"the optimizer state has {value} as {what}, which is no number of steps; it is damaged")
    return int(value)
