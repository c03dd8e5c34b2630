"""A training run, from its settings to an exported model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from horizon_lm.config import RunConfig
from horizon_lm.config.load import as_config
from horizon_lm.data.checks import reject_errors
from horizon_lm.data.loader import Batch
from horizon_lm.plan.render import summary_lines
from horizon_lm.preflight.admission import Admission, apply_plan
from horizon_lm.training.callbacks import Callbacks
from horizon_lm.training.evaluation import SamplePrompts, evaluate_rows
from horizon_lm.training.interrupts import Interrupts
from horizon_lm.training.metrics import Metrics, Reporter, growth_warning
from horizon_lm.training.non_finite import finite_loss, update
from horizon_lm.training.rows import RunData, load_data
from horizon_lm.training.run_dir import RunDir
from horizon_lm.training.setup import (
    Objectives,
    build_optimizer,
    check_gradients,
    check_weights,
    choose_device,
    load_model,
    load_tokenizer,
    make_objectives,
    num_steps_of,
    require_callable,
    reserve_buffers,
)
from horizon_lm.training.tracing import Tracing


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step: the first 32-bit word of numpy's ``SeedSequence((seed, step))``.

    After `transformers.set_seed` with it, plain Hugging Face draws the same dropout in a step of one micro-batch.

    Args:
        seed: the seed of the run.
        step: the step, counted from 1.
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_step(seed: int, step: int) -> None:
    """Seed Python, numpy and torch, on the host and on all devices, for a step."""
    from transformers import set_seed

    set_seed(step_seed(seed, step))


@dataclass(frozen=True, slots=True)
class Intervals:
    """The steps after which a run logs, evaluates, saves and answers sample prompts. Steps are counted from 1."""

    config: RunConfig
    num_steps: int
    steps_per_epoch: int

    def logs(self, step: int) -> bool:
        return step in (1, self.num_steps) or step % self._interval(self.config.logging_steps) == 0

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after a step. False at the last one, after which every run evaluates."""
        config = self.config
        return self._due(config.eval_strategy, config.eval_steps or config.logging_steps, step)

    def saves(self, step: int) -> bool:
        """Return whether to export a checkpoint after a step. False at the last one, after which every run exports its model."""
        return self._due(self.config.save_strategy, self.config.save_steps, step)

    def samples(self, step: int) -> bool:
        return self.config.sample_prompts is not None and (
            step == self.num_steps or step % self._interval(self.config.sample_steps) == 0
        )

    def num_saves(self) -> int:
        """Return the largest number of checkpoints that are on disk at once."""
        config = self.config
        if config.save_strategy == "no":
            return 0
        every = self.steps_per_epoch if config.save_strategy == "epoch" else self._interval(config.save_steps)
        count = (self.num_steps - 1) // every  # after the last step, the run exports its model instead
        return min(count, config.save_total_limit or count)

    def _due(self, strategy: str, interval: float, step: int) -> bool:
        if strategy == "no" or step == self.num_steps:
            return False
        return step % (self.steps_per_epoch if strategy == "epoch" else self._interval(interval)) == 0

    def _interval(self, number_or_share: float) -> int:
        return max(1, num_steps_of(number_or_share, self.num_steps))


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of a run.

    Attributes:
        output_dir: the folder of the run.
        model_dir: the folder of the trained model.
        num_steps: optimizer steps.
        eval_loss_before: eval loss before the first step; None without an eval set.
        eval_loss_after: eval loss after the last step; None without an eval set.
        num_skipped: steps skipped because their gradient was not finite.
    """

    output_dir: Path
    model_dir: Path
    num_steps: int
    eval_loss_before: float | None
    eval_loss_after: float | None
    num_skipped: int


def train(
    run: RunConfig | Mapping[str, Any] | str | Path,
    *,
    objective: Callable[[Any, Batch], Any] | None = None,
    callbacks: Sequence[Any] = (),
    print_fn: Callable[[str], None] | None = None,
    **settings: Any,
) -> RunResult:
    """Train a model and export it to ``<output_dir>/model``.

    Args:
        run: the settings, or the path of a YAML file with them.
        objective: a custom loss; the ``objective`` of the run then only says how rows are read. A function of the streamed
            model and a `horizon_lm.data.loader.Batch` that returns a scalar tensor, or a tuple of it and a dict of metrics.
        callbacks: transformers callbacks, instances or classes, called as a Trainer would call them.
        print_fn: called with each line of progress; None prints to standard output.
        settings: overrides of ``run``, such as ``max_steps=20``.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; its step is not applied. If it is the last evaluation, the
            model has been exported.
        InterruptedRunError: SIGINT or SIGTERM arrived; the current step was finished.
    """
    config = as_config(run, settings)
    require_callable(objective)
    config = config.model_copy(update={"device": choose_device(config.device)})
    run_dir = RunDir(config)
    handler = Callbacks(config, callbacks)  # first, so that a missing tracker is found before the data is prepared
    with Interrupts() as interrupts, Reporter(print_fn) as reporter:
        admission = Admission(config)
        admission.reject_if_impossible()
        tokenizer = load_tokenizer(config)
        reporter.print(*check_weights(config))
        data = load_data(config, tokenizer)
        for prepared in data.parts:
            reporter.print(*prepared.lines())
            reject_errors(prepared.findings)
        sampler = data.loader.sampler
        num_steps = config.max_steps if config.max_steps > 0 else sampler.num_steps(config.num_train_epochs)
        intervals = Intervals(config, num_steps, sampler.steps_per_epoch)
        prompts = SamplePrompts(config, tokenizer)
        plan = admission.admit(data.loader, data.eval_sets.values(), num_steps, intervals.num_saves(), prompts.longest)
        reporter.print(*summary_lines(plan))
        config = apply_plan(config, plan)
        run_dir.begin(config, plan)
        reporter.print(f"run folder: {run_dir.path}")
        model = load_model(config)
        reserve_buffers(model, plan)
        objectives = make_objectives(config, model, data, reporter, objective)
        check_gradients(model, objectives, data.loader.batch(0), config, reporter)
        optimizer, scheduler = build_optimizer(model, config, num_steps)
        metrics = Metrics(num_steps, sampler.steps_per_epoch, plan)
        result = _Loop(
            config, run_dir, reporter, handler, tokenizer, data, prompts, intervals, model, objectives, optimizer, scheduler,
            metrics,
        ).run(interrupts)  # fmt: skip
        if config.push_to_hub:
            reporter.print(run_dir.push(config))
        warning = growth_warning("training", metrics.first_loss, metrics.last_loss)
        warning += growth_warning("eval", result.eval_loss_before, result.eval_loss_after)
        reporter.print(run_dir.final_message(result.num_steps, num_steps, result.num_skipped, warning))
    return result


@dataclass
class _Loop:
    """The steps of a run whose parts have all been built."""

    config: RunConfig
    run_dir: RunDir
    reporter: Reporter
    callbacks: Callbacks
    tokenizer: Any
    data: RunData
    prompts: SamplePrompts
    intervals: Intervals
    model: Any
    objectives: Objectives
    optimizer: Any
    scheduler: Any
    metrics: Metrics
    last_eval: tuple[int, float | None] = (-1, None)  # step and loss of the last evaluation

    def run(self, interrupts: Interrupts) -> RunResult:
        """Run all steps and export the model."""
        run_dir, callbacks, num_steps = self.run_dir, self.callbacks, self.intervals.num_steps
        tracing = Tracing(self.model, self.config.trace_steps, num_steps, run_dir.trace_file)
        self.reporter.begin(run_dir.metrics_file, num_steps)
        callbacks.begin(
            self.model, self.tokenizer, self.optimizer, self.scheduler, num_steps, self.intervals.steps_per_epoch
        )
        interrupts.finish_steps()
        loss_before, step = self.evaluate(0), 0
        while step < num_steps and not callbacks.control.stop:
            if interrupts.requested:
                self.log(step)
            interrupts.check(step, num_steps, run_dir.kept_artifacts())
            step += 1
            tracing.before_step(step)
            callbacks.before_step(step)
            self.train_step(self.data.loader.batch(step - 1), step)
            callbacks.after_step(step)
            self.finish_step(step)
        tracing.finish(step)
        self.log(step)
        run_dir.export(self.model, self.tokenizer)
        loss_after = self.evaluate(step)
        callbacks.end()
        run_dir.draw_loss()
        self.reporter.stop_bar()
        return RunResult(run_dir.path, run_dir.model_dir, step, loss_before, loss_after, self.optimizer.num_skipped)

    def train_step(self, batch: Batch, step: int) -> None:
        """Run the forward pass, the backward pass and the update of a step."""
        seed_step(self.config.seed, step)
        loss = self.objectives.training(self.model, batch)
        if self.config.update_in_backward:  # the backward pass changes weights, so check the loss before it
            finite_loss(loss, step, batch, self.config, self.run_dir)
        loss.value.backward()
        # Reading the loss waits for the device. Do so after the backward pass is queued, so that the device stays busy.
        value = finite_loss(loss, step, batch, self.config, self.run_dir)
        self.callbacks.before_update()
        update(self.optimizer, step, batch, self.config, self.run_dir, self.reporter)
        self.callbacks.after_update()
        self.metrics.add(value, loss, batch, self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.reporter.advance(value)

    def finish_step(self, step: int) -> None:
        """Log, evaluate, answer prompts and save after a step, where an interval or a callback says so."""
        intervals, callbacks = self.intervals, self.callbacks
        if intervals.logs(step) or callbacks.control.log:
            self.log(step)
        if intervals.evaluates(step) or callbacks.control.evaluate:
            self.evaluate(step)
        if intervals.samples(step) or (callbacks.control.stop and self.config.sample_prompts):
            with self.metrics.exclude_from_timing():
                answers = self.prompts.answer(self.model, step)
            self.run_dir.append_samples(answers)
            self.reporter.show(answers)
        if intervals.saves(step) or callbacks.control.save:
            with self.metrics.exclude_from_timing():
                self.run_dir.save(self.model, self.tokenizer, step)
            callbacks.saved()

    def evaluate(self, step: int) -> float | None:
        """Evaluate unless this step was already evaluated, and return the eval loss; None without an eval set."""
        if self.last_eval[0] != step:
            with self.metrics.exclude_from_timing(), self.reporter.progress("eval set") as advance:
                line = evaluate_rows(
                    self.model, self.objectives.eval_sets, self.data.eval_sets, self.config.per_device_eval_batch_size,
                    step, advance,
                )  # fmt: skip
            self.last_eval = step, None if line is None else line["eval_loss"]
            if line is not None:
                self.record(line)
        return self.last_eval[1]

    def log(self, step: int) -> None:
        """Log the metrics of the steps since the last line, if there are any."""
        if self.metrics.has_steps:
            self.record(self.metrics.line(step, self.optimizer, self.model, self.config.log_unit_grad_norms))

    def record(self, line: dict[str, Any]) -> None:
        """Write a line of metrics and pass it to the callbacks."""
        self.reporter.write(line)
        self.callbacks.logged(line)
