"""Log the steps of a run."""

from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.busy_cores import BusyCores
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training


class StepLog(Part):
    """Writes the lines of metrics, advances the progress bar, and draws the losses at the end.

    Args:
        run, training: the run.
        busy_cores: measures the cores that other programs use, which each line has.
    """

    def __init__(self, run: Run, training: Training, busy_cores: BusyCores) -> None:
        self._run, self._training, self._reporter = run, training, run.session.reporter
        self._busy_cores = busy_cores

    def after_update(self, step: int, loss: float, batch: Batch) -> None:
        self._reporter.advance(step, loss)

    def after_step(self, step: int, due: Intervals) -> None:
        if due.logs(step):
            self.finish(step)

    def finish(self, step: int) -> None:
        """Log the metrics of the steps since the last line, if there are any."""
        training, unit_norms = self._training, self._run.settings.config.log_unit_grad_norms
        if training.metrics.has_steps:
            line = training.metrics.line(step, training.optimizer, training.model, unit_norms)
            self._reporter.write(line | {"cores_of_others": self._busy_cores.cores_of_others})

    def end(self) -> None:
        with self._reporter.attempt("loss.png"):
            self._run.session.run_dir.draw_loss()
        self._reporter.stop_bar()
