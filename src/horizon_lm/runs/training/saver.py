"""Save a run: after its steps, on a signal, after a fault, and at its end."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from horizon_lm.common.quantities import format_seconds
from horizon_lm.device.faults import is_device_fault
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import DeviceFaultError, InterruptedRunError, first_line
from horizon_lm.runs.checkpoints.checkpoint import save_checkpoint
from horizon_lm.runs.checkpoints.saving import Saving
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training
from horizon_lm.runs.training.run_state import Value


class Saver(Part):
    """Decides when a run is saved; its `Keeper` decides where.

    Attributes:
        keeper: writes checkpoints and models.
        step_is_complete: holds true once all that follows the last step is done, but for saving it.
    """

    def __init__(self, run: Run, training: Training) -> None:
        self._run, self._training, self._config = run, training, run.settings.config
        session = run.session
        self._ranks, self._reporter = session.ranks, session.reporter
        self.step_is_complete = training.state.keep("finished", Value(True))
        self.keeper = Keeper(
            config=self._config, run_dir=session.run_dir, model=training.model, tokenizer=run.tokenizer,
            write_checkpoint=self._write_checkpoint, report=session.reporter.print,
            requested=lambda: session.interrupts.requested, point=run.settings.point, vision=run.vision,
        )  # fmt: skip

    def during_step(self, step: int) -> AbstractContextManager[None]:
        return self.saving_on_fault(step - 1)

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        self.step_is_complete.value = False

    def after_step(self, step: int, due: Intervals) -> None:
        self.step_is_complete.value = True
        if due.saves(step):
            self.save(step)
            self._run.session.callbacks.saved()
        self.keeper.report_saved()

    def save(self, step: int, best: bool = False) -> None:
        """Begin to write a checkpoint, or export the model with ``save_only_model``."""
        with self._training.metrics.exclude_from_timing(), self._reporter.attempt(f"saving checkpoint-{step}"):
            if self._config.save_only_model:
                self.keeper.export_step(step)
            else:
                self.keeper.save(step, best)

    def save_now(self, step: int) -> None:
        """Write a checkpoint somewhere, or export the model with ``save_only_model``, before the run ends."""
        if self._config.save_only_model:
            self.save(step)
        else:
            self.keeper.save_somewhere(step)

    def save_somewhere_or_export(self, step: int) -> None:
        """Write a checkpoint somewhere or, if that is impossible, export the model."""
        if self._config.save_only_model or self.keeper.save_somewhere(step) is None:
            self.keeper.export(step)

    def save_before_deadline(self, step: int) -> None:
        """Write a checkpoint after a signal and wait for it, but not beyond ``save_on_signal_seconds``: a slower one is not begun."""
        limit = self._config.save_on_signal_seconds
        expected = self._ranks.of_first("the expected time of a checkpoint", self.keeper.seconds)
        if limit is None:  # there is time to try the second place, too
            self.save_now(step)
            return
        if expected is not None and expected > limit:
            self._reporter.print(
                f"no checkpoint of step {step}: it would take about {format_seconds(expected)}, and save_on_signal_seconds is "
                f"{limit:g}"
            )
        else:
            self.save(step)
        self.keeper.wait(limit)  # also for one that is being written already, and may still be in time

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
                    self.save_now(steps_done)
            kept = self.keeper.kept_artifacts()
            if has_failed_device:
                problem = f"the device failed after step {steps_done} ({type(error).__name__}: {first_line(error)})"
                raise DeviceFaultError(f"{problem}. {kept}") from error
            if not isinstance(error, InterruptedRunError):
                error.add_note(kept)
            raise

    def _write_checkpoint(self, folder: Path, step: int, **options: Any) -> Saving:
        """Write the checkpoint of a step into a folder. ``options``: further arguments of `save_checkpoint`."""
        training, run = self._training, self._run

        def add_files(part: Path) -> None:
            """Write the tokenizer, the files of the processor of images, and the run file."""
            run.tokenizer.save_pretrained(part)
            if run.vision is not None:
                run.vision.copy_files(part)
            (part / "run.yaml").write_text(run.session.run_dir.settings, encoding="utf-8")

        state = run.identity(training.model, step) | training.state.state_dict()
        return save_checkpoint(
            folder, training.model, training.optimizer, state=state, arrays=training.objectives.reference, add_files=add_files,
            **options,
        )  # fmt: skip
