"""The rules of a setting, as metadata of its field: ``Annotated[bool, OnResume.FREE, Needs(save_strategy="steps")]``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo


class UnusedError(ValueError):
    """A setting that the run would not use."""


class OnResume(Enum):
    """The effect of another value on a resumed run. A setting without one is fixed: with another value, it is another run."""

    FREE = "changes neither the steps nor their numbers"
    ROUNDING = "changes how the numbers of a step are rounded, and which elements dropout drops"
    STATE = "needs another state than a checkpoint has, so not even `resume_with_changes` allows it"


@dataclass(frozen=True)
class PerMachine:
    """The rule of a setting that may differ between machines: a place, or what a process may use."""


class Needs:
    """The values of other settings without which a setting is not used. Of several settings, one is enough.

    Args:
        others: the value or a tuple of values, by the name of an earlier setting; ``...`` for any value but its default.
    """

    def __init__(self, **others: Any) -> None:
        self.others = {name: wanted if isinstance(wanted, tuple) else (wanted,) for name, wanted in others.items()}

    def require(self, given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> None:
        """Raise UnusedError unless one of the other settings has such a value.

        Args:
            given: values of the earlier settings, without invalid ones, which have errors of their own.
            fields: the fields of all settings.
        """
        defaults = {name: fields[name].default for name in self.others}
        if not self.others.keys() <= given.keys() or self._met_by(given, defaults):
            return
        changed = self._met_by(defaults, defaults)  # from a value with which the setting would be used
        found = " and ".join(_described(name, [given[name]]) for name in changed)
        missing = " or ".join(_described(name, self.others[name]) for name in self.others if name not in changed)
        if found and missing:
            raise UnusedError(f"is not used with {found} and without {missing}; change one of them, or remove this")
        if found:
            raise UnusedError(
                f"is not used with {found}; remove one of the {'two' if len(changed) == 1 else 'settings'}"
            )
        raise UnusedError(f"is not used without {missing}; set {'it' if len(defaults) == 1 else 'one'}, or remove this")

    def _met_by(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """Return the other settings that have a wanted value."""
        return [name for name, wanted in self.others.items() if _is_wanted(values[name], wanted, defaults[name])]


def require_use(name: str, value: Any, given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> None:
    """Raise UnusedError if a setting differs from its default, and lacks another one that it needs; see `Needs.require`."""
    for rule in fields[name].metadata if value != fields[name].default else ():
        if isinstance(rule, Needs):
            rule.require(given, fields)


def _is_wanted(value: Any, wanted: tuple[Any, ...], default: Any) -> bool:
    """Return whether a value, or one of a list, is wanted. `...` stands for any value but the default."""
    if wanted == (...,):
        return bool(value != default)
    return any(each in wanted for each in (value if isinstance(value, list) else [value]))


def _described(name: str, values: Iterable[Any]) -> str:
    """Return the name of a setting, and those values that are words, as in a run file."""
    words = [str(each).lower() if isinstance(each, bool) else each for each in values if isinstance(each, bool | str)]
    return f"{name}: {' or '.join(words)}" if words else name
