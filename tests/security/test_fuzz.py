"""A short fuzz of every reader, and all inputs that ever failed. `tests.security.fuzz` has a long one."""

from pathlib import Path

import pytest

from tests.security.fuzz import CORPUS, READERS, check, fuzz

INPUTS = 100  # about half a second for each reader
FOUND = sorted(path for path in CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", READERS)
def test_random_bytes(name: str, tmp_path: Path) -> None:
    reader, start = READERS[name]
    (tmp_path / "valid").write_bytes(start)
    reader(tmp_path / "valid")  # or mutations of it would all fail for one reason
    assert fuzz(name, tmp_path, seed=0, stop=lambda count: count >= INPUTS) == ""


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_failed_once(path: Path, tmp_path: Path) -> None:
    assert check(READERS[path.parent.name][0], path.read_bytes(), tmp_path) == ""


def test_a_failure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a reader that fails at a byte that mutations make."""
    monkeypatch.setattr("tests.security.fuzz.CORPUS", tmp_path / "corpus")
    monkeypatch.setitem(READERS, "fragile", (lambda path: path.read_bytes().decode("ascii"), b"abc" * 10))
    assert "UnicodeDecodeError" in fuzz("fragile", tmp_path, seed=0, stop=lambda count: count >= 500)
    assert len(list((tmp_path / "corpus" / "fragile").iterdir())) == 1
