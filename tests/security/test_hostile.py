"""A short fuzz of small hostile files, and those that are known. `tests.security.hostile` has a long one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.security.costs import MAX_SECONDS, cost_of
from tests.security.hostile import CORPUS, FILES, Folders, fuzz

FOUND = sorted(CORPUS.glob("*/*"))
GROWING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("file", FILES)
def test_random_values(file: str, folders: Folders) -> None:
    assert fuzz(folders, file, seed=0, stop=lambda count: count >= 2)[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_more_random_values(file: str, folders: Folders) -> None:
    assert fuzz(folders, file, seed=1, stop=lambda count: count >= 60)[1] == ""


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_failed_once(path: Path, folders: Folders) -> None:
    assert folders.cost(path.parent.name, path.read_bytes()).problem == ""


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [GROWING] * 40},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [GROWING] * 8}] * 5},
        {"type": "Replace", "pattern": {"Regex": "e*"}, "content": "e" * 1000},
        {"type": "Replace", "pattern": {"String": ""}, "content": "e" * 1000},
    ],
)
def test_normalizers_that_multiply(normalizer: Any, folders: Folders) -> None:
    content = {**folders.start("tokenizer.json"), "normalizer": normalizer}
    cost = folders.cost("tokenizer.json", json.dumps(content).encode())
    assert cost.problem == ""
    assert "characters of one" in cost.message


def test_costs_are_seen() -> None:
    """The negative control: calls that take too long, too much memory, or end otherwise."""

    def spin() -> None:
        while True:
            pass

    assert cost_of(lambda: bytearray(600 * 10**6)).problem.endswith("MB: accepted")
    assert cost_of(lambda: 1 // 0).problem.startswith("ZeroDivisionError")
    assert cost_of(lambda: None).problem == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.security.costs.MAX_SECONDS", -3)  # two seconds until it is killed
        assert cost_of(spin).problem.startswith("killed")
    assert MAX_SECONDS == 10


def test_hostile_files_differ(folders: Folders) -> None:
    from tests.security.hostile import hostile

    rng = random.Random(0)
    assert len({hostile("config.json", folders.start("config.json"), rng) for _ in range(50)}) > 45
