"""After a power cut at any operation, every checkpoint that has its name is complete, and none that was reported is lost."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("xxhash", reason="needs the whole installation")

from horizon_lm.common.run_folders import checkpoints_in
from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from horizon_lm.runs.checkpoints.manifest import read_manifest, verify
from horizon_lm.runs.checkpoints.saving import Saving
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.ranks import Ranks
from tests.support.checkpointed_training import digest, opened
from tests.support.recorded_disk import ModelDisk, Operation, RecordedDisk, Tree
from tests.support.training_steps import step

MIXES = 8  # random mixes of what is there, after each operation
States = dict[int, dict[str, str]]


def record_run(disk: RecordedDisk, folder: Path) -> States:
    """Write two checkpoints as a run does, keeping one, and return what was in memory at each."""
    model, optimizer = opened()
    config: Any = SimpleNamespace(save_total_limit=1, save_bandwidth=None, overwrite_output_dir=False)
    run_dir: Any = SimpleNamespace(path=folder, disk=disk, ranks=Ranks())
    said: list[str] = []

    def add_files(part: Path) -> None:
        (part / "tokenizer.json").write_text("{}")

    def write(folder: Path, step: int, **options: Any) -> Saving:
        options |= {"state": {"step": step}, "arrays": {"r": torch.ones(2)}, "add_files": add_files}
        return save_checkpoint(folder, model, optimizer, **options)

    run = Keeper(config, run_dir, model, None, write, said.append, requested=lambda: "")
    states = {}
    for number in (1, 2):
        step(model, optimizer, number)
        states[number] = digest(model, optimizer)
        run.save(number)
        run.wait()
        assert said.pop().startswith(f"{folder / f'checkpoint-{number}'}: ")
        disk.note("report", str(number))
    return states


def record_replacements(disk: RecordedDisk, folder: Path) -> States:
    """Write checkpoints into the same folder, and return what was in memory at each."""
    model, optimizer = opened()
    states = {}
    for number in (1, 2):
        step(model, optimizer, number)
        states[number] = digest(model, optimizer)
        save_checkpoint(folder / "checkpoint-0", model, optimizer, disk=disk)
        disk.note("report", str(number))
    return states


def power_cuts(operations: list[Operation], seed: int = 0) -> Iterator[tuple[int, int, Tree]]:
    """Yield what may be on disk after each prefix of the operations, with its length and the last step that was reported."""
    model, reported, pick = ModelDisk(), 0, random.Random(seed)
    for count, operation in enumerate(operations, start=1):
        model.apply(operation)
        if operation.kind == "report":
            reported = int(operation.path)
        yield count, reported, model.after_power_cut(None)
        yield count, reported, model.after_power_cut(None, keeps_names=True)
        for _ in range(MIXES):
            yield count, reported, model.after_power_cut(pick)


def write_tree(folder: Path, tree: Tree) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class Survivor:
    """Finds and loads the newest checkpoint in a folder."""

    def __init__(self, states: States) -> None:
        self._states, self._parts = states, opened()
        self._steps: dict[bytes, int] = {}  # of the checkpoints that were loaded already, by their manifests

    def newest(self, folder: Path) -> int:
        """Return the step of the newest checkpoint, 0 if there is none. All are complete and equal what was in memory."""
        return max((self._step(path) for path in checkpoints_in(folder)), default=0)

    def loaded(self, folder: Path) -> int:
        """Return the step of the checkpoint in a folder that is replaced."""
        with suppress(ConfigError):  # there may be none yet; a damaged one is found below
            load_checkpoint(folder / "checkpoint-0", self._parts[0])
        return self.newest(folder)

    def _step(self, path: Path) -> int:
        manifest = read_manifest(path)
        verify(path, manifest)
        key = (path / "manifest.json").read_bytes()
        if key not in self._steps:
            load_checkpoint(path, *self._parts)
            assert digest(*self._parts) == self._states[manifest.step]
            self._steps[key] = manifest.step
        return self._steps[key]


def replay(operations: list[Operation], folder: Path, newest: Callable[[Path], int]) -> set[int]:
    """Replay all power cuts, and return the steps that were found.

    Raises:
        AssertionError: a step that was reported is lost.
        ConfigError: a checkpoint has its name and is not complete.
    """
    done, found = set(), set()
    for count, reported, tree in power_cuts(operations):
        seen = (reported, *sorted(item for item in tree.items() if not _is_part(item[0])))
        if seen in done:
            continue
        done.add(seen)
        write_tree(folder, tree)
        step_found = newest(folder)
        assert step_found >= reported, f"step {reported} is lost after operation {count}, {operations[count - 1][:3]}"
        found.add(step_found)
    return found


def _is_part(path: str) -> bool:
    """Return whether a file lies in a temporary folder, where nobody looks for a checkpoint."""
    return path.split("/")[0].endswith(".horizon-part")


def test_power_cuts_lose_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    """Each new checkpoint lets the one before be deleted."""
    (root := tmp_path / "run").mkdir()
    disk = RecordedDisk(root)
    survivor = Survivor(record_run(disk, root))
    assert {path.name for path in root.iterdir()} == {"checkpoint-2"}
    assert replay(disk.operations, tmp_path / "cut", survivor.newest) == {0, 1, 2}


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_power_cuts_while_a_checkpoint_is_replaced(tmp_path: Path, exchanges: bool) -> None:
    (root := tmp_path / "run").mkdir()
    disk = RecordedDisk(root, exchanges=exchanges)
    survivor = Survivor(record_replacements(disk, root))
    assert {path.name for path in root.iterdir()} == {"checkpoint-0"}
    assert replay(disk.operations, tmp_path / "cut", survivor.loaded) == {0, 1, 2}


FORGOTTEN = {
    "the manifest": lambda path: path.endswith("manifest.json"),
    "a unit": lambda path: path.endswith("block1.safetensors"),
    "the state": lambda path: path.endswith("training_state.json"),
    "a file of the tokenizer": lambda path: path.endswith("tokenizer.json"),
    "the names of the units": lambda path: path.endswith("/units"),
    "the names in the folder": lambda path: path.endswith(".horizon-part"),
    "the name of the folder": lambda path: path == ".",
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_sync_is_noticed(tmp_path: Path, name: str) -> None:
    """The negative controls: without one of the syncs, a power cut spoils or loses a checkpoint."""
    (root := tmp_path / "run").mkdir()
    disk = RecordedDisk(root, forgets=FORGOTTEN[name])
    survivor = Survivor(record_run(disk, root))
    with pytest.raises((ConfigError, AssertionError), match=r"damaged|missing|no manifest|lost"):
        replay(disk.operations, tmp_path / "cut", survivor.newest)


def test_the_lines_of_a_checkpoint_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut, the metrics go on without a gap."""
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").read_bytes()))
    file = LineFile(tmp_path / "metrics.jsonl")
    assert file.position()["bytes"] == 0
    file.append("one")
    assert file.position()["bytes"] == 4
    assert synced == [b"one\n"]
