"""Answer the sample prompts of a run between its steps."""

from collections.abc import Callable

from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training


class Sampling(Part):
    """Shows the answers to the sample prompts, and writes them into ``samples.jsonl``."""

    def __init__(self, run: Run, training: Training, stop_if_interrupted: Callable[[int], None]) -> None:
        self._run, self._training, self._stop_if_interrupted = run, training, stop_if_interrupted

    def after_step(self, step: int, due: Intervals) -> None:
        if not due.samples(step):
            return
        self._stop_if_interrupted(step)  # answers may take long
        session = self._run.session
        with self._training.metrics.exclude_from_timing(), session.reporter.attempt("answering sample_prompts"):
            answers = self._run.prompts.answer(self._training.model, step)
            session.reporter.show(answers)
            session.run_dir.append_samples(answers)
