"""Never give up trained weights: wait for their folder, write them to a second place, or leave a checkpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import is_of_system
from horizon_lm.common.quantities import format_seconds
from horizon_lm.errors import ConfigError, DisagreementError, DoesNotFitError, InterruptedRunError, RankLostError
from horizon_lm.runs.training.run_dir import RunDir

_PATIENCE_SECONDS = 30.0  # until the second place is used
_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.2  # for a signal
_REPEAT_SECONDS = 600.0  # until the problem is reported again
_SAVED_SECONDS = 600.0  # to wait for the folder although a checkpoint has the weights


@dataclass
class LastResort:
    """Exports the trained model, whatever fails.

    It tries the run's folder again and again, and reports the problem and the remedy. After half a minute, or when a signal
    arrives, it tries the second place, and then to leave a checkpoint in either. With neither, it waits until a signal arrives.

    Args:
        run_dir: the folder of the run, and the second place. All ranks call `export`; the first one writes and decides.
        report: prints a line for people.
        requested: returns the name of the signal that has arrived; empty if there was none.
        save_checkpoint: writes a checkpoint somewhere, and returns its folder; None if it cannot.
        last_checkpoint: returns the newest checkpoint; None if there is none.
    """

    run_dir: RunDir
    report: Callable[[str], None]
    requested: Callable[[], str]
    save_checkpoint: Callable[[], Path | None]
    last_checkpoint: Callable[[], Path | None]

    def __post_init__(self) -> None:
        self._began = self._reported = time.monotonic()

    def export(self, model: Any, tokenizer: Any) -> None:
        """Export a model to the run's folder or, with its ``model_dir`` changed, to the second place.

        Raises:
            Exception: an error that no waiting cures, once a checkpoint has the weights.
            InterruptedRunError: a signal has ended the waiting; a checkpoint has the weights, or an earlier one is left.
            ConfigError, DoesNotFitError: a signal has ended the waiting, and no checkpoint is left; or the folder could not be
                written to for so long that the run ends with a checkpoint.
        """
        run_dir, checkpoint = self.run_dir, None  # the checkpoint that has the trained weights
        failure = self._try_writing(model, tokenizer, run_dir.model_dir)
        if failure is not None:
            self._report_failure(failure)
        while failure is not None:
            signal = run_dir.ranks.agree("the end of the waiting", self.requested())
            of_this_rank = [time.monotonic() - self._began, is_of_system(failure)]
            # The first rank decides. An error of the system may pass, such as a full disk; others stay.
            waited, may_pass = run_dir.ranks.of_first("the waiting", of_this_rank)
            if signal or waited >= _PATIENCE_SECONDS or not may_pass:
                if self._export_elsewhere(model, tokenizer):
                    return
                checkpoint = checkpoint or self._leave_checkpoint()
            # Without a checkpoint, only a signal ends the waiting.
            if checkpoint is not None and not may_pass:
                failure.add_note(run_dir.kept_artifacts(checkpoint))
                raise failure
            if signal or (checkpoint is not None and waited >= _SAVED_SECONDS):
                raise self._final_error(failure, signal, checkpoint)
            if time.monotonic() - self._reported >= _REPEAT_SECONDS:
                self._report_failure(failure)
            self._sleep()
            failure = self._try_writing(model, tokenizer, run_dir.model_dir)
        run_dir.is_exported = True

    def _try_writing(self, model: Any, tokenizer: Any, target: Path) -> Exception | None:
        """Write a model. Return the error if that fails, on all ranks together; None if the model is written."""
        try:
            line = self.run_dir.write_model(model, tokenizer, target)
            if line:
                self.report(line)
        except (RankLostError, DisagreementError):
            raise
        except Exception as error:  # of the system, of safetensors, of a tokenizer, or ours: the weights matter more
            return error
        return None

    def _export_elsewhere(self, model: Any, tokenizer: Any) -> bool:
        """Export the model into the second place, which the first rank knows, and point the run to it. Return whether that was possible."""
        own_place = self.run_dir.elsewhere("model")
        place = self.run_dir.ranks.of_first("the second place", None if own_place is None else str(own_place))
        if place is None:
            return False
        failure = self._try_writing(model, tokenizer, Path(place))
        if failure is not None:
            self.report(str(self.run_dir.problem(failure, Path(place), "the second place")))
            return False
        self.report(f"The trained model is in {place} instead, where it could be written to.")
        self.run_dir.model_dir, self.run_dir.is_exported = Path(place), True
        return True

    def _leave_checkpoint(self) -> Path | None:
        """Write a checkpoint with the trained weights, and report it. Return None if that is impossible."""
        checkpoint = self.save_checkpoint()
        if checkpoint is not None:
            self.report(f"The checkpoint {checkpoint} has the trained weights.")
        return checkpoint

    def _report_failure(self, failure: Exception) -> None:
        """Print why the model is not written yet, and what to do."""
        self._reported = time.monotonic()
        second = self.run_dir.second
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
        problem, last_checkpoint = self.run_dir.problem(failure), self.last_checkpoint()
        sentences = [f"interrupted by {signal} while the trained model could not be written."] if signal else []
        sentences.append(str(problem))
        if checkpoint is None:
            sentences.append(f"The {'weights of the last steps' if last_checkpoint else 'trained weights'} are lost.")
        sentences.append(self.run_dir.kept_artifacts(last_checkpoint))
        kind, text, can_go_on = self.run_dir.ranks.of_first(
            "the end of the export", [type(problem).__name__, " ".join(sentences), last_checkpoint is not None]
        )
        if signal and can_go_on:
            return InterruptedRunError(text)
        return DoesNotFitError(text) if kind == DoesNotFitError.__name__ else ConfigError(text)

    def _sleep(self) -> None:
        """Wait for the next attempt, or until a signal arrives."""
        until = time.monotonic() + _RETRY_SECONDS
        while not self.requested() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
