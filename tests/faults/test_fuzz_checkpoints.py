"""A short fuzz of every file of a checkpoint, and all inputs that ever failed. `tests.faults.fuzz_checkpoints` has a long one."""

from pathlib import Path

import pytest

from tests.support.thinned_cases import thinned

pytest.importorskip("xxhash", reason="needs the whole installation")

from horizon_lm.runs.checkpoints import manifest
from tests.faults import fuzz_checkpoints
from tests.faults.fuzz_checkpoints import CORPUS, FILES, Target, fuzz

INPUTS = 25  # about two seconds for each file
FOUND = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", thinned(FILES, every=2))
def test_random_changes(target: Target, name: str) -> None:
    assert target.failure(name, (target.good / name).read_bytes(), True) == ""
    assert fuzz(target, name, seed=0, stop=lambda count: count >= INPUTS) == ""


@pytest.mark.parametrize("path", FOUND, ids=lambda path: str(path.relative_to(CORPUS)))
@pytest.mark.parametrize("checksums", [False, True])
def test_what_failed_once(target: Target, path: Path, checksums: bool) -> None:
    assert target.failure(str(path.parent.relative_to(CORPUS)), path.read_bytes(), checksums) == ""


def test_a_failure_is_seen(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without one of the checks, some input fails."""
    monkeypatch.setattr(fuzz_checkpoints, "CORPUS", tmp_path / "corpus")
    monkeypatch.setattr(manifest, "_require_tensors_in_files", lambda manifest: None)
    assert "Error: " in fuzz(target, "manifest.json", seed=3, stop=lambda count: count >= 2000)
    assert len(list((tmp_path / "corpus" / "manifest.json").iterdir())) == 1
