"""The rules of a setting, as metadata of its field: ``Annotated[bool, OnResume.FREE, Needs(save_strategy="steps")]``."""

from collections.abc import Collection, Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Reading:
    """The context in which settings are validated.

    Attributes:
        without_rows: ``datasets`` may be missing, for plans that are made before the rows exist.
        places: the names of the settings in each place that they are read from: a run file, and the overrides of it.
    """

    without_rows: bool = False
    places: Sequence[Collection[str]] = ()

    def is_meant(self, name: str, others: Collection[str]) -> bool:
        """Return whether a setting was written on purpose, although its value may be the default: it is in a place without ``others``, the
        settings that decide whether it is used. A file that lists all settings has these, too, and means nothing by its defaults.
        """
        return any(name in place and not any(other in place for other in others) for place in self.places)


WITHOUT_ROWS = Reading(without_rows=True)


class Needs:
    """The values of other settings without which a setting is not used. Of several settings, one is enough.

    Args:
        others: the value or a tuple of values, by the name of an earlier setting; ``...`` for any value but its default.
    """

    def __init__(self, **others: Any) -> None:
        self.others = {name: wanted if isinstance(wanted, tuple) else (wanted,) for name, wanted in others.items()}

    def require(self, given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> None:
        """Raise UnusedError unless one of ``others`` has a wanted value. The rule passes if one of them is invalid, which is another error.

        Args:
            given: values of the earlier settings without invalid ones.
            fields: the fields of all settings.
        """
        defaults = {name: fields[name].default for name in self.others}
        if not self.others.keys() <= given.keys() or self._satisfied_by(given, defaults):
            return
        # Settings whose defaults would satisfy the rule: they were changed to a value with which this setting is not used.
        changed = self._satisfied_by(defaults, defaults)
        conflicts = " and ".join(_as_written(name, [given[name]]) for name in changed)
        missing = " or ".join(_as_written(name, self.others[name]) for name in self.others if name not in changed)
        if conflicts and missing:
            raise UnusedError(f"is not used with {conflicts} and without {missing}; change one of them, or remove this")
        if conflicts:
            raise UnusedError(
                f"is not used with {conflicts}; remove one of the {'two' if len(changed) == 1 else 'settings'}"
            )
        raise UnusedError(f"is not used without {missing}; set {'it' if len(defaults) == 1 else 'one'}, or remove this")

    def _satisfied_by(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """Return the names in ``others`` that have a wanted value in ``values``."""
        return [name for name, wanted in self.others.items() if _is_wanted(values[name], wanted, defaults[name])]


class NeedsEvenByDefault(Needs):
    """`Needs` of a setting, such as the rank of adapters, whose default value is only written by somebody who wants what it needs, such as
    adapters: a run without them would not be the one that was asked for.
    """


def require_use(
    name: str, value: Any, given: Mapping[str, Any], fields: Mapping[str, FieldInfo], reading: Reading
) -> None:
    """Raise UnusedError if a setting is given without another one that it needs (`Needs.require`).

    A default value is accepted anywhere, unless the rule is `NeedsEvenByDefault`, the default turns something on (it is neither None nor
    False) and it was written on purpose (`Reading.is_meant`).
    """
    for rule in fields[name].metadata:
        if not isinstance(rule, Needs):
            continue
        default_counts = isinstance(rule, NeedsEvenByDefault) and value is not None and value is not False
        if value != fields[name].default or (default_counts and reading.is_meant(name, rule.others.keys())):
            rule.require(given, fields)


def _is_wanted(value: Any, wanted: tuple[Any, ...], default: Any) -> bool:
    """Return whether a value, or one of a list, is wanted. `...` stands for any value but the default."""
    if wanted == (...,):
        return bool(value != default)
    return any(each in wanted for each in (value if isinstance(value, list) else [value]))


def _as_written(name: str, values: Iterable[Any]) -> str:
    """Return the name of a setting with the values that are words, as in a run file; numbers and None are left out."""
    words = [str(each).lower() if isinstance(each, bool) else each for each in values if isinstance(each, bool | str)]
    return f"{name}: {' or '.join(words)}" if words else name
