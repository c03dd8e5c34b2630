"""A training run, from its settings to an exported model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from horizon_lm.checkpoints.checkpoint import ARRAYS, read_tensors, restore
from horizon_lm.checkpoints.manifest import is_checkpoint
from horizon_lm.config import RunConfig
from horizon_lm.config.load import as_config
from horizon_lm.data.batch import Batch
from horizon_lm.data.checks import reject_errors
from horizon_lm.device.faults import is_device_fault
from horizon_lm.distributed.mesh import current_shard
from horizon_lm.distributed.rendezvous import failing_together
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError, DeviceFaultError, InterruptedRunError, first_line
from horizon_lm.planning.plan import Plan
from horizon_lm.planning.render import summary_lines
from horizon_lm.preflight.admission import Admission, apply_plan
from horizon_lm.preflight.this_machine import agree_on_machine
from horizon_lm.quantities import format_seconds
from horizon_lm.training.best_model import BestModel
from horizon_lm.training.callbacks import Callbacks, Control
from horizon_lm.training.evaluation import SamplePrompts, evaluate_rows
from horizon_lm.training.first_step import FirstStep
from horizon_lm.training.interrupts import Interrupts
from horizon_lm.training.intervals import Intervals
from horizon_lm.training.last_resort import LastResort
from horizon_lm.training.line_file import LineFile
from horizon_lm.training.metrics import Metrics, Reporter, StepResult, growth_warning
from horizon_lm.training.non_finite import NonFinite, shown_places
from horizon_lm.training.ranks import Ranks
from horizon_lm.training.resume import (
    ResumePoint,
    apply_settings,
    choice_warnings,
    data_position,
    model_settings,
    reading,
    require_same_model,
    require_same_rows,
    rounding_warnings,
    rows_per_step,
    settings_of,
)
from horizon_lm.training.rows import RunData, load_data
from horizon_lm.training.run_checkpoints import RunCheckpoints, write_side_files
from horizon_lm.training.run_dir import RunDir
from horizon_lm.training.second_place import SecondPlace
from horizon_lm.training.seeds import seed_step
from horizon_lm.training.setup import (
    Objectives,
    build_optimizer,
    check_gradients,
    check_weights,
    choose_device,
    has_dropout,
    load_model,
    load_tokenizer,
    make_objectives,
    open_meter,
    require_callable,
    require_sane_schedule,
    reserve_buffers,
)
from horizon_lm.training.spikes import Spikes
from horizon_lm.training.tracing import Tracing
from horizon_lm.training.watchdog import watching


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
        objective: a custom loss; the ``objective`` of the run then only determines how rows are read. A function of the
            streamed model and a `horizon_lm.data.batch.Batch` that returns a scalar tensor, or a tuple of a scalar
            tensor and a dict of metrics.
        callbacks: transformers callbacks, instances or classes, called as a Trainer would call them.
        print_fn: called with each line of progress; None prints to standard output.
        settings: overrides of ``run``, such as ``max_steps=20``.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; its step is not applied. If it is the last evaluation, the
            model has been exported.
        InterruptedRunError: SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGXCPU arrived; the current step was finished.
        Exception: the first error of a callback, after the weights were exported.
    """
    with failing_together():
        config = as_config(run, settings)
        require_callable(objective)
        config = config.model_copy(update={"device": choose_device(config.device)})
    with Ranks.start(config) as ranks:
        return _train(config, ranks, objective, callbacks, print_fn if ranks.is_first else lambda line: None)


def _train(
    config: RunConfig,
    ranks: Ranks,
    objective: Callable[[Any, Batch], Any] | None,
    callbacks: Sequence[Any],
    print_fn: Callable[[str], None] | None,
) -> RunResult:
    given, (point, lines) = config, ranks.find_resume_point(config)
    config = ranks.own_settings(config)
    if point is not None:
        config, changes = apply_settings(config, point, ranks.size)
        lines += changes
    run_dir = RunDir(config, resumes=point is not None)
    handler = Callbacks(config, callbacks)  # first, so that a missing tracker is found before the data is prepared
    with run_dir, Interrupts() as interrupts, Reporter(print_fn) as reporter:
        reporter.print(*lines)
        admission = Admission(config, current_shard(ranks.mesh), ranks.size, partial(agree_on_machine, ranks.mesh))
        admission.reject_if_impossible()
        source = admission.fetch_model()
        tokenizer = load_tokenizer(config, source)
        reporter.print(*check_weights(config, source))
        with ranks.first_of_each_machine_first():
            data = load_data(config, tokenizer, rows_per_step(point, given, ranks.size), ranks.rank, ranks.size)
        ranks.require_same_rows({each.name: (len(each.packed), each.packed.content_hash) for each in data.parts})
        for prepared in data.parts:
            reporter.print(*prepared.lines())
            reject_errors(prepared.findings)
        sampler = data.loader.sampler
        if point is not None:
            position = data_position(data.training.packed, sampler, point.step)
            reporter.print(*require_same_rows(point, position, config))
        num_steps = config.max_steps if config.max_steps > 0 else sampler.num_steps(config.num_train_epochs)
        require_sane_schedule(config, num_steps)
        intervals = Intervals(config, num_steps, sampler.steps_per_epoch)
        prompts = SamplePrompts(config, tokenizer)
        plan = admission.admit(
            data.loader, data.eval_sets.values(), num_steps, intervals.planned_saves(), prompts.longest
        )
        reporter.print(*summary_lines(plan))
        config = apply_plan(config, plan)
        if point is not None:
            reporter.print(*choice_warnings(point, given, config))
        exported = next(item.num_bytes for item in plan.disk.items if item.name == "exported model")
        second = SecondPlace.find(config, exported) if ranks.is_first else SecondPlace()
        run_dir.take()
        reporter.print(f"run folder: {run_dir.path}")
        model = load_model(config, source, point is None, ranks.mesh)
        reserve_buffers(model, plan)
        data.loader.pads_to_step = has_dropout(model)
        if point is not None:
            reporter.print(*require_same_model(point, model_settings(model), config))
        optimizer, scheduler = build_optimizer(model, config, num_steps)
        metrics = Metrics(num_steps, sampler.steps_per_epoch, plan, open_meter(model))
        reference = None
        if point is not None:
            restore(point.folder, point.manifest, model, optimizer)
            reference = read_tensors(point.folder / ARRAYS)
            with reading(point):
                scheduler.load_state_dict(point.state["scheduler"])
                metrics.load_state_dict(point.state["metrics"])
        run_dir.begin(config, plan)
        objectives = make_objectives(config, model, data, reporter, objective, reference)
        check_gradients(model, objectives, data.loader.batch(0), config, reporter)
        checkpoints = RunCheckpoints(
            config, run_dir.path, reporter.print, model, optimizer,
            lambda part: write_side_files(part, tokenizer, run_dir.settings), objectives.reference, point, ranks,
        )  # fmt: skip
        result = _Loop(
            given, config, run_dir, reporter, handler, tokenizer, data, prompts, intervals, model, objectives, optimizer, scheduler,
            metrics, interrupts, checkpoints, BestModel(config), admission, ranks, second,
        ).run(point)  # fmt: skip
        if config.push_to_hub:
            reporter.print(run_dir.push(config))
        warning = growth_warning("training", metrics.totals.first_loss, metrics.totals.last_loss)
        warning += growth_warning("eval", result.eval_loss_before, result.eval_loss_after)
        reporter.print(run_dir.final_message(result.num_steps, num_steps, result.num_skipped, warning))
    return result


@dataclass
class _Loop:
    """The steps of a run whose parts have all been built."""

    given: RunConfig  # as the user has set it
    config: RunConfig  # with the plan's choices
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
    interrupts: Interrupts
    checkpoints: RunCheckpoints
    best: BestModel
    admission: Admission
    ranks: Ranks
    second: SecondPlace
    last_eval: tuple[int, float | None] = (-1, None)  # step and loss of the last evaluation
    loss_before: float | None = None  # eval loss before the first step
    finished: bool = True  # logging, evaluating and saving are over after the last step

    def __post_init__(self) -> None:
        self.spikes = Spikes()
        self.first_step = FirstStep(self.model, self.optimizer, self.admission, self.reporter, self.ranks.mesh is None)
        self.non_finite = NonFinite(
            self.model, self.objectives.training, self.tokenizer, self.config, self.run_dir, self.reporter, self.ranks
        )

    def run(self, point: ResumePoint | None) -> RunResult:
        """Run all steps, those after a checkpoint if there is one, and export the model."""
        run_dir, callbacks, num_steps = self.run_dir, self.callbacks, self.intervals.num_steps
        tracing = Tracing(self.model, self.config.trace_steps, num_steps, run_dir.trace_file)
        self.metrics_file = LineFile(run_dir.metrics_file)
        step = 0 if point is None else self.restore(point)
        self.reporter.begin(self.metrics_file, num_steps)
        callbacks.begin(
            self.model, self.tokenizer, self.optimizer, self.scheduler, num_steps, self.intervals.steps_per_epoch,
            self.reporter.print, None if point is None else point.state["callbacks"], step,
        )  # fmt: skip
        self.interrupts.finish_steps(self.kept_artifacts)
        if point is None:
            self.loss_before = self.evaluate(0)
        elif not self.finished:
            self.finish_step(step)
        first = step + 1
        self.ranks.train_in_step()
        while step < num_steps and not self.control.stop and not self.best.stops:
            self.stop_if_interrupted(step)
            step += 1
            with self.reporter.attempt("trace.json"):
                tracing.before_step(step)
            callbacks.before_step(step)
            with (
                self.saving_on_fault(step - 1),
                watching(f"step {step}", self.config.step_timeout, engine_of(self.model).cursor.describe_unfinished),
            ):
                self.run_step(step, is_first=step == first)
            callbacks.after_step(step)
            self.finish_step(step)
        with self.reporter.attempt("trace.json"):
            tracing.finish(step)
        self.log(step)
        if callbacks.error is not None and step < num_steps:
            if self.config.save_only_model or self.keep_checkpoint(step) is None:
                self.export(step)
            self.raise_callback_error(step, callbacks.error)
        if self.config.load_best_model_at_end:
            self.load_best_model(step)
        self.checkpoints.wait()
        self.export(step)
        loss_after = self.evaluate(step)
        callbacks.end()
        with self.reporter.attempt("loss.png"):
            run_dir.draw_loss()
        self.reporter.stop_bar()
        if callbacks.error is not None:
            self.raise_callback_error(step, callbacks.error)
        return RunResult(
            run_dir.path, run_dir.model_dir, step, self.loss_before, loss_after, self.optimizer.num_skipped
        )

    @property
    def control(self) -> Control:
        """The actions that callbacks request now, on any rank; any event may change them."""
        return self.ranks.agree_on_control(self.callbacks.control)

    def restore(self, point: ResumePoint) -> int:
        """Take over the state of the loop from a checkpoint, and return the number of steps that are done."""
        with reading(point):
            state = point.state
            self.loss_before, self.last_eval = state["loss_before"], tuple(state["last_eval"])
            self.finished = state["finished"]
            self.best.load_state_dict(state["best"])
            self.spikes.load_state_dict(state["spikes"])
            if self.config.load_best_model_at_end and self.best.step:
                best = point.folder.with_name(f"checkpoint-{self.best.step}")
                if is_checkpoint(best):
                    self.checkpoints.best = best
                else:
                    self.reporter.print(f"resume: warning: {best}, the best one so far, is missing")
            for file in (self.metrics_file, self.run_dir.samples):
                if not file.cut_to(state["files"][file.path.name]):
                    self.reporter.print(f"resume: {file.path} has changed since, so its lines are set aside")
                    file.set_aside()
            return point.step

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the loop after a step as plain data, for `restore`."""
        return {
            "step": step,
            "rows_per_step": self.data.loader.sampler.rows_per_step,
            "num_steps": self.intervals.num_steps,
            "finished": self.finished,
            "config": settings_of(self.given),
            "settled": settings_of(self.config),
            "model_config": model_settings(self.model),
            "data": data_position(self.data.training.packed, self.data.loader.sampler, step),
            "scheduler": self.scheduler.state_dict(),
            "metrics": self.metrics.state_dict(),
            "spikes": self.spikes.state_dict(),
            "files": {file.path.name: file.position() for file in (self.metrics_file, self.run_dir.samples)},
            "callbacks": self.callbacks.state_dict(),
            "loss_before": self.loss_before,
            "last_eval": self.last_eval,
            "best": self.best.state_dict(),
        }

    def save(self, step: int, best: bool = False) -> None:
        """Begin to write a checkpoint, or export the model with ``save_only_model``."""
        with self.metrics.exclude_from_timing(), self.reporter.attempt(f"saving checkpoint-{step}"):
            if self.config.save_only_model:
                if line := self.run_dir.save(self.model, self.tokenizer, step, self.ranks):
                    self.reporter.print(line)
            else:
                self.checkpoints.save(step, self.state(step), best)

    def stop_if_interrupted(self, step: int) -> None:
        """Save, log the steps so far and raise InterruptedRunError if a signal has arrived, at any rank."""
        self.interrupts.requested = self.ranks.agree("the end of a step", self.interrupts.requested)
        if self.interrupts.requested:
            if self.config.save_on_signal and step > 0 and not self.run_dir.is_exported:
                self.save_before_deadline(step)
            self.log(step)
            kept = self.ranks.of_first("what the run leaves", self.interrupts.kept())
            self.interrupts.check(f"after step {step} of {self.intervals.num_steps}", kept)

    def save_before_deadline(self, step: int) -> None:
        """Write a checkpoint after a signal, unless it would take longer than ``save_on_signal_seconds``."""
        limit = self.config.save_on_signal_seconds
        expected = self.ranks.of_first("the expected time of a checkpoint", self.checkpoints.seconds())
        if limit is not None and expected is not None and expected > limit:
            self.reporter.print(
                f"no checkpoint of step {step}: it would take about {format_seconds(expected)}, and save_on_signal_seconds is "
                f"{limit:g}"
            )
            self.checkpoints.wait(limit)  # one that is being written already may still be in time
            return
        if limit is None and not self.config.save_only_model:
            self.keep_checkpoint(step)
            return
        self.save(step)
        self.checkpoints.wait(limit)

    def load_best_model(self, step: int) -> None:
        """Load the weights of the best evaluation, unless they are the last ones."""
        with self.saving_on_fault(step):
            self.evaluate(step)
        self.checkpoints.wait()
        is_last = self.best.step == step or self.checkpoints.best is None
        folder = self.ranks.of_first("the best model", None if is_last else str(self.checkpoints.best))
        if folder is None:
            return
        if (last := self.keep_checkpoint(step)) is None:
            self.reporter.print(
                f"warning: the last model cannot be kept beside the best one, so it is exported; for the best one, run "
                f"horizon-lm export {folder} OUT"
            )
            return
        self.reporter.print(f"loading the best model, {folder}")
        try:
            self.checkpoints.load(Path(folder), last)
        except (ConfigError, OSError) as error:
            self.reporter.print(f"warning: {first_line(error)}; the last model is exported instead")

    def kept_artifacts(self) -> str:
        """Return a sentence about what is kept when the run ends early."""
        return self.run_dir.kept_artifacts(self.checkpoints.last)

    def export(self, step: int) -> None:
        """Export the trained model. Its weights are never given up."""
        LastResort(
            self.run_dir, self.second, self.ranks, self.reporter.print, lambda: self.interrupts.requested,
            lambda: self.keep_checkpoint(step), lambda: self.checkpoints.last,
        ).export(self.model, self.tokenizer)  # fmt: skip

    def keep_checkpoint(self, step: int) -> Path | None:
        """Write a checkpoint in the run's folder or the second place. Return its folder; None if it cannot be written."""
        return self.checkpoints.keep(step, self.state(step), self.second.path(f"checkpoint-{step}"))

    @contextmanager
    def saving_on_fault(self, done: int) -> Iterator[None]:
        """Context manager: if a step fails, save the state after the steps that are done, without a device that has failed.

        Raises:
            DeviceFaultError: the device has failed. Other errors are raised with a note about what is kept.
        """
        optimizer, before = self.optimizer, (self.optimizer.num_steps, self.optimizer.num_skipped)
        try:
            yield
        except Exception as error:
            lost = is_device_fault(error)
            with self.reporter.attempt("saving after the fault"):
                if lost:
                    engine_of(self.model).settle_without_device()
                # A step whose update has begun is neither done nor undone for the loop.
                is_whole = not optimizer.partial_update and before == (optimizer.num_steps, optimizer.num_skipped)
                if done and is_whole and self.ranks.mesh is None:  # other ranks may be gone, or elsewhere
                    if self.config.save_only_model:
                        self.save(done)
                    else:
                        self.keep_checkpoint(done)
            if lost:
                problem = f"the device failed after step {done} ({type(error).__name__}: {first_line(error)})"
                raise DeviceFaultError(f"{problem}. {self.kept_artifacts()}") from error
            if not isinstance(error, InterruptedRunError):
                error.add_note(self.kept_artifacts())
            raise

    def raise_callback_error(self, step: int, error: BaseException) -> NoReturn:
        """Raise the error of a user's callback with a note about what is kept."""
        error.add_note(f"The training ended after step {step} of {self.intervals.num_steps}. {self.kept_artifacts()}")
        raise error

    def run_step(self, step: int, is_first: bool) -> None:
        """Run a step. The first one of this process is run once more with a smaller plan if it does not fit."""
        train_step = partial(self.train_step, self.data.loader.batch(step - 1), step)
        if not is_first:
            train_step()
            return
        plan = self.first_step.run(train_step, step, self.metrics.plan)
        if plan is not self.metrics.plan:
            self.use_plan(plan, step)

    def use_plan(self, plan: Plan, step: int) -> None:
        """Record the smaller plan with which a step was run, for the rest of the run."""
        before, self.config, self.metrics.plan = self.config, apply_plan(self.config, plan), plan
        if step > 1:
            self.reporter.print(*rounding_warnings(settings_of(before), settings_of(self.config)))
        with self.reporter.attempt("plan.json"):
            self.run_dir.write_settings(self.config, plan)

    def train_step(self, batch: Batch, step: int) -> None:
        """Run the forward pass, the backward pass and the update of a step."""
        seed_step(self.config.seed, step)
        batch = self.ranks.with_totals(batch)
        loss = self.objectives.training(self.model, batch)
        if self.config.update_in_backward:  # the backward pass changes weights, so check the loss before it
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
            value / self.ranks.size, loss, batch, self.config.per_device_train_batch_size, self.metrics.energy()
        )
        self.metrics.add(self.ranks.total(own), self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.reporter.advance(value)

    def finish_step(self, step: int) -> None:
        """Log, evaluate, answer prompts and save after a step, as requested by intervals and callbacks."""
        intervals, callbacks = self.intervals, self.callbacks
        self.finished = False
        if intervals.logs(step) or self.control.log:
            self.log(step)
        if intervals.evaluates(step) or self.control.evaluate:
            self.evaluate(step)
        if intervals.samples(step) or (self.control.stop and self.config.sample_prompts):
            self.stop_if_interrupted(step)
            with self.metrics.exclude_from_timing(), self.reporter.attempt("answering sample_prompts"):
                answers = self.prompts.answer(self.model, step)
                self.reporter.show(answers)
                self.run_dir.append_samples(answers)
        self.finished = True
        if intervals.saves(step) or self.control.save:
            self.save(step)
            callbacks.saved()
        self.checkpoints.report()

    def evaluate(self, step: int) -> float | None:
        """Evaluate unless this step was already evaluated. Return the eval loss, or None without an eval set."""
        if self.last_eval[0] != step:
            with self.metrics.exclude_from_timing(), self.reporter.progress("eval set") as advance:

                def between_batches(done: int, total: int) -> None:
                    advance(done, total)
                    if done < total:
                        self.stop_if_interrupted(step)

                line = evaluate_rows(
                    self.model, self.objectives.eval_sets, self.data.eval_sets, self.config.per_device_eval_batch_size,
                    step, between_batches, self.ranks,
                )  # fmt: skip
            self.last_eval = step, None if line is None else line["eval_loss"]
            if line is not None:
                self.record(line)
                if self.best.update(line) and self.config.load_best_model_at_end and step < self.intervals.num_steps:
                    self.save(step, best=True)
        return self.last_eval[1]

    def log(self, step: int) -> None:
        """Log the metrics of the steps since the last line, if there are any."""
        if self.metrics.has_steps:
            self.record(self.metrics.line(step, self.optimizer, self.model, self.config.log_unit_grad_norms))

    def record(self, line: dict[str, Any]) -> None:
        """Write a line of metrics and pass it to the callbacks."""
        self.reporter.write(line)
        self.callbacks.logged(line)
