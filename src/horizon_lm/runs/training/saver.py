"""Save a run: checkpoints between steps, on a signal and after a fault, and the trained model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from horizon_lm.common.quantities import format_seconds
from horizon_lm.device.faults import is_device_fault
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError, DeviceFaultError, InterruptedRunError, first_line
from horizon_lm.runs.checkpoints.checkpoint import save_checkpoint
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.last_resort import LastResort
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training
from horizon_lm.runs.training.run_checkpoints import RunCheckpoints, write_side_files
from horizon_lm.runs.training.run_state import Value


class Saver(Part):
    """Saves a run after a step. ``step_is_complete`` is true once all that follows the last step is done, but for saving it."""

    def __init__(self, run: Run, training: Training) -> None:
        self._run, self._training, self._config = run, training, run.settings.config
        session = run.session
        self._ranks, self._run_dir, self._reporter = session.ranks, session.run_dir, session.reporter
        # All arguments of `save_checkpoint` that are the same for each checkpoint.
        write = partial(
            save_checkpoint, model=training.model, optimizer=training.optimizer, arrays=training.objectives.reference,
            add_files=lambda part: write_side_files(part, run.tokenizer, session.run_dir.settings),
        )  # fmt: skip
        self.step_is_complete = training.state.keep("finished", Value(True))
        print_fn, point = session.reporter.print, run.settings.point
        self.checkpoints = RunCheckpoints(
            self._config, self._run_dir.path, print_fn, training.model, write, point, self._ranks
        )

    def during_step(self, step: int) -> AbstractContextManager[None]:
        return self.saving_on_fault(step - 1)

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        self.step_is_complete.value = False

    def after_step(self, step: int, due: Intervals) -> None:
        self.step_is_complete.value = True
        if due.saves(step):
            self.save(step)
            self._run.session.callbacks.saved()
        self.checkpoints.report()

    def save(self, step: int, best: bool = False) -> None:
        """Begin to write a checkpoint, or export the model with ``save_only_model``."""
        with self._training.metrics.exclude_from_timing(), self._reporter.attempt(f"saving checkpoint-{step}"):
            if self._config.save_only_model:
                if line := self._run_dir.export_and_prune(self._training.model, self._run.tokenizer, step):
                    self._reporter.print(line)
            else:
                self.checkpoints.save(step, self._state(step), best)

    def save_somewhere(self, step: int) -> Path | None:
        """Write a checkpoint in the run's folder or the second place. Return its folder; None if it cannot be written."""
        return self.checkpoints.save_and_wait(step, self._state(step), self._run_dir.elsewhere(f"checkpoint-{step}"))

    def save_somewhere_or_export(self, step: int) -> None:
        """Write a checkpoint somewhere or, if that is impossible, export the model."""
        if self._config.save_only_model or self.save_somewhere(step) is None:
            self.export(step)

    def save_before_deadline(self, step: int) -> None:
        """Write a checkpoint after a signal and wait for it, but not beyond ``save_on_signal_seconds``: a slower one is not begun."""
        limit = self._config.save_on_signal_seconds
        expected = self._ranks.of_first("the expected time of a checkpoint", self.checkpoints.seconds())
        if limit is not None and expected is not None and expected > limit:
            self._reporter.print(
                f"no checkpoint of step {step}: it would take about {format_seconds(expected)}, and save_on_signal_seconds is "
                f"{limit:g}"
            )
            self.checkpoints.wait(limit)  # one that is being written already may still be in time
            return
        if limit is None and not self._config.save_only_model:
            self.save_somewhere(step)  # there is time to try the second place, too
            return
        self.save(step)
        self.checkpoints.wait(limit)

    @contextmanager
    def saving_on_fault(self, steps_done: int) -> Iterator[None]:
        """Context manager: if the enclosed step fails, save the state before it, after ``steps_done`` steps, also if the device has failed.

        Raises:
            DeviceFaultError: the device has failed. Other errors are raised with a note about what is kept.
        """
        optimizer = self._training.optimizer
        counts = optimizer.num_steps, optimizer.num_skipped
        try:
            yield
        except Exception as error:
            has_failed_device = is_device_fault(error)
            with self._reporter.attempt("saving after the fault"):
                if has_failed_device:
                    engine_of(self._training.model).settle_without_device()
                # Once the update of the step has begun, the weights are no longer the ones from before it.
                is_unchanged = not optimizer.partial_update and counts == (optimizer.num_steps, optimizer.num_skipped)
                if steps_done and is_unchanged and self._ranks.size == 1:  # other ranks may be gone, or elsewhere
                    if self._config.save_only_model:
                        self.save(steps_done)
                    else:
                        self.save_somewhere(steps_done)
            if has_failed_device:
                problem = f"the device failed after step {steps_done} ({type(error).__name__}: {first_line(error)})"
                raise DeviceFaultError(f"{problem}. {self.kept_artifacts()}") from error
            if not isinstance(error, InterruptedRunError):
                error.add_note(self.kept_artifacts())
            raise

    def kept_artifacts(self) -> str:
        """Return a sentence about what is kept when the run ends early."""
        return self._run_dir.kept_artifacts(self.checkpoints.last)

    def load_best(self, step: int, is_last: bool) -> None:
        """Keep the weights of the last step and load the ones of the best evaluation, unless they are the same (``is_last``). If that is
        impossible, report it and leave the last weights loaded.
        """
        self.checkpoints.wait()
        best = None if is_last or self.checkpoints.best is None else str(self.checkpoints.best)
        folder = self._ranks.of_first("the best model", best)
        if folder is None:
            return
        if (last := self.save_somewhere(step)) is None:
            self._reporter.print(
                f"warning: the last model cannot be kept beside the best one, so it is exported; for the best one, run "
                f"horizon-lm export {folder} OUT"
            )
            return
        self._reporter.print(f"loading the best model, {folder}")
        try:
            self.checkpoints.load(Path(folder), last)
        except (ConfigError, OSError) as error:
            self._reporter.print(f"warning: {first_line(error)}; the last model is exported instead")

    def export(self, step: int) -> None:
        """Export the trained model, once the running checkpoint is on disk. Its weights are never given up."""
        self.checkpoints.wait()
        interrupts = self._run.session.interrupts
        # Functions, because a signal or another checkpoint may come while it waits.
        last_resort = LastResort(
            run_dir=self._run_dir, report=self._reporter.print, requested=lambda: interrupts.requested,
            save_checkpoint=partial(self.save_somewhere, step), last_checkpoint=lambda: self.checkpoints.last,
        )  # fmt: skip
        last_resort.export(self._training.model, self._run.tokenizer)

    def _state(self, step: int) -> dict[str, object]:
        return self._run.identity(self._training.model, step) | self._training.state.state_dict()
