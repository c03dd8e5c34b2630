"""The loop of a run: its steps, and what happens between them."""

from functools import partial
from typing import NoReturn

from horizon_lm.data.batch import Batch
from horizon_lm.engine.streamed import engine_of
from horizon_lm.planning.plan import Plan
from horizon_lm.training.callbacks import Control
from horizon_lm.training.evaluation import Evaluation
from horizon_lm.training.first_step import FirstStep
from horizon_lm.training.line_file import LineFile, LineFiles
from horizon_lm.training.metrics import StepResult
from horizon_lm.training.non_finite import NonFinite, shown_places
from horizon_lm.training.resume import rounding_warnings, settings_of
from horizon_lm.training.run import Run, RunResult, Training
from horizon_lm.training.run_state import Value
from horizon_lm.training.saver import Saver
from horizon_lm.training.seeds import seed_step
from horizon_lm.training.spikes import Spikes
from horizon_lm.training.tracing import Tracing
from horizon_lm.training.watchdog import watching


class Loop:
    """The steps of a run whose parts have all been built.

    Args:
        parts: the parts of the run but for its model.
        training: the model, and what trains it.

    Raises:
        ConfigError: the checkpoint that the run goes on from is damaged.
    """

    def __init__(self, parts: Run, training: Training) -> None:
        session, state = parts.session, training.state
        self.settings, self.data, self.tokenizer = parts.settings, parts.data, parts.tokenizer
        self.prompts, self.intervals = parts.prompts, parts.intervals
        self.ranks, self.run_dir, self.callbacks = session.ranks, session.run_dir, session.callbacks
        self.interrupts, self.reporter = session.interrupts, session.reporter
        self.model, self.optimizer, self.scheduler = training.model, training.optimizer, training.scheduler
        self.objectives, self.metrics = training.objectives, training.metrics

        config, num_steps = self.settings.config, self.intervals.num_steps
        self.saver = Saver(parts, training)
        self.evaluation = Evaluation(parts, training, self.saver)
        self.first_step = FirstStep(self.model, self.optimizer, parts.admission, self.reporter, self.ranks.mesh is None)
        self.non_finite = NonFinite(parts, training)
        self.tracing = Tracing(self.model, config.trace_steps, num_steps, self.run_dir.trace_file)
        self.spikes = state.keep("spikes", Spikes())
        self.loss_before = state.keep("loss_before", Value[float | None](None))  # eval loss before the first step
        self.finished = state.keep("finished", Value(True))  # the step is logged, evaluated and saved
        state.keep("callbacks", self.callbacks)
        self.metrics_file = LineFile(self.run_dir.metrics_file)
        state.keep("files", LineFiles([self.metrics_file, self.run_dir.samples], self.reporter.print))

    def run(self) -> RunResult:
        """Run all steps, those after a checkpoint if there is one, and export the model."""
        step = self.begin()
        while step < self.intervals.num_steps and not self.stops:
            self.stop_if_interrupted(step)
            step += 1
            self.run_step(step)
            self.finish_step(step)
        return self.end(step)

    @property
    def control(self) -> Control:
        """The actions that callbacks request now, on any rank; any event may change them."""
        return self.ranks.agree_on_control(self.callbacks.control)

    @property
    def stops(self) -> bool:
        """True if a callback or early stopping ends the run after this step."""
        return self.control.stop or self.evaluation.best.stops

    def begin(self) -> int:
        """Evaluate before the first step, or finish the last one of a resumed run. Return the number of steps that are done."""
        point = self.settings.point
        step = 0 if point is None else point.step
        self.reporter.begin(self.metrics_file, self.intervals.num_steps, self.callbacks.logged)
        self.callbacks.begin(
            self.model, self.tokenizer, self.optimizer, self.scheduler, self.intervals, self.reporter.print, step
        )
        self.interrupts.finish_steps(self.saver.kept_artifacts)
        if point is None:
            self.loss_before.value = self.evaluate(0)
        elif not self.finished.value:
            self.finish_step(step)
        self.ranks.train_in_step()
        return step

    def run_step(self, step: int) -> None:
        """Run a step. The first one of this process is run once more with a smaller plan if it does not fit."""
        with self.reporter.attempt("trace.json"):
            self.tracing.before_step(step)
        self.callbacks.before_step(step)
        pending_operations = engine_of(self.model).cursor.describe_unfinished
        with (
            self.saver.saving_on_fault(step - 1),
            watching(f"step {step}", self.settings.config.step_timeout, pending_operations),
        ):
            train_step = partial(self.train_step, self.data.loader.batch(step - 1), step)
            plan = self.first_step.run(train_step, step, self.settings.plan)
            if plan is not self.settings.plan:
                self.use_plan(plan, step)
        self.callbacks.after_step(step)

    def use_plan(self, plan: Plan, step: int) -> None:
        """Record the smaller plan with which a step was run, for the rest of the run."""
        before = self.settings.config
        self.settings.use(plan)
        self.metrics.plan = plan
        if step > 1:
            self.reporter.print(*rounding_warnings(settings_of(before), settings_of(self.settings.config)))
        with self.reporter.attempt("plan.json"):
            self.run_dir.write_settings(self.settings.config, plan)

    def train_step(self, batch: Batch, step: int) -> None:
        """Run the forward pass, the backward pass and the update of a step."""
        config = self.settings.config
        seed_step(config.seed, step)
        batch = self.ranks.with_totals(batch)
        loss = self.objectives.training(self.model, batch)
        if config.update_in_backward:  # the backward pass changes weights, so check the loss before it
            self.non_finite.finite_loss(loss, step, batch)
        loss.value.backward()
        # Reading the loss waits for the device. Do so after the backward pass is queued, so that the device stays busy.
        value = self.non_finite.finite_loss(loss, step, batch)
        self.callbacks.before_update()
        self.non_finite.update(self.optimizer, step, batch)
        self.callbacks.after_update()
        for spike in self.spikes.add(value, self.optimizer.grad_norm):
            self.reporter.print(f"step {step}: spike: {spike}. Its rows: {shown_places(batch)}")
        own = StepResult.of(
            value / self.ranks.size, loss, batch, config.per_device_train_batch_size, self.metrics.energy()
        )
        self.metrics.add(self.ranks.total(own), self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.reporter.advance(step, value)

    def finish_step(self, step: int) -> None:
        """Log, evaluate, answer prompts and save after a step, as requested by intervals and callbacks."""
        intervals = self.intervals
        self.finished.value = False
        if intervals.logs(step) or self.control.log:
            self.log(step)
        if intervals.evaluates(step) or self.control.evaluate:
            self.evaluate(step)
        if intervals.samples(step) or (self.stops and self.settings.config.sample_prompts):
            self.stop_if_interrupted(step)
            self.answer_prompts(step)
        self.finished.value = True
        if intervals.saves(step) or self.control.save:
            self.saver.save(step)
            self.callbacks.saved()
        self.saver.checkpoints.report()

    def log(self, step: int) -> None:
        """Log the metrics of the steps since the last line, if there are any."""
        if self.metrics.has_steps:
            unit_norms = self.settings.config.log_unit_grad_norms
            self.reporter.write(self.metrics.line(step, self.optimizer, self.model, unit_norms))

    def evaluate(self, step: int) -> float | None:
        """Evaluate unless this step was already evaluated. Return the eval loss, or None without an eval set."""
        return self.evaluation.run(step, between_batches=partial(self.stop_if_interrupted, step))

    def answer_prompts(self, step: int) -> None:
        """Answer the sample prompts."""
        with self.metrics.exclude_from_timing(), self.reporter.attempt("answering sample_prompts"):
            answers = self.prompts.answer(self.model, step)
            self.reporter.show(answers)
            self.run_dir.append_samples(answers)

    def stop_if_interrupted(self, step: int) -> None:
        """Save, log the steps so far and raise InterruptedRunError if a signal has arrived, at any rank."""
        self.interrupts.requested = self.ranks.agree("the end of a step", self.interrupts.requested)
        if self.interrupts.requested:
            if self.settings.config.save_on_signal and step > 0 and not self.run_dir.is_exported:
                self.saver.save_before_deadline(step)
            self.log(step)
            kept = self.ranks.of_first("what the run leaves", self.interrupts.kept())
            self.interrupts.check(f"after step {step} of {self.intervals.num_steps}", kept)

    def end(self, step: int) -> RunResult:
        """Export the model, or the best one, and evaluate it. After an error of a callback, keep the weights and raise it."""
        callbacks, saver, config = self.callbacks, self.saver, self.settings.config
        with self.reporter.attempt("trace.json"):
            self.tracing.finish(step)
        self.log(step)
        if callbacks.error is not None and step < self.intervals.num_steps:
            if config.save_only_model or saver.keep(step) is None:
                saver.export(step)
            self.raise_callback_error(step, callbacks.error)
        if config.load_best_model_at_end:
            with saver.saving_on_fault(step):
                self.evaluate(step)
            saver.load_best(step, is_last=self.evaluation.best.step == step)
        saver.checkpoints.wait()
        saver.export(step)
        loss_after = self.evaluate(step)
        callbacks.end()
        with self.reporter.attempt("loss.png"):
            self.run_dir.draw_loss()
        self.reporter.stop_bar()
        if callbacks.error is not None:
            self.raise_callback_error(step, callbacks.error)
        folders, num_skipped = (self.run_dir.path, self.run_dir.model_dir), self.optimizer.num_skipped
        return RunResult(*folders, step, self.loss_before.value, loss_after, num_skipped)

    def raise_callback_error(self, step: int, error: BaseException) -> NoReturn:
        """Raise the error of a user's callback with a note about what is kept."""
        kept = self.saver.kept_artifacts()
        error.add_note(f"The training ended after step {step} of {self.intervals.num_steps}. {kept}")
        raise error
