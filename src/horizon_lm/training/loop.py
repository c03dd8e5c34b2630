"""A training run, from its settings to a model in a folder."""

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
from horizon_lm.training.evaluation import Prompts, evaluate_rows
from horizon_lm.training.interrupts import Interrupts
from horizon_lm.training.metrics import Metrics, Reporter
from horizon_lm.training.non_finite import finite, update
from horizon_lm.training.rows import RunData, load_data
from horizon_lm.training.run_dir import RunDir
from horizon_lm.training.setup import (
    Objectives,
    build_optimizer,
    check_gradients,
    check_weights,
    choose_device,
    expect,
    in_steps,
    load_model,
    load_tokenizer,
    make_objectives,
    require_callable,
)
from horizon_lm.training.tracing import Tracing


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step.

    The first 32-bit word of numpy's ``SeedSequence((seed, step))``. Given to `transformers.set_seed`, it makes plain Hugging
    Face draw the same dropout in a step of one micro-batch.

    Args:
        seed: of the run.
        step: from 1.
    """
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


def seed_step(seed: int, step: int) -> None:
    """Seed the generators of Python, numpy and torch, on the host and on all devices, for a step of a run."""
    from transformers import set_seed

    set_seed(step_seed(seed, step))


@dataclass(frozen=True, slots=True)
class Intervals:
    """The steps after which a run logs, evaluates, saves and answers sample prompts. Steps count from 1."""

    config: RunConfig
    num_steps: int
    steps_per_epoch: int

    @property
    def log_every(self) -> int:
        return self._interval(self.config.logging_steps)

    def logs(self, step: int) -> bool:
        return step in (1, self.num_steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """The end of the run is not asked: it evaluates in any case."""
        config = self.config
        return self._due(config.eval_strategy, config.eval_steps or config.logging_steps, step)

    def saves(self, step: int) -> bool:
        """The end of the run is not asked: it exports in any case."""
        return self._due(self.config.save_strategy, self.config.save_steps, step)

    def samples(self, step: int) -> bool:
        return self.config.sample_prompts is not None and (
            step == self.num_steps or step % self._interval(self.config.sample_steps) == 0
        )

    def num_saves(self) -> int:
        """Exports on the way that are there at once, at most."""
        count = sum(map(self.saves, range(1, self.num_steps + 1)))
        return min(count, self.config.save_total_limit or count)

    def _due(self, strategy: str, interval: float, step: int) -> bool:
        if strategy == "no" or step == self.num_steps:
            return False
        return step % (self.steps_per_epoch if strategy == "epoch" else self._interval(interval)) == 0

    def _interval(self, number_or_share: float) -> int:
        return max(1, in_steps(number_or_share, self.num_steps))


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left.

    Attributes:
        output_dir, model_dir: its folder, and that of the trained model.
        num_steps: optimizer steps; eval_loss_before, eval_loss_after: held-out loss, None without held-out rows.
        num_skipped: steps left out because their gradient was not finite.
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
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> RunResult:
    """Train a model and export it to ``<output_dir>/model``.

    Args:
        run: its settings, or the YAML file that has them.
        objective: a loss of your own in the place of that of the run's ``objective``, which still says how rows are read:
            given the streamed model and a `horizon_lm.data.loader.Batch`, it returns a scalar tensor, or that and numbers.
        callbacks: of transformers, instances or classes; they are told what a Trainer would tell them.
        say: prints a line of progress; None for standard output.
        settings: that win over those of ``run``, such as ``max_steps=20``.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite: the step is not applied. After the last step the model is there.
        InterruptedRunError: SIGINT or SIGTERM, at the end of a step.
    """
    config = as_config(run, settings)
    require_callable(objective)
    config = config.model_copy(update={"device": choose_device(config.device)})
    folder = RunDir(config)
    with Interrupts() as interrupts, Reporter(say) as reporter:
        admission = Admission(config)
        admission.reject_if_impossible()
        tokenizer = load_tokenizer(config)
        reporter.say(*check_weights(config))
        data = load_data(config, tokenizer)
        for prepared in data.parts:
            reporter.say(*prepared.lines())
            reject_errors(prepared.findings)
        sampler = data.loader.sampler
        num_steps = config.max_steps if config.max_steps > 0 else sampler.num_steps(config.num_train_epochs)
        intervals = Intervals(config, num_steps, sampler.steps_per_epoch)
        prompts = Prompts(config, tokenizer)
        plan = admission.admit(data.loader, data.held_out.values(), num_steps, intervals.num_saves(), prompts.longest)
        reporter.say(*summary_lines(plan))
        config = apply_plan(config, plan)
        listeners = Callbacks(config, callbacks, num_steps, sampler.steps_per_epoch)
        folder.begin(config, plan)
        reporter.say(f"run folder: {folder.path}")
        model = load_model(config)
        expect(model, plan)
        objectives = make_objectives(config, model, data, reporter, objective)
        check_gradients(model, objectives, data.loader.batch(0), config, reporter)
        optimizer, scheduler = build_optimizer(model, config, num_steps)
        result = _Loop(
            config, folder, reporter, listeners, tokenizer, data, prompts, intervals, model, objectives, optimizer, scheduler,
            Metrics(num_steps, sampler.steps_per_epoch, plan),
        ).run(interrupts)  # fmt: skip
        if config.push_to_hub:
            reporter.say(folder.push(config))
        reporter.say(folder.final_message(result.num_steps, num_steps, result.num_skipped))
    return result


@dataclass
class _Loop:
    """A run whose parts are all there."""

    config: RunConfig
    folder: RunDir
    reporter: Reporter
    listeners: Callbacks
    tokenizer: Any
    data: RunData
    prompts: Prompts
    intervals: Intervals
    model: Any
    objectives: Objectives
    optimizer: Any
    scheduler: Any
    metrics: Metrics
    last_eval: tuple[int, float | None] = (-1, None)  # the last evaluation: after which step, and its loss

    def run(self, interrupts: Interrupts) -> RunResult:
        """All steps, and the export."""
        folder, listeners, num_steps = self.folder, self.listeners, self.intervals.num_steps
        tracing = Tracing(self.model, self.config.trace_steps, num_steps, folder.trace_file)
        self.reporter.begin(folder.metrics_file, num_steps)
        listeners.begin(self.model, self.tokenizer, self.optimizer, self.scheduler)
        interrupts.wait_for_boundary()
        loss_before, step = self.evaluate(0), 0
        while step < num_steps and not listeners.control.stop:
            if interrupts.requested:
                self.log(step)
            interrupts.check(step, num_steps, folder.kept_artifacts())
            step += 1
            tracing.before_step(step)
            listeners.before_step(step)
            self.train_step(self.data.loader.batch(step - 1), step)
            listeners.after_step(step)
            self.finish_step(step)
        tracing.finish(step)
        self.log(step)
        folder.export(self.model, self.tokenizer)
        loss_after = self.evaluate(step)
        listeners.end()
        folder.draw_loss()
        self.reporter.stop_bar()
        return RunResult(folder.path, folder.model_dir, step, loss_before, loss_after, self.optimizer.num_skipped)

    def train_step(self, batch: Batch, step: int) -> None:
        """Forward, backward and update."""
        seed_step(self.config.seed, step)
        loss = self.objectives.training(self.model, batch)
        if self.config.update_in_backward:  # it changes weights
            finite(loss, step, batch, self.config, self.folder)
        loss.value.backward()
        # To read the loss waits for the device; before the backward, nothing would be enqueued meanwhile.
        value = finite(loss, step, batch, self.config, self.folder)
        self.listeners.before_update()
        update(self.optimizer, step, batch, self.config, self.folder, self.reporter)
        self.listeners.after_update()
        self.metrics.add(value, loss, batch, self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.reporter.advance(value)

    def finish_step(self, step: int) -> None:
        """What is due after a step, at its interval or because a callback asked for it."""
        intervals, listeners = self.intervals, self.listeners
        if intervals.logs(step) or listeners.control.log:
            self.log(step)
        if intervals.evaluates(step) or listeners.control.evaluate:
            self.evaluate(step)
        if intervals.samples(step) or (listeners.control.stop and self.config.sample_prompts):
            with self.metrics.exclude_from_timing():
                answers = self.prompts.answer(self.model, step)
            self.folder.keep_samples(answers)
            self.reporter.tell(answers)
        if intervals.saves(step) or listeners.control.save:
            with self.metrics.exclude_from_timing():
                self.folder.save(self.model, self.tokenizer, step)
            listeners.saved()

    def evaluate(self, step: int) -> float | None:
        """The loss of held-out rows, None without any; once a step."""
        if self.last_eval[0] != step:
            rows, batch_size = self.data.held_out, self.config.per_device_eval_batch_size
            with self.metrics.exclude_from_timing(), self.reporter.progress("held-out rows") as advance:
                line = evaluate_rows(self.model, self.objectives.held_out, rows, batch_size, step, advance)
            self.last_eval = step, None if line is None else line["eval_loss"]
            if line is not None:
                self.record(line)
        return self.last_eval[1]

    def log(self, step: int) -> None:
        """What was measured since the last time, if there was a step."""
        if self.metrics.has_steps:
            self.record(self.metrics.line(step, self.optimizer, self.model, self.config.log_unit_grad_norms))

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics, for everybody who listens."""
        self.reporter.write(line)
        self.listeners.logged(line)
