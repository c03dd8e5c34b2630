"""The folder of a run: what a full disk, a kill or a leftover does to it, and side outputs that fail."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, TrainerCallback

import horizon_lm
from horizon_lm.common import disk
from horizon_lm.common.run_folders import checkpoints_in, is_checkpoint
from horizon_lm.errors import ConfigError, DataError, DoesNotFitError
from horizon_lm.runs.checkpoints.manifest import read_manifest, verify
from horizon_lm.runs.checkpoints.new_folder import unwritable
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training import callbacks as run_callbacks
from horizon_lm.runs.training import keeping, saver, train
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.samples import SamplePrompts
from horizon_lm.runs.training.tracing import Tracing
from tests.e2e import tiny
from tests.e2e.processes import RunProcess
from tests.support.thinned_cases import thinned

QUIET: dict[str, Any] = {"print_fn": lambda text: None}
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def base(tmp_path: Path, model: Path) -> dict[str, Any]:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(12))
    return {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(tmp_path / "run"), "device": "cpu",
        "per_device_train_batch_size": 4, "logging_steps": 1, "max_steps": 2,
    }  # fmt: skip


def folder_of(base: dict[str, Any]) -> Path:
    return Path(base["output_dir"])


def has_model(folder: Path) -> bool:
    return bool(load_file(folder / "model" / "model.safetensors")) and (folder / "model" / "tokenizer.json").is_file()


# A folder that has other files


@pytest.mark.parametrize("output", [".", "rows", "rows/run", "base"])
def test_the_folder_of_inputs_is_left_alone(base: dict[str, Any], tmp_path: Path, model: Path, output: str) -> None:
    """A run in it would read its own files as rows the next time, or write beside the weights that it starts from."""
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "rows").mkdir()
    tiny.write_jsonl(tmp_path / "rows" / "a.jsonl", tiny.alpaca_rows(4))
    base |= {"datasets": [base["datasets"], str(tmp_path / "rows")], "model_name_or_path": str(tmp_path / "base")}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"output_dir: .* is (a folder of the rows in|the folder of the model)"):
        train.train(base | {"output_dir": str(tmp_path / output)}, **QUIET)
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_are_opened_before_a_model_is_downloaded(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="no rows found"):
        train.train(base | {"model_name_or_path": "HuggingFaceTB/SmolLM2-135M"}, **QUIET)


# A full disk


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make exports fail, as often as the number in the list says, after half of the weights."""
    left = [10**9]
    write = disk.OutputFile.write

    def write_half(file: Any, data: Any) -> None:
        if left[0] and memoryview(data).nbytes > 20_000:
            left[0] -= 1
            write(file, memoryview(data)[:5000])
            raise FULL
        write(file, data)

    monkeypatch.setattr(disk.OutputFile, "write", write_half)
    monkeypatch.setattr(keeping, "_RETRY_SECONDS", 0.0)
    return left


def until_it_waits(said: list[str]) -> Callable[[str], None]:
    """Return a function that keeps lines and, like a user or a queue that has waited enough, sends SIGTERM to a run that waits."""

    def say(line: str) -> None:
        said.append(line)
        if "is kept in memory" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    return say


def test_a_full_disk_at_the_export(base: dict[str, Any], full_disk: list[int]) -> None:
    """Nothing can be written anywhere: the run waits until a signal, and says what is lost."""
    said: list[str] = []
    lost = r"interrupted by SIGTERM while .* no space is left .* make room; .* are free\. The trained weights are lost\. Kept: "
    with pytest.raises(DoesNotFitError, match=lost):
        horizon_lm.train(base, print_fn=until_it_waits(said))
    assert any("the second place: no space is left for" in line for line in said)
    assert sorted(path.name for path in folder_of(base).iterdir()) == ["config.yaml", "metrics.jsonl", "plan.json"]


def test_the_size_of_a_model_that_does_not_fit_is_said(tmp_path: Path) -> None:
    """Where there is room for it, another limit holds, such as a quota."""
    for num_bytes, said in (
        (2**60, r"the exported model takes 1048576.00 TiB; .* are free"),
        (1, "make room; .* are free"),
    ):
        assert re.search(said, str(unwritable("output_dir", tmp_path, FULL, num_bytes)))


def test_a_full_disk_keeps_the_model_of_an_earlier_run(base: dict[str, Any], full_disk: list[int]) -> None:
    full_disk[0] = 0
    horizon_lm.train(base, **QUIET)
    full_disk[0] = 10**9
    with pytest.raises(DoesNotFitError):
        horizon_lm.train({**base, "overwrite_output_dir": True}, print_fn=until_it_waits([]))
    assert has_model(folder_of(base))


def test_room_made_on_a_full_disk_is_used(base: dict[str, Any], full_disk: list[int]) -> None:
    full_disk[0] = 2
    said: list[str] = []
    horizon_lm.train(base, print_fn=said.append)
    assert sum("no space is left" in line and "written as soon as that is possible" in line for line in said) == 1
    assert has_model(folder_of(base))


def test_a_tokenizer_on_a_full_disk(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, full_disk: list[int]
) -> None:
    """The library that writes it raises an error of its own, without a number."""
    full_disk[0] = 0
    left, save = [2], PreTrainedTokenizerBase.save_pretrained

    def fail(self: Any, folder: Any, *arguments: Any, **options: Any) -> Any:
        if left[0] and "model" in Path(folder).name:
            left[0] -= 1
            raise Exception("No space left on device (os error 28)")
        return save(self, folder, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", fail)
    said: list[str] = []
    horizon_lm.train(base, print_fn=said.append)
    assert sum("output_dir: no space is left for" in line for line in said) == 1
    assert has_model(folder_of(base))


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EPERM, "No"), OSError(errno.EROFS, "No")], ids=["EPERM", "EROFS"]
)
def test_a_folder_that_cannot_be_written_to_any_more(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[int], error: OSError
) -> None:
    """The model goes to the second place, which the last lines name."""
    full_disk[0], create = 0, disk.Disk.create
    monkeypatch.setattr(keeping, "_PATIENCE_SECONDS", 0.0)

    def fail(self: Any, path: Path, **options: Any) -> Any:
        if folder_of(base) in path.parents and "model" in str(path.relative_to(folder_of(base))):
            raise error
        return create(self, path, **options)

    monkeypatch.setattr(disk.Disk, "create", fail)
    said: list[str] = []
    result = horizon_lm.train({**base, "fallback_dir": str(tmp_path / "second")}, print_fn=said.append)
    assert result.model_dir == tmp_path / "second" / "run-model"
    assert (result.model_dir / "tokenizer.json").is_file()
    assert load_file(result.model_dir / "model.safetensors")
    assert f"The trained model is in {result.model_dir}. Try it:" in said[-1]


def test_a_model_that_appears_meanwhile_is_kept(base: dict[str, Any]) -> None:
    class Stranger(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            (folder_of(base) / "model").mkdir(exist_ok=True)
            (folder_of(base) / "model" / "file").write_text("mine")

    said: list[str] = []
    horizon_lm.train(base, callbacks=[Stranger()], print_fn=said.append)
    assert has_model(folder_of(base))
    (aside,) = folder_of(base).glob("model.*")
    assert (aside / "file").read_text() == "mine"
    assert f"{folder_of(base) / 'model'} is not of this run, and is now {aside}" in said


def test_an_interrupted_wait_leaves_a_checkpoint(base: dict[str, Any], tmp_path: Path) -> None:
    """The process ends with 75, as its message says; the same command goes on from there and exports what was trained."""
    setup = """
from pathlib import Path
from horizon_lm.common.disk import Disk
from horizon_lm.runs.training import run_dir
make, run_dir.find_second_place = Disk.make_folder, lambda config, num_bytes: None
def fail(self, path):
    if path.name == ".model.horizon-part":
        raise PermissionError(1, "Operation not permitted")
    make(self, path)
Disk.make_folder = fail
"""
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in base.items()))
    with RunProcess(path, setup=setup) as run:
        run.wait_for("run cannot be written to (Operation not permitted). The trained model is kept in memory")
        run.send(signal.SIGTERM)
        assert run.end() == 75
    kept = folder_of(base) / "checkpoint-2"
    assert f"(Operation not permitted). Kept: {kept}. Run the same command again to go on from there" in run.stderr
    verify(kept, read_manifest(kept))
    said: list[str] = []
    horizon_lm.train(base, print_fn=said.append)
    assert any("resume: from" in line for line in said)
    horizon_lm.train({**base, "output_dir": str(tmp_path / "other")}, **QUIET)
    models = [each / "model" / "model.safetensors" for each in (folder_of(base), tmp_path / "other")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_callback_that_fails_where_no_checkpoint_can_be_written(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            raise RuntimeError("of the user")

    monkeypatch.setattr(saver, "save_checkpoint", broken)
    with pytest.raises(RuntimeError, match="of the user") as found:
        horizon_lm.train(base, callbacks=[Failing()], **QUIET)
    assert f"The trained model is in {folder_of(base) / 'model'}" in "".join(found.value.__notes__)
    assert has_model(folder_of(base))


def test_a_full_disk_at_a_checkpoint_lets_the_run_go_on(base: dict[str, Any], full_disk: list[int]) -> None:
    full_disk[0] = 1
    said: list[str] = []
    horizon_lm.train({**base, "save_strategy": "steps", "save_steps": 1}, print_fn=said.append)
    assert any("the checkpoint of step 1 was not written ([Errno 28] No space left on device)" in line for line in said)
    assert has_model(folder_of(base))
    assert sorted(path.name for path in folder_of(base).glob("*checkpoint*")) == []


def test_a_limit_on_the_size_of_files(base: dict[str, Any], tmp_path: Path) -> None:
    """A real process that cannot write more than 40 kB to a file waits, is not killed by SIGXFSZ, and leaves no partial file."""
    setup = f"""
import re
import resource
from horizon_lm.runs.training.keeping import Keeper
export = Keeper.export
def limited(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, {resource.RLIM_INFINITY}))
    export(*arguments)
Keeper.export = limited
"""
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in base.items()))
    with RunProcess(path, setup=setup) as run:
        run.wait_for("raise the limit: ulimit -f unlimited. The trained model is kept in memory")
        run.send(signal.SIGTERM)
        assert run.end() == 3
    assert "error: interrupted by SIGTERM while the trained model could not be written. output_dir: " in run.stderr
    assert not list(folder_of(base).glob(".*"))
    assert not list(folder_of(base).glob("model*"))


@pytest.mark.parametrize(("limit", "name"), [(8192, "the exported model"), (100_000, "a checkpoint")])
def test_a_limit_on_the_size_of_files_is_found_before_the_training(base: dict[str, Any], limit: int, name: str) -> None:
    """The files of a checkpoint have fewer weights, but moments, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(
            DoesNotFitError, match=rf"A file may have at most .* \(ulimit -f\), and {name} needs one of"
        ):
            horizon_lm.train({**base, "save_steps": 1, "export_dtype": "bfloat16"}, **QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not folder_of(base).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a file system of 16 MiB."""
    (folder := tmp_path / "disk").mkdir()
    options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Filler:
    """Lets no file be written: another process fills the disk, or the limit on the size of files is reached."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.limits = path, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if self.path is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, self.limits[1]))
            return
        with suppress(OSError), self.path.open("wb", buffering=0) as file:
            while file.write(bytes(5000)):
                pass

    def make_room(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@pytest.mark.parametrize("how", thinned(["limit", "small_disk"], every=2))
def test_a_disk_that_is_full_for_some_steps(
    base: dict[str, Any], tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """The checkpoints of these steps are not written, the last good one is intact, and the training is the same."""
    base |= {"max_steps": 6, "save_steps": 1, "save_total_limit": 1}
    disk = request.getfixturevalue(how) if how == "small_disk" else tmp_path
    folder, filler = disk / "full", Filler(disk / "filler" if how == "small_disk" else None)
    failed: list[str] = []

    def say(line: str) -> None:
        """Fill the disk before the checkpoint of step 3 is begun, and make room before that of step 5."""
        if line.startswith(f"{folder / 'checkpoint-2'}: "):
            filler.fill()
        elif "was not written" in line:
            failed.append(line)
            (kept,) = checkpoints_in(folder)
            assert kept.name == "checkpoint-2"
            verify(kept, read_manifest(kept))
        if len(failed) == 2:
            filler.make_room()

    try:
        horizon_lm.train({**base, "output_dir": str(folder)}, print_fn=say)
    finally:
        filler.make_room()
    for number, line in zip((3, 4), failed, strict=True):
        assert line.startswith(f"warning: the checkpoint of step {number} was not written (")
        assert line.endswith(f"; the last one is {folder / 'checkpoint-2'}")
    assert [path.name for path in folder.glob("*checkpoint*")] == ["checkpoint-5"]
    horizon_lm.train(base, **QUIET)
    models = [each / "model" / "model.safetensors" for each in (folder, folder_of(base))]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert (folder / "metrics.jsonl").read_text().count("\n") == 6


# Kills and leftovers


def test_a_kill_between_two_renames_loses_no_model(base: dict[str, Any]) -> None:
    """Where folders cannot be exchanged, the old model has another name for a moment."""
    horizon_lm.train(base, **QUIET)
    folder = folder_of(base)
    (folder / "model").rename(folder / ".model.horizon-old")
    with pytest.raises(ConfigError, match="holds a finished run"):
        horizon_lm.train(base, **QUIET)
    assert has_model(folder)


def test_leftovers_that_cannot_be_removed(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    horizon_lm.train(base, **QUIET)
    folder = folder_of(base)
    before = (folder / "model" / "model.safetensors").read_bytes()
    for name in (".model.horizon-part", ".model.horizon-old"):
        (folder / name).mkdir()
        (folder / name / "foreign").touch()

    def fail(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", fail)
    horizon_lm.train({**base, "overwrite_output_dir": True, "learning_rate": 1e-2}, **QUIET)
    assert has_model(folder)
    assert (folder / "model" / "model.safetensors").read_bytes() != before


def test_folders_of_the_user_are_kept(base: dict[str, Any]) -> None:
    folder = folder_of(base)
    for name in (".model.part", ".model.old"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine").touch()
    for _ in range(2):
        horizon_lm.train({**base, "overwrite_output_dir": True}, **QUIET)
    assert all((folder / name / "mine").is_file() for name in (".model.part", ".model.old"))


def test_everything_exported_is_on_disk_before_it_gets_its_name(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the end finds every file of the model complete."""
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda number: synced.add(os.readlink(f"/proc/self/fd/{number}")))
    config = as_config(base)

    class Recording(disk.Disk):
        def rename(self, source: Path, target: Path) -> None:
            if target == folder_of(base) / "model":
                files = [str(path) for path in source.rglob("*")]
                assert {"config.json", "tokenizer.json"} <= {Path(name).name for name in files}
                self.unsynced = {*files, str(source)} - synced
                synced.clear()
            super().rename(source, target)

    recording = Recording()
    monkeypatch.setattr(train, "RunDir", lambda config, ranks, resumes: RunDir(config, ranks, resumes, recording))
    horizon_lm.train(config, **QUIET)
    assert recording.unsynced == set()
    assert str(folder_of(base)) in synced  # the name, afterwards


def test_files_of_an_earlier_run_are_kept_until_the_model_is_loaded(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    horizon_lm.train({**base, "sample_prompts": ["Why?"], "sample_steps": 1, "sample_max_new_tokens": 1}, **QUIET)
    folder = folder_of(base)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("horizon_lm.runs.training.setup.load_model", fail)
    with pytest.raises(MemoryError):
        horizon_lm.train({**base, "overwrite_output_dir": True, "learning_rate": 1e-3}, **QUIET)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_two_runs_that_begin_at_the_same_time(base: dict[str, Any]) -> None:
    """Both find an empty folder, and one of them takes it."""
    first, second = RunDir(as_config(base)), RunDir(as_config(base))
    with first, second:
        first.take()
        with pytest.raises(ConfigError, match=rf"another run is writing into .*\(process {os.getpid()} on "):
            second.take()
    with first:
        first.take()  # free again
    assert not list(folder_of(base).iterdir())


# Side outputs


def broken(*arguments: Any, **options: Any) -> Any:
    raise FULL


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (LineFile, "flush", "metrics.jsonl failed"),
        (SamplePrompts, "answer", "answering sample_prompts failed"),
        (Tracing, "_end_step", "trace.json failed"),
        (RunDir, "append_samples", "answering sample_prompts failed"),
        (RunDir, "draw_loss", "loss.png failed"),
        (Keeper, "save", "saving checkpoint-1 failed"),
        (saver, "save_checkpoint", "the checkpoint of step 1 was not written"),
    ],
)
def test_a_failing_output_does_not_end_the_run(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, message: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    said: list[str] = []
    settings = {
        "sample_prompts": ["Why?"],
        "sample_max_new_tokens": 1,
        "sample_steps": 1,
        "trace_steps": 1,
        "save_steps": 1,
    }
    horizon_lm.train({**base, **settings}, print_fn=said.append)
    assert sum(message in line for line in said) == 1
    assert has_model(folder_of(base))


def test_a_failing_print_does_not_end_the_run(base: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    horizon_lm.train(base, print_fn=broken)
    assert capsys.readouterr().err.count("warning: printing failed ([Errno 28] No space left on device)") == 1
    assert has_model(folder_of(base))


class Faulty(TrainerCallback):
    """A callback that raises at an event."""

    def __init__(self, event: str, error: BaseException) -> None:
        self.calls = 0
        self.error = error
        setattr(self, event, self.fail)

    def fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("event", ["on_train_begin", "on_log", "on_step_end", "on_train_end"])
def test_a_tracker_that_fails_gets_no_more_calls(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    tracker = Faulty(event, RuntimeError("no network"))
    monkeypatch.setattr(run_callbacks, "open_trackers", lambda report_to: [tracker])
    said: list[str] = []
    assert horizon_lm.train(base, print_fn=said.append).num_steps == 2
    assert tracker.calls == 1
    assert sum("report_to: Faulty failed and gets no more metrics (no network)" in line for line in said) == 1


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3)])
def test_an_error_of_a_callback_is_raised_once_the_weights_are_safe(base: dict[str, Any], error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        horizon_lm.train({**base, "max_steps": 5}, callbacks=[Faulty("on_step_end", error)], **QUIET)
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("The training ended after step 1 of 5. Kept: ")
    assert is_checkpoint(folder_of(base) / "checkpoint-1")
    assert not (folder_of(base) / "model").exists()


def test_an_error_after_the_last_step_is_raised_after_the_export(base: dict[str, Any]) -> None:
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"):
        horizon_lm.train(base, callbacks=[Faulty("on_train_end", error)], **QUIET)
    assert error.__notes__ == [
        f"The training ended after step 2 of 2. The trained model is in {folder_of(base) / 'model'}"
    ]
    assert has_model(folder_of(base))


@pytest.mark.parametrize(
    ("setup", "warning"),
    [
        pytest.param("import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)", "Broken pipe", id="closed pipe"),
        pytest.param("import os; os.close(1)", "Bad file descriptor", id="closed", marks=pytest.mark.slow),
        pytest.param("import sys; sys.stdout = None", "", id="closed before the start", marks=pytest.mark.slow),
        pytest.param("import sys; sys.stdout.reconfigure(encoding='ascii')", "", id="ASCII"),
    ],
)
def test_standard_output_that_cannot_be_written(base: dict[str, Any], tmp_path: Path, setup: str, warning: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in base.items()))
    with RunProcess(path, "--output_dir", tmp_path / "é", setup=setup) as run:
        assert run.end() == 0, run.stderr
    assert has_model(tmp_path / "é")
    assert "Traceback" not in run.stderr
    assert run.stderr.count("warning: printing failed") == bool(warning)
    assert warning in run.stderr
    if "ascii" in setup:
        assert f"run folder: {tmp_path}/\\xe9\n" in run.stdout


def test_the_exit_code_does_not_depend_on_standard_output(base: dict[str, Any], tmp_path: Path) -> None:
    """Python itself exits with 120 if it cannot write what was printed."""
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in base.items()))
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "horizon_lm.cli", "train", str(path)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("warning: printing failed ([Errno 28] No space left on device)") == 1


def test_a_line_file_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that a full disk takes half of are written when there is room, and readers see whole lines only."""
    file, write = LineFile(tmp_path / "lines"), os.write

    def half(number: int, data: Any) -> int:
        if len(data) < 3:
            raise FULL
        return write(number, data[:2])

    file.append("one")
    monkeypatch.setattr(os, "write", half)
    for line in ("two", "three"):
        with pytest.raises(OSError, match="No space"):
            file.append(line)
    assert file.path.read_text() == "one\n"
    assert file.num_waiting == 2
    monkeypatch.undo()
    file.append("four")
    assert file.path.read_text() == "one\ntwo\nthree\nfour\n"
    assert file.num_waiting == 0
