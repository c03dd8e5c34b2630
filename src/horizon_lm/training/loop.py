"""A training run, from its settings to a model in a folder."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.config.file import as_config
from horizon_lm.data.audit import refuse
from horizon_lm.data.loader import Batch
from horizon_lm.errors import NonFiniteError, NonFiniteWarning
from horizon_lm.objective.base import Loss, Objective, OwnObjective
from horizon_lm.plan.text import summary_lines
from horizon_lm.preflight.admission import Admission
from horizon_lm.preflight.run import settle
from horizon_lm.training.calendar import Calendar
from horizon_lm.training.callbacks import Callbacks, Wishes
from horizon_lm.training.evaluation import evaluate, sample
from horizon_lm.training.folder import RunFolder
from horizon_lm.training.interrupts import Interrupts
from horizon_lm.training.metrics import Metrics, Reporter
from horizon_lm.training.objectives import Objectives, make_objectives
from horizon_lm.training.setup import RunData, build_optimizer, choose_device, load_data, load_model, load_tokenizer
from horizon_lm.training.tracing import Tracing


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left.

    Attributes:
        output_dir, model_dir: its folder, and that of the trained model.
        num_steps: optimizer steps.
        eval_loss_before, eval_loss_after: held-out loss; None without held-out rows.
    """

    output_dir: Path
    model_dir: Path
    num_steps: int
    eval_loss_before: float | None
    eval_loss_after: float | None


def train(
    run: RunConfig | Mapping[str, Any] | str | Path,
    *,
    objective: Callable[[Any, Batch], Any] | None = None,
    callbacks: Sequence[Any] = (),
    say: Callable[[str], None] | None = None,
) -> RunResult:
    """Train a model and export it to ``<output_dir>/model``.

    Args:
        run: its settings, or the YAML file that has them.
        objective: a loss of your own in the place of that of the run's ``objective``, which still says how rows are read:
            given the streamed model and a `horizon_lm.data.loader.Batch` with the rows of a step, it returns a scalar tensor,
            or that and a dict of numbers to log.
        callbacks: of transformers, instances or classes; they are told what a Trainer would tell them.
        say: prints a line of progress; None for standard output.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; the step is not applied, and nothing is exported.
        InterruptedRunError: SIGINT or SIGTERM, at the end of a step.
    """
    config = as_config(run)
    config = config.model_copy(update={"device": choose_device(config.device)})
    folder = RunFolder(config)
    with Interrupts() as interrupts, Reporter(say) as reporter:
        reporter.say(f"run folder: {folder.path}")
        admission = Admission(config)
        admission.refuse_hopeless()
        tokenizer = load_tokenizer(config)
        data = load_data(config, tokenizer)
        for prepared in data.parts:
            for line in prepared.lines():
                reporter.say(line)
            refuse(prepared.findings)
        sampler = data.loader.sampler
        num_steps = config.max_steps if config.max_steps > 0 else sampler.num_steps(config.num_train_epochs)
        calendar = Calendar(config, num_steps, sampler.steps_per_epoch)
        plan = admission.admit(data.loader, data.held_out.values(), num_steps, calendar.num_saves())
        for line in summary_lines(plan):
            reporter.say(line)
        config = settle(config, plan)
        listeners = Callbacks(config, callbacks, num_steps, sampler.steps_per_epoch)
        folder.begin(config, plan)
        model = load_model(config)
        objectives = make_objectives(config, model, data, reporter)
        optimizer, scheduler = build_optimizer(model, config, num_steps)
        loop = _Loop(
            config, folder, reporter, listeners, tokenizer, data, calendar, model, objectives,
            OwnObjective(objective) if objective is not None else objectives.training, optimizer, scheduler,
            Metrics(num_steps, sampler.steps_per_epoch, plan),
        )  # fmt: skip
        result = loop.run(interrupts, num_steps)
        if config.push_to_hub:
            reporter.say(folder.push(config))
        reporter.say(folder.how_to_use())
    return result


@dataclass(frozen=True)
class _Loop:
    """A run whose parts are all there."""

    config: RunConfig
    folder: RunFolder
    reporter: Reporter
    listeners: Callbacks
    tokenizer: Any
    data: RunData
    calendar: Calendar
    model: Any
    objectives: Objectives
    learn: Objective
    optimizer: Any
    scheduler: Any
    metrics: Metrics

    def run(self, interrupts: Interrupts, num_steps: int) -> RunResult:
        """All steps, and the export."""
        folder, listeners = self.folder, self.listeners
        tracing = Tracing(self.model, self.config.trace_steps, num_steps, folder.trace_file)
        self.reporter.begin(folder.metrics_file, num_steps)
        interrupts.wait_for_boundary()
        loss_before = self.hold_out(0)
        listeners.begin(self.model, self.tokenizer, self.optimizer, self.scheduler)
        step, stop = 0, False
        while step < num_steps and not stop:
            interrupts.check(step, num_steps, folder.metrics_file)
            step += 1
            tracing.before_step(step)
            listeners.before_step(step)
            self.learn_from(self.data.loader.batch(step - 1), step)
            wishes = listeners.after_step(step)
            stop = wishes.stop
            self.finish_step(step, wishes)
        tracing.finish(step)
        loss_after = self.hold_out(step)
        folder.export(self.model, self.tokenizer)
        listeners.end()
        folder.draw_loss()
        self.reporter.stop_bar()
        return RunResult(folder.path, folder.model_dir, step, loss_before, loss_after)

    def learn_from(self, batch: Batch, step: int) -> None:
        """Forward, backward and update."""
        loss = self.learn(self.model, batch)
        self.metrics.add(finite(loss, step, batch, self.config, self.folder), loss, batch)
        loss.value.backward()
        self.listeners.before_update()
        update(self.optimizer, step, batch, self.folder, self.reporter)

    def finish_step(self, step: int, wishes: Wishes) -> None:
        """What is due after a step, by the calendar or because a callback wishes for it."""
        config, calendar = self.config, self.calendar
        if calendar.logs(step) or wishes.log or wishes.stop:
            learning_rate = self.scheduler.get_last_lr()[0]
            self.record(self.metrics.line(step, self.optimizer, learning_rate, self.model, config.log_unit_grad_norms))
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.reporter.advance(self.metrics.last_loss)
        if calendar.evaluates(step) or wishes.evaluate:
            self.hold_out(step)
        if calendar.samples(step) or (wishes.stop and config.sample_prompts):
            answers = sample(self.model, self.tokenizer, config, step)
            self.folder.keep_samples(answers)
            self.reporter.tell(answers)
        if calendar.saves(step) or wishes.save:
            self.folder.save(self.model, self.tokenizer, step)
            self.listeners.saved()

    def hold_out(self, step: int) -> float | None:
        """Evaluate on held-out rows; their loss, or None without any."""
        batch_size = self.config.per_device_eval_batch_size
        line = evaluate(self.model, self.objectives.held_out, self.data.held_out, batch_size, step)
        if line is None:
            return None
        self.record(line)
        return float(line["eval_loss"])

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics, for everybody who listens."""
        self.reporter.write(line)
        self.listeners.logged(line)


def finite(loss: Loss, step: int, batch: Batch, config: RunConfig, folder: RunFolder) -> float:
    """The loss as a number; NonFiniteError if it is NaN or infinite, unless such steps are left out."""
    value = float(loss.value.item())
    if not math.isfinite(value) and config.non_finite == "raise":
        raise NonFiniteError(_non_finite(f"the loss is {value}", step, batch, folder))
    return value


def update(optimizer: Any, step: int, batch: Batch, folder: RunFolder, reporter: Reporter) -> None:
    """An optimizer step; it refuses gradients that are not finite, and this tells where they come from."""
    try:
        skipped = optimizer.num_skipped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, with the rows
            optimizer.step()
    except NonFiniteError as error:
        if optimizer.torn:
            raise NonFiniteError(f"{error} Rows of this step: {_places(batch)}") from error
        raise NonFiniteError(_non_finite("the gradient is not finite", step, batch, folder)) from error
    if optimizer.num_skipped > skipped:
        reporter.say(f"step {step}: skipped, because the gradient is not finite. Its rows: {_places(batch)}")


def _places(batch: Batch) -> str:
    return ", ".join(batch.places[:8]) + (", ..." if len(batch.places) > 8 else "")


def _non_finite(what: str, step: int, batch: Batch, folder: RunFolder) -> str:
    before = f"as step {step - 1} left them" if step > 1 else "as they were loaded"
    remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
    return (
        f"step {step}: {what}. The weights are {before}, nothing was exported, and the metrics so far are in "
        f"{folder.metrics_file}. Remedy: {remedy}, or look at the rows of this step: {_places(batch)}"
    )
