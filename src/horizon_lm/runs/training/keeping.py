"""Keep what a run has trained, whatever fails: attempt to write it, report a failure, write it elsewhere, give up."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import free_path, is_of_system
from horizon_lm.common.quantities import format_bytes, format_seconds
from horizon_lm.errors import (
    ConfigError,
    DisagreementError,
    DoesNotFitError,
    InterruptedRunError,
    RankLostError,
    first_line,
)
from horizon_lm.runs.checkpoints.saving import RateLimit, Saving
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.vision import Vision
from horizon_lm.runs.training.exported_model import write_model
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.run_state import ResumePoint
from horizon_lm.runs.training.step_folders import StepFolders, checkpoints_of, load_weights

_PATIENCE_SECONDS = 30.0  # until an export uses the second place
_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.2  # for a signal
_REPEAT_SECONDS = 600.0  # until the problem is reported again
_SAVED_SECONDS = 600.0  # to wait for the folder although a checkpoint has the weights


@dataclass
class Keeper:
    """Writes the checkpoints and the models of a run, and decides what happens if that fails: attempt, report, elsewhere, give up.

    - `save` writes a checkpoint in the background. A failure is reported, and the run goes on.
    - `save_somewhere` writes one in the run's folder or, if that fails, in the second place.
    - `load_best` gives up the best model if the last one cannot be kept beside it.
    - `export_step` writes a model after a step, in the run's folder alone.
    - `export` tries the run's folder again and again, and reports the problem and the remedy. After half a minute, or when a signal
      arrives, it tries the second place, and then to leave a checkpoint in either. With neither, it waits until a signal arrives.

    All ranks call these together. The first one decides and prints; it alone has the lists of what is written.

    Args:
        config: settings of the run.
        run_dir: its folder, which knows the second place.
        model, tokenizer, vision: the contents of an exported model.
        write_checkpoint: writes the checkpoint of a step, given a folder, the step and options of `save_checkpoint`.
        report: prints a line for people.
        requested: returns the name of the signal that has arrived; empty if there was none.
        point: the checkpoint that the run goes on from; None for a new run.

    Attributes:
        checkpoints, exports: the checkpoints in the run's folder, and the models that `export_step` has written there.
        model_dir: the folder of the trained model; `export` changes it if the model goes to the second place.
        is_exported: the trained model is there.
        seconds: the time that the last checkpoint took, which the next one will take; None if none was written yet.
    """

    config: RunConfig
    run_dir: RunDir
    model: Any
    tokenizer: Any
    write_checkpoint: Callable[..., Saving]
    report: Callable[[str], None]
    requested: Callable[[], str]
    point: ResumePoint | None = None
    vision: Vision | None = None

    def __post_init__(self) -> None:
        self.exports = StepFolders(self.run_dir, self.config.save_total_limit)
        self.checkpoints = checkpoints_of(self.config, self.run_dir, self.point, self.report)
        self.model_dir, self.is_exported = self.run_dir.path / "model", False
        self.seconds: float | None = None
        self._ranks, self._rate_limit = self.run_dir.ranks, RateLimit(self.config.save_bandwidth)
        self._running: tuple[int, Saving] | None = None
        self._saved: Path | None = None  # the checkpoint that `save_somewhere` has written

    def save(self, step: int, best: bool = False) -> None:
        """Begin to write the checkpoint of a step, unless it is written already. First wait until the one before is on disk."""
        self.wait()
        folder = self.checkpoints.path(step)
        if self._is_written(self.checkpoints, folder):
            self.checkpoints.best = folder if best else self.checkpoints.best
            return
        published = partial(self.checkpoints.add, folder, is_best=best)
        try:
            with self._ranks.failing_with_first("the folder of a checkpoint"):
                if self._ranks.is_first and folder.exists():
                    self.checkpoints.set_aside(folder, self.report)
            saving = self.write_checkpoint(
                folder, step, published=published, wait=False, rate_limit=self._rate_limit, disk=self.run_dir.disk
            )
            self._running = step, saving  # whose end or failure `report_saved` prints
        except Exception as error:  # of the disk, or of a tokenizer's writer
            self._report_unsaved(step, error)

    def report_saved(self) -> None:
        """Print a line about a checkpoint that was written, or could not be, since the last call."""
        if self._running is None or not self._running[1].done:
            return
        (step, saving), self._running = self._running, None
        if saving.error is not None:
            self._report_unsaved(step, saving.error)
            return
        self.seconds = saving.seconds
        self.report(f"{saving.folder}: {format_bytes(saving.num_bytes)} in {format_seconds(saving.seconds)}")

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the running checkpoint is on disk, or at most these seconds, and report it."""
        if self._running is not None:
            self._running[1].wait_until_done(seconds)
        self.report_saved()

    def export_step(self, step: int) -> None:
        """Export the model after a step, unless that was done. Raise OSError on all ranks if it cannot be written."""
        folder = self.exports.path(step)
        if not self._is_written(self.exports, folder):
            self._write_model(folder)
            if self._ranks.is_first:
                self.exports.add(folder)

    def save_somewhere(self, step: int) -> Path | None:
        """Write the checkpoint of a step in the run's folder or, if that fails, in the second place. Return its folder; None if both fail.

        With several ranks, each of which writes a part, the second place is not used: it is a folder of the first one's machine.
        """
        self.save(step)
        self.wait()
        folder = self.checkpoints.path(step)
        if self._is_written(self.checkpoints, folder):
            self._saved = folder
            return folder
        if self._ranks.size > 1:
            return None
        elsewhere = self._write_elsewhere(
            folder.name, lambda place: self.write_checkpoint(place, step, disk=self.run_dir.disk)
        )
        self._saved = elsewhere or self._saved
        return elsewhere

    def load_best(self, step: int) -> None:
        """Keep the weights of the last step, and load the weights of the best checkpoint, if there is one. If that is impossible, report
        it and leave the last weights loaded.

        Raises:
            StreamingError: neither checkpoint could be read to its end, and the weights in memory are of two models.
        """
        self.wait()
        best = self._ranks.of_first("the best model", self.checkpoints.best and str(self.checkpoints.best))
        if best is None:
            return
        if (last := self.save_somewhere(step)) is None:
            self.report(
                f"warning: the last model cannot be kept beside the best one, so it is exported; for the best one, run "
                f"horizon-lm export {best} OUT"
            )
            return
        self.report(f"loading the best model, {best}")
        try:
            load_weights(self.model, Path(best), last, self._ranks)
        except (ConfigError, OSError) as error:
            self.report(f"warning: {first_line(error)}; the last model is exported instead")

    def export(self, step: int) -> None:
        """Export the model, which is trained after ``step`` steps. Its weights are never given up.

        Raises:
            Exception: an error that no waiting cures, once a checkpoint has the weights.
            InterruptedRunError: a signal has ended the waiting; a checkpoint has the weights, or an earlier one is left.
            ConfigError, DoesNotFitError: a signal has ended the waiting, and no checkpoint is left; or the folder could not be
                written to for so long that the run ends with a checkpoint.
        """
        self.wait()
        began, reported = time.monotonic(), -math.inf
        checkpoint: Path | None = None  # that has the trained weights
        while (failure := self._attempt(self._write_model, self.model_dir)) is not None:
            if time.monotonic() - reported >= _REPEAT_SECONDS:
                reported = time.monotonic()
                self._report_waiting(failure)
            signal = self._ranks.agree("the end of the waiting", self.requested())
            # The first rank decides. An error of the system may pass, such as a full disk; others stay.
            of_this_rank = [time.monotonic() - began, is_of_system(failure)]
            waited, may_pass = self._ranks.of_first("the waiting", of_this_rank)
            if signal or waited >= _PATIENCE_SECONDS or not may_pass:
                if (elsewhere := self._write_elsewhere("model", self._write_model)) is not None:
                    self.report(f"The trained model is in {elsewhere} instead, where it could be written to.")
                    self.model_dir = elsewhere
                    break
                checkpoint = checkpoint or self._leave_checkpoint(step)
            # Without a checkpoint, only a signal ends the waiting.
            if checkpoint is not None and not may_pass:
                failure.add_note(self.kept_artifacts())
                raise failure
            if signal or (checkpoint is not None and waited >= _SAVED_SECONDS):
                raise self._final_error(failure, signal, checkpoint)
            self._sleep()
        self.is_exported = True

    @property
    def last(self) -> Path | None:
        """The newest checkpoint on disk; None if there is none. Other ranks than the first know of one that `save_somewhere` has written."""
        return self._saved or (self.checkpoints.kept[-1] if self.checkpoints.kept else None)

    def kept_artifacts(self) -> str:
        """Return a sentence about what is kept when the run ends early, and how to go on."""
        if self.is_exported:
            return f"The trained model is in {self.model_dir}"
        if self.last is not None:
            is_in_folder = self.last.parent == self.run_dir.path
            elsewhere = "" if is_in_folder else f" with --resume_from_checkpoint {self.last}"
            return f"Kept: {self.last}. Run the same command again{elsewhere} to go on from there"
        if self.exports.kept:
            return (
                f"Kept: the model after an earlier step in {self.exports.kept[-1]}. With save_only_model a run cannot be resumed; to start "
                "over, run the same command with --overwrite_output_dir true"
            )
        return (
            f"Kept: {self.run_dir.metrics.path}. There is no checkpoint yet; run the same command again to start over"
        )

    def _is_written(self, folders: StepFolders, folder: Path) -> bool:
        """Return whether this run has written a folder and kept it, on all ranks."""
        written: bool = self._ranks.of_first("a checkpoint", folder in folders.kept)
        return written

    def _attempt(self, write: Callable[[Path], object], target: Path) -> Exception | None:
        """Write something. Return the error if that fails, on all ranks together; None if it is written."""
        try:
            write(target)
        except (RankLostError, DisagreementError):
            raise
        except Exception as error:  # of the system, of safetensors, of a tokenizer, or ours: the weights matter more
            return error
        return None

    def _write_elsewhere(self, name: str, write: Callable[[Path], object]) -> Path | None:
        """Write something into the second place, which the first rank knows. Return its path; None if that is impossible."""
        second, run_name = self.run_dir.second_place, os.path.basename(os.path.abspath(self.run_dir.path)) or "run"
        free = None if second is None else str(free_path(second / f"{run_name}-{name}"))
        place = self._ranks.of_first("the second place", free)
        if place is None:
            return None
        failure = self._attempt(write, Path(place))
        if failure is None:
            return Path(place)
        self.report(str(self.run_dir.problem(failure, Path(place), "the second place")))
        return None

    def _write_model(self, target: Path) -> None:
        """Write the model into a folder, and print a line about files that had its name."""
        if line := write_model(
            self.run_dir, self.model, self.tokenizer, target, self.config.exported_dtype, self.vision
        ):
            self.report(line)

    def _leave_checkpoint(self, step: int) -> Path | None:
        """Write a checkpoint with the trained weights, and report it. Return None if that is impossible."""
        checkpoint = self.save_somewhere(step)
        if checkpoint is not None:
            self.report(f"The checkpoint {checkpoint} has the trained weights.")
        return checkpoint

    def _report_unsaved(self, step: int, error: BaseException) -> None:
        last = f"the last one is {self.last}" if self.last else "there is none yet"
        self.report(f"warning: the checkpoint of step {step} was not written ({first_line(error)}); {last}")

    def _report_waiting(self, failure: Exception) -> None:
        """Print why the model is not written yet, and what to do."""
        second = self.run_dir.second_place
        place = "" if second is None else f" After {format_seconds(_PATIENCE_SECONDS)} it goes to {second}."
        self.report(
            f"{self.run_dir.problem(failure)} The trained model is kept in memory, and written as soon as that is possible: make the "
            f"folder writable, or make room.{place}"
        )

    def _final_error(self, failure: Exception, signal: str, checkpoint: Path | None) -> Exception:
        """Return the error that ends the run, of the same kind on all ranks.

        Args:
            failure: why the model could not be written.
            signal: the signal that has ended the waiting; empty for none.
            checkpoint: the checkpoint that has the trained weights; None if there is none, even if
                a checkpoint of earlier steps is left.
        """
        problem = self.run_dir.problem(failure)
        sentences = [f"interrupted by {signal} while the trained model could not be written."] if signal else []
        sentences.append(str(problem))
        if checkpoint is None:
            sentences.append(f"The {'weights of the last steps' if self.last else 'trained weights'} are lost.")
        sentences.append(self.kept_artifacts())
        kind, text, can_go_on = self._ranks.of_first(
            "the end of the export", [type(problem).__name__, " ".join(sentences), self.last is not None]
        )
        if signal and can_go_on:
            return InterruptedRunError(text)
        return DoesNotFitError(text) if kind == DoesNotFitError.__name__ else ConfigError(text)

    def _sleep(self) -> None:
        """Wait for the next attempt, or until a signal arrives."""
        until = time.monotonic() + _RETRY_SECONDS
        while not self.requested() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
