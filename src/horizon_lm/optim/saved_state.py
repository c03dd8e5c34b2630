"""Saved optimizer states, which are checked as a whole before any part of them is loaded."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.memory.kernels.updates import Rule

STEPS = "step"  # number of steps of the whole optimizer, on which the rounding noise depends
LOW_HALF = "low_half"
_IGNORED_SETTINGS = ("foreach", "fused", "capturable", "differentiable")  # settings of torch's implementations
_FIXED_SETTINGS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}  # the only supported values


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state that fits an optimizer.

    Attributes:
        entries: the state of each parameter by its index; None for a parameter that has had no gradient.
        groups: the settings of each group.
        num_steps: the optimizer's number of steps.
    """

    entries: Mapping[int, Mapping[str, Any] | None]
    groups: Sequence[Mapping[str, Any]]
    num_steps: int

    def copy_into(self, own: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Copy the entries into an optimizer's own state, key by key. Set the moments of a parameter without an entry to zero."""
        for index, entry in self.entries.items():
            for key, tensor in own[index].items():
                if entry is None and key != LOW_HALF:
                    tensor.zero_()
                elif entry is not None and key in entry:
                    tensor.copy_(torch.as_tensor(entry[key]))


def plain_groups(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return parameter groups as plain data, with the names of their parameters. ``names``: the name of each parameter, by its id."""
    plain = [{name: _plain(value) for name, value in group.items() if name != "params"} for group in groups]
    return [
        {**each, "params": [names[id(param)] for param in group["params"]]}
        for each, group in zip(plain, groups, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Return a setting of a group as plain data. It may be a number, a tensor or a number of numpy, or a list of these."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value


def check_settings(settings: Mapping[str, Any], rule: Rule) -> None:
    """Raise ConfigError if a setting of a group is negative or infinite, or a decay rate of the rule is not below 1."""
    limits = {name: 1 if name in rule.decay_rates else math.inf for name in settings}
    if not all(_is_in_range(name, value, limits[name]) for name, value in settings.items()):
        raise ConfigError(f"{', '.join(f'{name}={value}' for name, value in settings.items())}: out of range")


def _is_in_range(name: str, value: Any, limit: float) -> bool:
    """Return whether a setting, or each of two ``betas``, is at least 0 and below a limit."""
    numbers, count = (value, 2) if name == "betas" else ([value], 1)
    try:
        return len(numbers) == count and all(0 <= number < limit for number in numbers)
    except (TypeError, ValueError):
        return False


def check_state(given: Any, own: Mapping[str, Any], moments: str, rule: Rule, settings: Sequence[str]) -> SavedState:
    """Check that a state is from this optimizer, or from torch's of the same name with the same parameters.

    Args:
        given: the state to load.
        own: the current state of this optimizer.
        moments: the kind of this optimizer's moments.
        rule: the rule of this optimizer.
        settings: the names of its settings of a group.

    Raises:
        ConfigError: if any part of the state does not fit.
    """
    if not isinstance(given, Mapping) or not all(isinstance(given.get(k), t) for k, t in _PART_TYPES.items()):
        raise ConfigError(f"this is not an optimizer state; pass the return value of state_dict() of {_a(rule.name)}")
    index_of = _match_parameters(given["param_groups"], own["param_groups"])
    groups = [_check_group(number, group, rule, settings) for number, group in enumerate(given["param_groups"])]
    entries = _match_entries(given, own["state"], index_of)
    for index, entry in entries.items():
        if entry is not None:
            _check_entry(f"parameter {index}", entry, own["state"][index], moments)
    of_masters = [entry for index, entry in entries.items() if entry is not None and LOW_HALF in own["state"][index]]
    _require_low_halves_of_all(of_masters)
    num_steps = _as_num_steps(f"{STEPS!r}", given[STEPS]) if STEPS in given else 0
    steps = (_as_num_steps("step", entry["step"]) for entry in entries.values() if entry is not None)
    return SavedState(entries, groups, max([num_steps, *steps]))


def _a(name: str) -> str:
    """Return a name with its article."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


_PART_TYPES = {"state": Mapping, "param_groups": Sequence}


def _match_parameters(given: Sequence[Any], own: Sequence[Any]) -> dict[Any, int]:
    """Map the parameter numbers in a state's groups to this optimizer's by their positions, as torch does. Reject groups of other sizes."""
    given_sizes, own_sizes = ([len(group.get("params", ())) for group in groups] for groups in (given, own))
    if given_sizes != own_sizes:
        raise ConfigError(
            f"the optimizer state has other parameter groups than this optimizer: {given_sizes} parameters instead of {own_sizes}; "
            "create the optimizer with the groups of the saved one"
        )
    numbers = [number for group in given for number in group["params"]]
    if len(set(numbers)) < len(numbers):
        raise ConfigError("the optimizer state has a parameter twice in its groups; it is damaged")
    return dict(zip(numbers, (index for group in own for index in group["params"]), strict=True))


def _check_group(number: int, group: Mapping[str, Any], rule: Rule, settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a saved group without those of torch's implementations. Reject a group that lacks or needs other settings."""
    if missing := [name for name in settings if name not in group]:
        raise ConfigError(
            f"the optimizer state has no {', '.join(missing)} in group {number}; it is not from {_a(rule.name)}"
        )
    check_settings({name: group[name] for name in settings}, rule)
    for name, value in _FIXED_SETTINGS.items():
        if group.get(name, value) is not value:
            raise ConfigError(
                f"the optimizer state was made with {name}={group[name]}, which horizon_lm.{rule.name} does not support; continue with the "
                "optimizer that made it"
            )
    return {k: v for k, v in group.items() if k not in ("params", *_IGNORED_SETTINGS, *_FIXED_SETTINGS)}


def _match_entries(
    given: Mapping[str, Any], own: Mapping[int, Any], index_of: Mapping[Any, int]
) -> dict[int, Mapping[str, Any] | None]:
    """Return the saved state of each parameter of ``own``; None for one that has none. Reject a state of other parameters, or an incomplete
    one. ``index_of`` is what `_match_parameters` returned.
    """
    states = given["state"]
    if unknown := [number for number in states if index_of.get(number) not in own]:
        raise ConfigError(
            f"the optimizer state has moments of parameter {unknown[0]}, which is frozen here or in no group; train the same "
            "parameters as the saved optimizer"
        )
    if own and not states:
        raise ConfigError("the optimizer state has no moments: it was saved before the first step, so do not load it")
    entries: dict[int, Mapping[str, Any] | None] = dict.fromkeys(own)
    entries.update({index_of[number]: entry for number, entry in states.items()})
    num_missing = sum(entry is None for entry in entries.values())
    if num_missing and STEPS in given:  # torch's states lack parameters without a gradient; ours have all parameters
        raise ConfigError(f"the optimizer state lacks {num_missing} of {len(own)} parameters; it is damaged")
    return entries


def _check_entry(place: str, entry: Any, own: Mapping[str, Any], moments: str) -> None:
    """Raise ConfigError if the state of one parameter has other keys, dtypes or shapes than ``own``, or an invalid number of steps."""
    if not isinstance(entry, Mapping) or entry.keys() - {LOW_HALF} != own.keys() - {LOW_HALF}:
        found = ", ".join(sorted(map(str, entry))) if isinstance(entry, Mapping) and entry else "nothing"
        raise ConfigError(
            f"the optimizer state has other moments than {moments!r} at {place}: {found} instead of {', '.join(own)}; use the "
            "optimizer and the kind of moments that it was made with"
        )
    if LOW_HALF in entry and LOW_HALF not in own:
        raise ConfigError(
            f"the optimizer state has {LOW_HALF}, which are 16 bits of each weight in precision fp32_master; stream the model "
            "with that precision to load it"
        )
    _as_num_steps(f"'step' at {place}", entry["step"])
    for key, value in entry.items():
        if key == "step":
            continue
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            raise ConfigError(f"the optimizer state has a {type(value).__name__} without values as {key} at {place}")
        if not _is_of_kind(value.dtype, own[key].dtype):
            raise ConfigError(
                f"the optimizer state has other moments than {moments!r} at {place}: {key} is {value.dtype}, and "
                f"{own[key].dtype} here; use the kind of moments that it was made with"
            )
        if value.shape != own[key].shape:
            raise ConfigError(
                f"the optimizer state has {key} of shape {tuple(value.shape)} at {place}, and the parameter has "
                f"{tuple(own[key].shape)}; the state is from another model, or its parameters are in another order"
            )


def _is_of_kind(given: torch.dtype, own: torch.dtype) -> bool:
    """Return whether a tensor of dtype ``given`` may be loaded as ``own``: floating-point numbers are converted, 8-bit codes are not."""
    return given == own or (given.is_floating_point and own.is_floating_point)


def _require_low_halves_of_all(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if some entries have a low half and others do not. None has one in a state of torch's optimizer."""
    count = sum(LOW_HALF in entry for entry in entries)
    if count not in (0, len(entries)):
        raise ConfigError(f"the optimizer state has {LOW_HALF} of {count} of {len(entries)} parameters; it is damaged")


def _as_num_steps(name: str, value: Any) -> int:
    """Convert a number of steps, which may be a tensor with one element, to an integer."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value % 1:
        raise ConfigError(f"the optimizer state has {value} as {name}, which is not a number of steps; it is damaged")
    return int(value)


def check_scalars(
    scalars: Mapping[str, Any], groups: Sequence[Sequence[str]], trained: Set[str], rule: Rule, settings: Sequence[str]
) -> None:
    """Check what a checkpoint holds of an optimizer beside its moments.

    Args:
        scalars: what `SlabOptimizer.scalars` has returned.
        groups: names of the parameters of each group of this optimizer.
        trained: names of the parameters that it trains.
        rule: the rule of this optimizer.
        settings: the names of its settings of a group.

    Raises:
        ConfigError: it belongs to other parameters or groups, or is damaged.
    """
    try:
        if [group["params"] for group in scalars["groups"]] != groups:
            raise ConfigError(
                "the checkpoint's optimizer has other parameter groups than this one; train the same parameters, in the "
                "same groups"
            )
        if scalars["steps"].keys() != trained:
            raise ConfigError("the checkpoint's optimizer trains other parameters than this one; freeze the same ones")
        for group in scalars["groups"]:
            check_settings({name: group[name] for name in settings}, rule)
        _require_numbers(scalars)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the checkpoint's optimizer state is damaged: {first_line(error)}") from error


def _require_numbers(scalars: Mapping[str, Any]) -> None:
    """Raise ValueError if a count or a norm of a checkpoint is not a number, or out of range."""
    skipped = scalars["skipped"]
    counts = [scalars["step"], scalars["seed"], skipped["num"], skipped["num_consecutive"], *scalars["steps"].values()]
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise ValueError("a count is not a number, or out of range")
    norms = [scalars["grad_norm"], *scalars["unit_grad_norms"].values()]
    if not all(isinstance(norm, float | int | None) for norm in norms):
        raise ValueError("a norm is not a number")
