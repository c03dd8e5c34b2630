"""The folders of a run's checkpoints: what is deleted, and what is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="needs the whole installation")

from horizon_lm.common.disk import Disk
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.runs.training import step_folders
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.step_folders import StepFolders, load_weights


@pytest.mark.parametrize("best", [None, 1])
def test_the_oldest_are_deleted_beyond_the_limit(tmp_path: Path, best: int | None) -> None:
    run_dir: Any = SimpleNamespace(path=tmp_path, disk=Disk())
    folders = StepFolders(run_dir, limit=2)
    for step in range(1, 6):
        (folders.path(step) / "units").mkdir(parents=True)
        folders.add(folders.path(step), is_best=step == best)
    expected = [f"checkpoint-{step}" for step in ([best] if best else []) + [4, 5]]
    assert [path.name for path in folders.kept] == sorted(path.name for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(
    ("damaged", "unreadable", "error", "loaded"),
    [
        ([], [], None, ["best"]),
        (["best"], [], ConfigError, []),
        ([], ["best"], ConfigError, ["best", "last"]),
        ([], ["best", "last"], StreamingError, ["best", "last"]),
        (["last"], ["best"], StreamingError, ["best"]),
    ],
)
def test_weights_of_two_checkpoints_are_never_taken_for_one_model(
    monkeypatch: pytest.MonkeyPatch, damaged: list[str], unreadable: list[str], error: type[Exception] | None,
    loaded: list[str],
) -> None:  # fmt: skip
    """A damaged checkpoint is found before the weights change, one that becomes unreadable only then."""
    begun: list[str] = []

    def verify_copies(mesh: Any, folder: Path) -> object:
        if folder.name in damaged:
            raise ConfigError(f"{folder} is damaged")
        return object()

    def restore(folder: Path, *_: Any) -> None:
        begun.append(folder.name)
        if folder.name in unreadable:
            raise OSError("Input/output error")

    monkeypatch.setattr(step_folders, "verify_copies", verify_copies)
    monkeypatch.setattr(step_folders, "restore", restore)
    if error is None:
        load_weights(None, Path("best"), Path("last"), Ranks())
    else:
        with pytest.raises(error):
            load_weights(None, Path("best"), Path("last"), Ranks())
    assert begun == loaded
