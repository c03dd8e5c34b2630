"""A disk that is full or fails at any operation of a save costs that checkpoint, and nothing else."""

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.support.thinned_cases import thinned

pytest.importorskip("xxhash", reason="needs the whole installation")

from horizon_lm.common.disk import Disk
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from tests.support.checkpointed_training import digest, opened
from tests.support.failing_disk import FailingDisk
from tests.support.training_steps import step


class Twins:
    """Two equal trainings, one of which saves."""

    def __init__(self) -> None:
        self.model, self.optimizer = opened()
        self._other, self._number = opened(), count()

    def step(self) -> None:
        number = next(self._number)
        step(self.model, self.optimizer, number)
        step(*self._other, number)

    def require_equal(self) -> None:
        assert digest(self.model, self.optimizer) == digest(*self._other)

    def save(self, folder: Path, disk: Disk) -> None:
        """Save while the training goes on."""
        try:
            saving = save_checkpoint(folder, self.model, self.optimizer, disk=disk, wait=False)
        finally:
            self.step()
        saving.wait()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("stays_full", [False, True], ids=["once", "stays full"])
def test_a_save_that_fails_at_any_operation(tmp_path: Path, stays_full: bool) -> None:
    """The checkpoint before is intact, the training is not disturbed, and the next checkpoint removes what is left."""
    twins, reader = Twins(), opened(seed=1)
    twins.step()
    save_checkpoint(tmp_path / "good", twins.model, twins.optimizer)
    good, failed = digest(twins.model, twins.optimizer), []
    for at in count(step=5 if stays_full else 1):
        disk = FailingDisk(at, stays_full)
        with suppress(OSError):
            twins.save(tmp_path / "next", disk)
        if not disk.failed_at:
            break
        failed.append(disk.failed_at.split()[0])
        twins.require_equal()
        assert names(tmp_path) - {".next.horizon-part"} == {"good"}, disk.failed_at
    assert set(failed) == {"create", "write", "close", "make", "rename", "sync"} or stays_full
    assert len(failed) > (10 if stays_full else 60)
    assert names(tmp_path) == {"good", "next"}
    load_checkpoint(tmp_path / "good", *reader)
    assert digest(*reader) == good
    load_checkpoint(tmp_path / "next", *reader)


@pytest.mark.parametrize("exchanges", thinned([True, False], every=2), ids=["exchange", "two renames"])
def test_a_replacement_that_fails_at_any_operation(tmp_path: Path, exchanges: bool) -> None:
    """The folder has the old checkpoint, also if the new one was complete and could not get its name."""
    twins, reader = Twins(), opened(seed=1)
    twins.step()
    save_checkpoint(tmp_path / "one", twins.model, twins.optimizer)
    saved, failed = digest(twins.model, twins.optimizer), []
    for at in count(40):  # the manifest and the folder's name come last
        disk = FailingDisk(at, exchanges=exchanges)
        expected = digest(twins.model, twins.optimizer)
        with suppress(OSError):
            twins.save(tmp_path / "one", disk)
        load_checkpoint(tmp_path / "one", *reader)
        if not disk.failed_at:
            break
        failed.append(disk.failed_at)
        assert digest(*reader) == saved, disk.failed_at
    assert digest(*reader) == expected
    assert names(tmp_path) == {"one"}
    assert "sync " + tmp_path.name in failed
    assert ("exchange one" if exchanges else "rename to .one.horizon-old") in failed
