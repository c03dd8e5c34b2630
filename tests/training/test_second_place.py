"""The folders that may take a trained model if its own folder cannot be written to."""

import tempfile
from pathlib import Path

import pytest

from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import output_folder


def test_folders_in_memory_are_left_out_beside_one_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, in_memory = tmp_path / "home", tmp_path / "shm"
    in_memory.mkdir()

    def is_in_memory(path: Path) -> bool:
        if path == home:
            raise PermissionError
        return path == in_memory

    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(in_memory))
    monkeypatch.setattr(output_folder, "is_in_memory", is_in_memory)
    config = as_config({"model_name_or_path": "m", "datasets": "d", "output_dir": str(tmp_path / "runs" / "one")})
    (tmp_path / "runs").mkdir()
    assert output_folder.find_second_place(config, 1) == tmp_path / "runs"
