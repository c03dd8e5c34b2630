"""The loop of a run: its steps, and the parts that act at its moments."""

from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial

import numpy as np

from horizon_lm.device.host_copy import HostCopy
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import InterruptedRunError, RankLostError, first_line
from horizon_lm.runs.data.ahead import BatchesAhead
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.busy_cores import BusyCores
from horizon_lm.runs.training.evaluation import Evaluation
from horizon_lm.runs.training.first_step import FirstStep
from horizon_lm.runs.training.intervals import Control
from horizon_lm.runs.training.line_file import LineFiles
from horizon_lm.runs.training.long_steps import LongSteps, Watchdog
from horizon_lm.runs.training.metrics import StepResult
from horizon_lm.runs.training.non_finite import NonFinite
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, RunResult, Training
from horizon_lm.runs.training.sampling import Sampling
from horizon_lm.runs.training.saver import Saver
from horizon_lm.runs.training.spikes import Spikes
from horizon_lm.runs.training.step_log import StepLog
from horizon_lm.runs.training.tracing import Tracing


class Loop:
    """The steps of a run, all of whose components have been built.

    Raises:
        ConfigError: the checkpoint that the run goes on from is damaged.
    """

    def __init__(self, run: Run, training: Training) -> None:
        session, state = run.session, training.state
        self.settings, self.data, self.tokenizer, self.intervals = run.settings, run.data, run.tokenizer, run.intervals
        self.ranks, self.run_dir, self.callbacks = session.ranks, session.run_dir, session.callbacks
        self.interrupts, self.reporter = session.interrupts, session.reporter
        self.model, self.optimizer, self.scheduler = training.model, training.optimizer, training.scheduler
        self.objectives, self.metrics = training.objectives, training.metrics

        step_timeout = self.settings.config.step_timeout
        self.first_step, self.non_finite = FirstStep(run, training), NonFinite(run, training)
        self.saver = Saver(run, training)
        self.keeper = self.saver.keeper
        self.evaluation = Evaluation(run, training, self.saver, self.stop_if_interrupted)
        busy_cores = BusyCores(run)
        self.parts: list[Part] = [  # at each moment in this order
            Tracing(run, training),
            self.callbacks,  # before what they may request at the end of a step
            state.keep("spikes", Spikes(self.optimizer, self.reporter.print)),
            busy_cores,
            StepLog(run, training, busy_cores),  # the training loss is shown before the eval loss
            self.evaluation,  # may end the run, whose last model then answers the prompts
            Sampling(run, training, self.stop_if_interrupted),
            self.saver,  # after all that has a state: its checkpoints have what followed the step
            # Its context is within the saver's, whose checkpoint after a fault may take long.
            Watchdog(step_timeout, lambda: engine_of(self.model).cursor.describe_unfinished()),
            LongSteps(run, training),
        ]
        self.batches = BatchesAhead(self.data.loader.batch, self.intervals.num_steps, self.data.training.packed)
        self.due = replace(self.intervals, requests=self.requests)  # by the settings, or by the parts
        state.keep("callbacks", self.callbacks)
        # Last, because it removes lines: no other state can be damaged then.
        state.keep("files", LineFiles(self.run_dir.line_files, self.reporter.print))

    def run(self) -> RunResult:
        """Run all steps, those after a checkpoint if there is one, and export the model."""
        step = self.begin()
        with self.batches:
            while step < self.intervals.num_steps and not self.requests().stop:
                self.stop_if_interrupted(step)
                step += 1
                self.run_step(step)
                self.finish_step(step)
        return self.end(step)

    def requests(self) -> Control:
        """Return the actions that parts request now, on any rank; any event may change them."""
        return self.ranks.agree_on_control(Control.of_all(astuple(part.control) for part in self.parts))

    def begin(self) -> int:
        """Evaluate before the first step, or finish the last one of a resumed run. Return the number of steps that are done."""
        point = self.settings.point
        step = 0 if point is None else point.step
        metrics_file = self.run_dir.metrics if self.ranks.is_first else None
        self.reporter.begin(metrics_file, self.intervals.num_steps, self.callbacks.logged)
        self.callbacks.begin(
            self.model, self.tokenizer, self.optimizer, self.scheduler, self.intervals, self.reporter.print, step
        )
        self.interrupts.finish_steps(self.keeper.kept_artifacts)
        if point is None:
            self.evaluation.loss_before.value = self.evaluation.run(0)
        elif not self.saver.step_is_complete.value:
            self.finish_step(step)
        self.ranks.watch_progress()
        return step

    def run_step(self, step: int) -> None:
        """Run a step. The first one of this process is run once more with a smaller plan if it does not fit."""
        for part in self.parts:
            part.before_step(step)
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.during_step(step))
            self.first_step.run(partial(self.train_step, self.batches.batch(step - 1), step), step)

    def train_step(self, batch: Batch, step: int) -> None:
        """Run the forward pass, the backward pass and the update of a step, and add its results to the metrics."""
        config = self.settings.config
        seed_step(config.seed, step)
        batch = self.ranks.with_totals(batch)
        loss = self.objectives.training(self.model, batch)
        if batch.is_stand_in:  # computed as any other, since a loss may be a mean over the targets or the answers
            loss = replace(loss, value=loss.value * 0)
        host_loss = HostCopy(loss.value)
        if config.update_in_backward:  # the backward pass changes weights, so check the loss before it
            self.non_finite.check_loss(host_loss, step, batch)
        loss.value.backward()
        # Reading the loss waits for the forward pass. Do so after the backward pass is queued, so that the device stays busy.
        value = self.non_finite.check_loss(host_loss, step, batch)  # the sum over all ranks
        for part in self.parts:
            part.before_update()
        self.non_finite.update(self.optimizer, value, step, batch)
        for part in self.parts:
            part.after_update(step, value, batch)
        own_result = StepResult.of(value, loss, batch, config.per_device_train_batch_size, self.metrics.energy())
        self.metrics.add(self.ranks.total(own_result), self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.optimizer.zero_grad()

    def finish_step(self, step: int) -> None:
        """Log, evaluate, answer prompts and save after a step, and whatever else a part does then."""
        for part in self.parts:
            part.after_step(step, self.due)

    def stop_if_interrupted(self, step: int) -> None:
        """Raise InterruptedRunError if a signal has arrived or a part interrupts the run, on any rank. Before that, save if the
        settings say so, and finish what the parts do.
        """
        from_parts = max(part.control.interrupt for part in self.parts)  # the reason of any part; empty if none has one
        reason = self.ranks.agree("the end of a step", self.interrupts.requested or from_parts)
        if not reason:  # a signal may have arrived since, which counts after the next step
            return
        self.interrupts.requested = reason
        if self.settings.config.save_on_signal and step > 0 and not self.keeper.is_exported:
            self.saver.save_before_deadline(step)
        for part in self.parts:
            part.finish(step)
        kept = self.ranks.of_first("what the run leaves", self.interrupts.kept())
        self.interrupts.check(f"after step {step} of {self.intervals.num_steps}", kept)

    def error_of_callbacks(self) -> str:
        """Return the first error of a callback as text, on any rank; empty if none has failed."""
        error = self.callbacks.error
        text = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        return self.ranks.agree("the end of the callbacks", text)

    def evaluate_exported(self, step: int) -> float | None:
        """Return the eval loss of the exported model; None without an eval set, and after a signal, since the run is complete."""
        try:
            return self.evaluation.run(step)
        except InterruptedRunError:
            if not self.interrupts.requested:  # another rank is lost
                raise
            self.reporter.print(f"{self.interrupts.requested}: the exported model is not evaluated")
            return None

    def end(self, step: int) -> RunResult:
        """Export the model, or the best one, and evaluate it. After an error of a callback, keep the weights and raise it."""
        for part in self.parts:
            part.finish(step)
        loss_after = None
        if self.error_of_callbacks() and step < self.intervals.num_steps:
            self.saver.save_somewhere_or_export(step)
        else:  # also with an error after the last step, when the model is complete
            self.evaluation.load_best(step)
            self.keeper.export(step)  # before the evaluation, which may fail
            loss_after = self.evaluate_exported(step)
            for part in self.parts:
                part.end()
        if problem := self.error_of_callbacks():
            error = self.callbacks.error or RankLostError(f"a callback has failed on another rank: {problem}")
            kept = self.keeper.kept_artifacts()
            error.add_note(f"The training ended after step {step} of {self.intervals.num_steps}. {kept}")
            raise error
        return RunResult(
            output_dir=self.run_dir.path, model_dir=self.keeper.model_dir, num_steps=step, num_skipped=self.optimizer.num_skipped,
            eval_loss_before=self.evaluation.loss_before.value, eval_loss_after=loss_after,
        )  # fmt: skip


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step: the first 32-bit word of numpy's ``SeedSequence((seed, step))``.

    After `transformers.set_seed` with this seed, plain Hugging Face draws the same dropout in a step of one
    micro-batch.

    Args:
        seed: the seed of the run.
        step: the step, counted from 1.
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_step(seed: int, step: int) -> None:
    """Seed Python, numpy and torch, on the host and on all devices, for a step."""
    from transformers import set_seed

    set_seed(step_seed(seed, step))
