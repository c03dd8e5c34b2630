"""Check that each number of a published profile has a source, by its field or, in a field of several numbers, by FIELD.KEY."""

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = ("measured on ", "data sheet: ", "published: ", "arithmetic: ", "assumed")
"""How a source begins: a run of this project on that very hardware; the maker's figure; somebody else's figure or measurement; one that
follows from others, with factors that are assumed or measured on other hardware; or an assumption.
"""
_TEXTS = ("name", "device", "gpu", "sources")


def numbers_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the numbers that are known, given the fields of a profile."""
    for name, value in profile.items():
        if name in _TEXTS or not value:
            continue
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def source_problems(profile: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the sources in the fields of a profile: numbers without one, sources of no number, and those that do not
    begin with one of `KINDS`.
    """
    sources: Mapping[str, str] = profile["sources"]
    numbers = list(numbers_of(profile))
    named = {name for number in numbers for name in (number, number.partition(".")[0])}
    missing = [f"{each} has no source" for each in numbers if not _has_source(each, sources)]
    unknown = [f"sources has {each}, which is no number here" for each in sources if each not in named]
    unclear = [
        f"the source of {name} does not begin with {', '.join(kind.strip(': ') for kind in KINDS)}"
        for name, source in sources.items()
        if not source.startswith(KINDS)
    ]
    return [*missing, *unknown, *unclear]


def _has_source(number: str, sources: Mapping[str, str]) -> bool:
    return number in sources or number.partition(".")[0] in sources
