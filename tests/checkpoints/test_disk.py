"""Durable writes: complete files and folders, whatever exists before and whatever the file system can do."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.common.disk import Disk, replacing, restore_folder, write_file
from horizon_lm.errors import ConfigError, DoesNotFitError
from horizon_lm.runs.checkpoints.new_folder import write_new_folder


class NoExchange(Disk):
    """A system that cannot exchange two folders."""

    def exchange(self, one: Path, other: Path) -> bool:
        return False


def replace(disk: Disk, target: Path, text: str, error: OSError | None = None) -> None:
    with replacing(disk, target) as new:
        new.part.mkdir()
        (new.part / "file").write_text(text)
        if error is not None:
            raise error


@pytest.mark.parametrize("disk", [Disk(), NoExchange()], ids=["exchange", "two renames"])
def test_a_folder_is_replaced_whole(tmp_path, disk):
    target = tmp_path / "model"
    for text in ("first", "second"):
        replace(disk, target, text)
        assert (target / "file").read_text() == text
        assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("disk", [Disk(), NoExchange()], ids=["exchange", "two renames"])
def test_a_failed_fill_keeps_the_old_folder(tmp_path, disk):
    target = tmp_path / "model"
    replace(disk, target, "first")

    with pytest.raises(OSError, match="No space"):
        replace(disk, target, "half", OSError(28, "No space left on device"))
    assert (target / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["model"]


def test_an_interrupted_replacement_is_undone(tmp_path):
    target = tmp_path / "model"
    replace(Disk(), target, "first")
    target.rename(tmp_path / ".model.horizon-old")
    restore_folder(Disk(), target)
    assert (target / "file").read_text() == "first"


def test_a_written_file_replaces_the_old_one(tmp_path):
    for text in (b"first", b"second"):
        write_file(Disk(), tmp_path / "file", text)
        assert (tmp_path / "file").read_bytes() == text
    assert os.listdir(tmp_path) == ["file"]


def test_direct_writes_of_any_size_arrive(tmp_path):
    """Writes that the file system cannot do without the page cache go through it."""
    data = os.urandom(10_000)
    with Disk().create(tmp_path / "file", direct=True) as file:
        file.write(memoryview(data)[:4097])
        file.write(memoryview(data)[4097:])
    assert (tmp_path / "file").read_bytes() == data


def test_what_is_set_aside_keeps_earlier_copies(tmp_path: Path) -> None:
    """Two of them may have the same second."""
    for text in ("first", "second", "third"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").write_text(text)
        assert (Disk().set_aside(tmp_path / "run") / "file").read_text() == text
    assert sorted((path / "file").read_text() for path in tmp_path.iterdir()) == ["first", "second", "third"]


def test_a_new_folder_keeps_what_has_its_name_by_then(tmp_path: Path) -> None:
    """For the outputs of horizon-lm export and merge, which must not exist at the start."""

    def fill(part: Path) -> None:
        (part / "model").write_text("new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("mine")

    with pytest.warns(RuntimeWarning, match=r"out appeared meanwhile, and is now .*out\.\d{8}-\d{6}"):
        write_new_folder(tmp_path / "out", fill)
    assert (tmp_path / "out" / "model").read_text() == "new"
    (aside,) = tmp_path.glob("out.*")
    assert (aside / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), DoesNotFitError, "no space is left"),
        (Exception("I/O error: No space left on device (os error 28)"), DoesNotFitError, "no space is left"),
        (OSError(errno.EFBIG, "File too large"), DoesNotFitError, "ulimit -f unlimited"),
        (Exception("I/O error: File too large (os error 27)"), DoesNotFitError, "ulimit -f unlimited"),
        (PermissionError(errno.EPERM, "Not permitted"), ConfigError, r"cannot be written to \(Not permitted\)"),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_a_new_folder_that_cannot_be_written(tmp_path: Path, error: Exception, kind: Any, message: str) -> None:
    def fill(part: Path) -> None:
        (part / "half").write_text("")
        raise error

    with pytest.raises(kind, match=message):
        write_new_folder(tmp_path / "below" / "out", fill)
    assert not list((tmp_path / "below").iterdir())
