"""Trained weights are never given up: each operation of an export fails in turn, once or for good, with each error of a system."""

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("xxhash", reason="needs the whole installation")

import horizon_lm
from horizon_lm.errors import ConfigError, DoesNotFitError, HorizonError, InterruptedRunError
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from horizon_lm.runs.checkpoints.saving import Saving
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import keeping, output_folder, run_dir
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.run_dir import RunDir
from tests.support.checkpointed_training import digest, opened
from tests.support.training_steps import step

ERRORS = [
    errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.EMFILE,
    errno.EFBIG, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT,
]  # fmt: skip
_CALLS = ["open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"]


class FaultySystem:
    """The calls of the system that write below some folders. One of them fails, and later ones with it if it stays so.

    Args:
        folders: the folders.
        at: the number of the call that fails.
        number: the error.
        stays: all later calls fail, too.
    """

    def __init__(self, folders: list[Path], at: int, number: int, stays: bool = False) -> None:
        self._folders, self._at, self._number, self._stays = [*map(str, folders)], at, number, stays
        self._done, self._descriptors = count(), dict[int, str]()
        self.failed = ""

    def reach(self, name: str, path: Any) -> None:
        text = self._descriptors.get(path, "") if isinstance(path, int) else os.fspath(path)
        if not any(str(text).startswith(folder) for folder in self._folders):
            return
        if next(self._done) == self._at or (self.failed and self._stays):
            self.failed = self.failed or f"{name} {text}"
            raise OSError(self._number, os.strerror(self._number), str(text))

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._faulty(name, getattr(os, name)))
            patch.setattr(io, "open", self._opening(io.open))
            patch.setattr("builtins.open", self._opening(open))
            yield

    def _faulty(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, *arguments: Any, **options: Any) -> Any:
            reads = name == "open" and not (arguments[0] if arguments else options["flags"]) & (os.O_WRONLY | os.O_RDWR)
            if not reads:
                self.reach(name, path)
            found = call(path, *arguments, **options)
            if name == "open":
                self._descriptors[found] = os.fspath(path)
            return found

        return run

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and set(mode) & set("wax+"):
                self.reach("open", path)
            return call(path, mode, *arguments, **options)

        return run


def test_a_failed_save_leaves_nothing_once_another_has_succeeded(tmp_path: Path) -> None:
    """Each call of the system fails once. A folder of transformers' files is left then, which the next save removes."""
    model, _ = opened()
    for at in count():
        folder = tmp_path / str(at)
        system, error = FaultySystem([folder], at, errno.EIO), ""
        with system.active():
            try:
                model.save_pretrained(folder)
            except OSError as found:
                error = str(found)
        if not system.failed:
            break
        assert not error or "Errno 5" in error, error
        model.save_pretrained(folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "generation_config.json",
            "model.safetensors",
        ]
    assert at > 10


class Tokenizer:
    """Writes two files, as a tokenizer does; one of them raises the errors of its library, which have no number."""

    def save_pretrained(self, folder: Path) -> None:
        with open(folder / "tokenizer_config.json", "w") as file:
            file.write("{}")
        try:
            with open(folder / "tokenizer.json", "w") as file:
                file.write("{}")
        except OSError as error:
            raise Exception(f"{error.strerror} (os error {error.errno})") from None  # as the tokenizers library


class Run:
    """A finished training, whose model must be written."""

    model: Any = None
    optimizer: Any = None  # one training for all tests

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, patience: float = 0.0) -> None:
        patch.setattr(keeping, "_RETRY_SECONDS", 0.0)
        patch.setattr(keeping, "_PATIENCE_SECONDS", patience)
        if Run.model is None:
            Run.model, Run.optimizer = opened()
            step(Run.model, Run.optimizer, 0)
        self.weights = {name: value.clone() for name, value in horizon_lm.named_weights(self.model)}
        self.output, self.second = folder / "output" / "run", folder / "second"
        self.second.mkdir(parents=True, exist_ok=True)
        self.said: list[str] = []
        self.take()

    def take(self, **settings: Any) -> None:
        """Take the folder of the run."""
        given = {"model_name_or_path": "m", "datasets": "d", "output_dir": str(self.output), **settings}
        self.run_dir = RunDir(as_config(given))
        self.run_dir.take()
        self.run_dir.second_place = self.second
        self.keeper = Keeper(
            as_config(given), self.run_dir, self.model, Tokenizer(), self.write_checkpoint, self.said.append,
            requested=lambda: "SIGTERM" if next(self.looked) >= self.polls else "",
        )  # fmt: skip

    @property
    def checkpoint(self) -> Path | None:
        return self.keeper.last

    def write_checkpoint(self, folder: Path, step: int, **options: Any) -> Saving:
        return save_checkpoint(folder, self.model, self.optimizer, **options)

    def export(self, polls: int = 3) -> None:
        """Export. A signal arrives when the run has looked for one so often."""
        self.looked, self.polls = count(), polls
        self.keeper.export(1)

    def require_model(self, place: Path) -> None:
        """Assert that a folder has the whole model, and nothing half-written lies beside it."""
        names = {path.name for path in place.iterdir() if ".horizon-left-" not in path.name}  # what cannot be removed
        assert names == {
            "model.safetensors",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        found = load_file(place / "model.safetensors")
        assert found.keys() == self.weights.keys()
        assert all(torch.equal(found[name], value) for name, value in self.weights.items())

    def require_usable(self) -> None:
        """Assert that the weights in memory are whole, and that the training could go on."""
        assert all(torch.equal(self.weights[name], value) for name, value in horizon_lm.named_weights(self.model))
        step(self.model, self.optimizer, 1)


def each_operation(every: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the number of an operation and an error, until an export has fewer operations."""
    for at in count(step=every):
        yield at, ERRORS[at % len(ERRORS)]


def test_an_operation_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[str] = set()
    for at, number in each_operation():
        run = Run(tmp_path / str(at), monkeypatch, patience=100.0)
        system = FaultySystem([run.output], at, number)
        with system.active():
            run.export()
        run.require_model(run.output / "model")
        assert run.keeper.model_dir == run.output / "model"
        assert not list(run.second.iterdir())
        if not system.failed:
            break
        kinds.add(system.failed.split()[0])
        # Nothing is said about what costs nothing, such as a leftover that cannot be removed.
        assert all("is kept in memory, and written as soon as that is possible" in line for line in run.said)
    assert kinds >= {"open", "write", "fsync", "mkdir", "rename", "replace"} - {"rename"}
    assert at > 20


@pytest.mark.parametrize(
    "number",
    [pytest.param(each, marks=[] if each in (errno.EPERM, errno.ENOSPC) else pytest.mark.slow) for each in ERRORS],
    ids=errno.errorcode.get,
)
def test_a_folder_that_stays_broken_is_replaced_by_the_second_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for at in count(step=3):
        run = Run(tmp_path / str(at), monkeypatch)
        system = FaultySystem([run.output], at, number, stays=True)
        with system.active():
            run.export()
        run.require_model(run.keeper.model_dir)
        if not system.failed:
            break
        if run.keeper.model_dir == run.output / "model":  # the failure was one that costs nothing
            continue
        assert run.keeper.model_dir == run.second / "run-model"
        assert f"The trained model is in {run.second / 'run-model'} instead" in run.said[-1]
        full = f"output_dir: no space is left for {run.output} ("
        large = f"output_dir: {run.output} takes no file of this size ("
        other = f"output_dir: {run.output} cannot be written to ("
        assert run.said[0].startswith({errno.ENOSPC: full, errno.EDQUOT: full, errno.EFBIG: large}.get(number, other))


@pytest.mark.parametrize("second_fails_at", [0, 7, 25])
def test_both_places_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_fails_at: int) -> None:
    """It waits until a signal, and leaves a checkpoint or says that nothing is left. The weights in memory are whole."""
    codes = set()
    for at, number in each_operation(every=6):
        run = Run(tmp_path / f"{at}", monkeypatch)
        first = FaultySystem([run.output], at, number, stays=True)
        second = FaultySystem([run.second], second_fails_at, number, stays=second_fails_at == 0)
        error: HorizonError | None = None
        with ExitStack() as active:
            active.enter_context(first.active())
            active.enter_context(second.active())
            try:
                run.export()
            except (ConfigError, DoesNotFitError, InterruptedRunError) as found:
                error = found
        if error is None:
            run.require_model(run.keeper.model_dir)
        elif run.checkpoint is not None:
            assert isinstance(error, InterruptedRunError)
            assert f"Kept: {run.checkpoint}. Run the same command again" in str(error)
            before = digest(run.model, run.optimizer)
            load_checkpoint(run.checkpoint, run.model, run.optimizer)
            assert digest(run.model, run.optimizer) == before
        else:
            assert error.exit_code in (2, 3)
            assert "interrupted by SIGTERM while the trained model could not be written" in str(error)
            assert "The trained weights are lost." in str(error)
        codes.add(error.exit_code if error else 0)
        run.require_usable()
        if not first.failed:
            break
    assert codes >= ({0, 2} if second_fails_at == 0 else {0})


def test_it_waits_and_repeats_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second place and a checkpoint it does not end by itself; when the folder is back, the model is there."""
    run = Run(tmp_path, monkeypatch)
    monkeypatch.setattr(keeping, "_REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(run.keeper, "save_somewhere", lambda step: None)
    run.run_dir.second_place = None
    system = FaultySystem([run.output], 0, errno.EROFS, stays=True)
    tries, agree = count(), Ranks.agree

    def until_it_is_repaired(self: Ranks, place: str, value: str) -> str:
        if next(tries) == 20:
            system._stays = False
        return agree(self, place, value)

    monkeypatch.setattr(Ranks, "agree", until_it_is_repaired)
    with system.active():
        run.export(polls=10**9)
    run.require_model(run.output / "model")
    repeated = [line for line in run.said if line.startswith("output_dir: ")]
    assert len(repeated) > 15
    assert "Read-only file system" in repeated[0]
    assert "make the folder writable, or make room" in repeated[0]


def test_with_a_checkpoint_it_does_not_wait_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    monkeypatch.setattr(keeping, "_SAVED_SECONDS", 0.0)
    run.run_dir.second_place = None
    system = FaultySystem([run.output / ".model", run.output / "model"], 0, errno.EPERM, stays=True)
    with (
        system.active(),
        pytest.raises(ConfigError, match=r"Operation not permitted\)\. Kept: .*checkpoint-1\. Run the same"),
    ):
        run.export(polls=10**9)
    load_checkpoint(run.output / "checkpoint-1", run.model, run.optimizer)


@pytest.mark.parametrize("how", ["folder", "file", "link", "empty", "removed"])
def test_what_appears_in_the_folder_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = Run(tmp_path, monkeypatch)
    target = run.output / "model"
    if how == "removed":
        for path in sorted(run.output.rglob("*"), reverse=True):
            path.unlink()
        run.output.rmdir()
    elif how == "file":
        target.write_text("mine")
    elif how == "link":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "file").write_text("mine")
        target.symlink_to(tmp_path / "mine")
    else:
        target.mkdir()
        if how == "folder":
            (target / "file").write_text("mine")
    run.export()
    run.require_model(target)
    kept = [path for path in run.output.iterdir() if path.name.startswith("model.")]
    if how in ("removed", "empty"):
        assert all(not list(path.iterdir()) for path in kept)
        return
    (aside,) = kept
    assert (aside if how == "file" else aside / "file").read_text() == "mine"
    assert any(f"is not of this run, and is now {aside}" in line for line in run.said)


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_to_be_overwritten_is_deleted_only_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    run = Run(tmp_path, monkeypatch)
    run.export()
    run.run_dir.__exit__()
    (run.output / "config.yaml").write_text("# horizon-lm\n")
    for module in (run_dir, output_folder):
        monkeypatch.setattr(module, "holds_a_run", lambda folder: True)
    run.take(overwrite_output_dir=True)
    if changed:
        (run.output / "model" / "notes.txt").write_text("mine")
    run.export()
    run.require_model(run.output / "model")
    kept = list(run.output.glob("model.*"))
    assert len(kept) == changed
    assert all((each / "notes.txt").read_text() == "mine" for each in kept)


def test_an_error_that_no_waiting_cures_ends_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, patience=100.0)

    def fail(*arguments: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Tokenizer, "save_pretrained", fail)
    with pytest.raises(KeyError, match="a bug") as found:
        run.export(polls=10**9)
    assert f"Kept: {run.output / 'checkpoint-1'}" in found.value.__notes__[0]
    load_checkpoint(run.output / "checkpoint-1", run.model, run.optimizer)


def test_a_folder_that_is_no_checkpoint_is_kept_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "file").write_text("mine")
    with pytest.warns(RuntimeWarning, match="ckpt was no checkpoint, and is now"):
        save_checkpoint(tmp_path / "ckpt", run.model, run.optimizer).wait()
    save_checkpoint(tmp_path / "ckpt", run.model, run.optimizer)
    (aside,) = tmp_path.glob("ckpt.*")
    assert (aside / "file").read_text() == "mine"
    load_checkpoint(tmp_path / "ckpt", run.model, run.optimizer)


# The second place


def test_the_second_place_is_checked_before_the_training(tmp_path: Path) -> None:
    def find(num_bytes: int = 100, **settings: Any) -> Path | None:
        """Return the place of a model that cannot be written into the folder of its run."""
        given = {"model_name_or_path": "m", "datasets": "d", "output_dir": str(tmp_path / "run"), **settings}
        with RunDir(as_config(given)) as run_dir:
            run_dir.take(num_bytes)
            keeper = Keeper(as_config(given), run_dir, None, None, save_checkpoint, print, requested=lambda: "")
            return keeper._write_elsewhere("model", lambda place: None)

    assert find() is not None
    assert find(num_bytes=2**60) is None
    chosen = {"fallback_dir": str(tmp_path / "new" / "place")}
    assert find(**chosen) == tmp_path / "new" / "place" / "run-model"
    (tmp_path / "new" / "place" / "run-model").mkdir()
    assert find(**chosen) == tmp_path / "new" / "place" / "run-model-1"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"fallback_dir: .*file is a file"):
        find(fallback_dir=str(tmp_path / "file"))
    with pytest.raises(DoesNotFitError, match=r"fallback_dir: .* of free space, and the exported model takes"):
        find(num_bytes=2**60, fallback_dir=str(tmp_path))


# Exports of other code


def test_save_pretrained_that_fails_leaves_the_model_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script gets the error; its model is whole, and can be saved elsewhere."""
    run, pick = Run(tmp_path, monkeypatch), random.Random(0)
    for at in count():
        system = FaultySystem([tmp_path / "script"], at, pick.choice(ERRORS))
        with system.active():
            try:
                run.model.save_pretrained(tmp_path / "script" / str(at))
            except OSError:
                assert system.failed
        if not system.failed:
            break
        run.model.save_pretrained(tmp_path / "elsewhere")
        found = load_file(tmp_path / "elsewhere" / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in run.weights.items())
        assert run.model.config.dtype != "float32"
    assert at > 12
    run.require_usable()


def test_save_pretrained_deletes_only_what_it_would_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a model that was cut otherwise would be read with it; those of other names are the user's."""
    run = Run(tmp_path, monkeypatch)
    stale = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    mine = ["model_before.safetensors", "model-old.safetensors", "models.safetensors", "model.ema.safetensors"]
    for name in stale + mine:
        (tmp_path / name).write_text(name)
    run.model.save_pretrained(tmp_path)
    assert all((tmp_path / name).read_text() == name for name in mine)
    assert not any((tmp_path / name).exists() for name in stale)
