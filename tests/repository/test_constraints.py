"""constraints.txt pins every package that the development environment installs, and nothing else."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
VERSIONS = {canonicalize_name(name): version for name, _, version in (pin.partition("==") for pin in PINS)}
UNPINNED = re.compile("setuptools|pip|wheel|nvidia-.*|cuda-.*|triton|horizon-lm")  # tools, and parts of torch


def declared() -> list[Requirement]:
    """Return the requirements in pyproject.toml, including extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        Requirement(r) for each in (project["dependencies"], *project["optional-dependencies"].values()) for r in each
    ]


def installed_with(requirements: list[Requirement]) -> Iterator[str]:
    """Return the names of all packages installed with these."""
    waiting, seen = [*requirements], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if UNPINNED.fullmatch(name) or (key := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        yield name
        try:
            inner = [Requirement(each) for each in requires(name) or []]
        except PackageNotFoundError:  # an extra that is not installed
            continue
        for each in inner:
            if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                waiting.append(each)


def test_every_package_is_pinned_once() -> None:
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in PINS)
    assert len(VERSIONS) == len(PINS)
    assert set(installed_with(declared())) == set(VERSIONS)


def test_pins_are_allowed() -> None:
    for requirement in declared():
        version = VERSIONS.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), requirement
