"""A training run, from its settings to an exported model: prepare it, build its parts, and run its loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from horizon_lm.common.visible import announced
from horizon_lm.distributed.rendezvous import failing_together
from horizon_lm.engine.streamed import engine_of
from horizon_lm.model.generation import add_end_tokens
from horizon_lm.model.positions import Positions, positions_of
from horizon_lm.planning.arithmetic.render import summary_lines
from horizon_lm.planning.arithmetic.residency import ExpectedBatch
from horizon_lm.runs.admission.run_plan import Admission, apply_plan
from horizon_lm.runs.admission.this_machine import agree_on_machine
from horizon_lm.runs.checkpoints.checkpoint import ARRAYS, read_tensors, restore
from horizon_lm.runs.config import RunConfig, TextConfig
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.findings import reject_errors
from horizon_lm.runs.data.vision import Vision, vision_of
from horizon_lm.runs.training import resume, setup
from horizon_lm.runs.training.best_model import require_known_metric
from horizon_lm.runs.training.callbacks import Callbacks
from horizon_lm.runs.training.exported_model import final_message, push, require_login
from horizon_lm.runs.training.interrupts import Interrupts
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.loop import Loop
from horizon_lm.runs.training.metrics import Metrics
from horizon_lm.runs.training.metrics_text import growth_warning
from horizon_lm.runs.training.objectives import make_objectives, require_callable
from horizon_lm.runs.training.optimizer import SchedulePosition, build_optimizer, require_sane_schedule
from horizon_lm.runs.training.packed_images import require_packable_rows
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.reporter import Reporter
from horizon_lm.runs.training.rows import RunData, load_data, require_rows
from horizon_lm.runs.training.run import Run, RunResult, RunSettings, Session, Training
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.run_state import ResumePoint, RunState
from horizon_lm.runs.training.samples import SamplePrompts, end_line


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
            streamed model and a `horizon_lm.runs.data.batch.Batch` that returns a scalar tensor, or a tuple of a scalar
            tensor and a dict of metrics.
        callbacks: transformers callbacks, instances or classes, called as a Trainer would call them.
        print_fn: called with each line of progress, by another thread during a step that takes long; None prints to
            standard output.
        settings: overrides of ``run``, such as ``max_steps=20``.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; its step is not applied. If it is the last evaluation, the
            model has been exported.
        InterruptedRunError: SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGXCPU arrived; the current step was finished.
        Exception: the first error of a callback, after the weights were exported.

    Examples:
        >>> run = {"objective": "sft", "model_name_or_path": "tiny-llama", "datasets": ["train.jsonl"], "output_dir": "run"}
        >>> result = horizon_lm.train(run, max_steps=2, device="cpu", print_fn=lambda line: None)
        >>> result.num_steps
        2
    """
    with failing_together():
        given = as_config(run, settings)
        require_callable(objective)
        given = given.model_copy(update={"device": setup.choose_device(given.device)})
    with Ranks.start(given) as ranks:
        point, lines = ranks.find_resume_point(given)
        config = given
        if point is not None:
            config, changes = resume.apply_settings(given, point, ranks.size)
            lines += changes
        run_dir = RunDir(config, ranks, resumes=point is not None)
        if config.push_to_hub and ranks.is_first:
            require_login()
        # First, so that a missing tracker is found before the data is prepared.
        handler = Callbacks(config, callbacks, ranks.is_first)
        print_fn = print_fn if ranks.is_first else lambda line: None
        with run_dir, Interrupts() as interrupts, Reporter(print_fn) as reporter:
            reporter.print(*lines)
            prepared = prepare(Session(ranks, run_dir, handler, interrupts, reporter), given, point, config)
            training = build(prepared, objective)
            result = Loop(prepared, training).run()
            if config.push_to_hub and ranks.is_first:
                reporter.print(push(config, result.model_dir))
            losses = training.metrics.totals
            warning = growth_warning("training", losses.first_loss, losses.last_loss)
            warning += growth_warning("eval", result.eval_loss_before, result.eval_loss_after)
            reporter.print(final_message(config, prepared, result, warning))
    return result


def prepare(session: Session, given: RunConfig, point: ResumePoint | None, config: RunConfig) -> Run:
    """Read the rows of a run and plan it, before its model is loaded. Lock its folder once the plan fits.

    Args:
        session: the surroundings of the run.
        given: the settings as the user has set them.
        point: the checkpoint to go on from; None for a new run.
        config: the settings with the choices of the checkpoint.

    Raises:
        ConfigError, DataError, DoesNotFitError: the run cannot be trained.
    """
    ranks, reporter = session.ranks, session.reporter
    require_known_metric(config)
    admission = Admission(config, ranks.mesh.shard, ranks.size, partial(agree_on_machine, ranks.mesh))
    admission.reject_if_impossible()
    if admission.downloads_model:
        with ranks.first_of_each_machine_first():
            require_rows(config)  # before the long download
    source = admission.fetch_model()
    assert source.folder is not None
    weights, changes = resume.starting_weights(point, source.folder, given)
    reporter.print(*changes)
    tokenizer = setup.load_tokenizer(config, source)
    reporter.print(*setup.check_weights(config, source))
    day = ranks.of_first("the date of the run", resume.day_of_run(point))
    vision = vision_of(source, config.image_max_pixels, config.image_min_pixels)
    data = _read_rows(session, given, point, config, tokenizer, vision, positions_of(source.skeleton()), day)
    sampler = data.loader.sampler
    num_steps = config.max_steps if config.max_steps > 0 else sampler.num_steps(config.num_train_epochs)
    require_sane_schedule(config, num_steps)
    intervals = Intervals(config, num_steps, sampler.steps_per_epoch)
    prompts = SamplePrompts(config, tokenizer, day)
    with announced("planning...") if ranks.is_first else nullcontext():
        plan = admission.admit(
            data.loader, data.eval_sets.values(), num_steps, intervals.planned_saves(), prompts.longest, tokenizer
        )
    require_packable_rows(source, plan.step.outline.attention, data)
    reporter.print(*summary_lines(plan))
    if point is not None:
        resume.require_same_frozen(point, admission.run)
    settings = RunSettings(given, point, apply_plan(admission.run, plan), plan)
    if point is not None:
        reporter.print(
            *resume.choice_warnings(point, given, settings.config), *resume.length_warnings(point, num_steps)
        )
    session.run_dir.take(next(item.bytes for item in plan.disk.items if item.name == "exported model"))
    reporter.print(f"run folder: {session.run_dir.path}")
    return Run(session, settings, tokenizer, vision, data, prompts, intervals, admission, day, weights)


def _read_rows(
    session: Session, given: RunConfig, point: ResumePoint | None, config: RunConfig, tokenizer: Any,
    vision: Vision | None, positions: Positions | None, day: str,
) -> RunData:  # fmt: skip
    """Read the rows of a run on all ranks. Report likely mistakes in them, and raise DataError for certain ones."""
    ranks = session.ranks
    with ranks.first_of_each_machine_first():
        rows_per_step = resume.rows_of_all_ranks(point, given, ranks.size)
        data = load_data(
            config, tokenizer, positions, rows_per_step, rank=ranks.rank, num_ranks=ranks.size, day=day, vision=vision,
        )  # fmt: skip
    ranks.require_same_rows({each.name: (len(each.packed), each.packed.content_hash) for each in data.parts})
    session.reporter.print(*data.lines())
    reject_errors([finding for _, finding in data.findings()])
    if point is not None:
        position = resume.data_position(data, point.step, day)
        session.reporter.print(*resume.require_same_rows(point, position, config))
    return data


def build(run: Run, objective: Callable[[Any, Batch], Any] | None) -> Training:
    """Load the model of a run, and build what trains it, with the state of its checkpoint if it goes on from one."""
    reporter, point, data = run.session.reporter, run.settings.point, run.data
    config, plan, num_steps = run.settings.config, run.settings.plan, run.intervals.num_steps
    model = setup.load_model(config, run.admission.fetch_model(), point is None, run.session.ranks.mesh)
    setup.reject_images(model, run.settings.given, config)
    end_token_ids = data.report.rows.end_tokens()
    if line := end_line(run.tokenizer, model.generation_config, end_token_ids):
        reporter.print(line)
    add_end_tokens(model.generation_config, end_token_ids)
    # So that no buffer has to be replaced by a larger one later.
    engine_of(model).expect_batch(ExpectedBatch(plan.step.tokens, plan.request.distinct_tokens))
    has_noise = isinstance(config, TextConfig) and config.neftune_noise_alpha is not None
    # Random numbers depend on the length of a batch, so all ranks pad alike.
    data.loader.pads_to_step = has_noise or setup.has_dropout(model)
    if point is not None:
        reporter.print(*resume.require_same_model(point, resume.model_settings(model), config))
    reporter.print("preparing the optimizer's kernels and moments")
    optimizer, scheduler = build_optimizer(model, config, num_steps)
    saved_reference = None
    if point is None:
        optimizer.allocate_moments()
    else:
        restore(point.folder, point.manifest, model, optimizer)
        saved_reference = read_tensors(point.folder / ARRAYS)
    state = RunState(point)
    state.keep("scheduler", SchedulePosition(scheduler))
    run.session.run_dir.begin(config, plan)
    objectives = make_objectives(config, model, data, reporter, custom_loss=objective, reference=saved_reference)
    setup.check_gradients(model, objectives, data.loader.batch(0), config, reporter)
    # Last, because the time and the energy of the first line of metrics begin here.
    metrics = state.keep("metrics", Metrics(num_steps, run.intervals.steps_per_epoch, plan, setup.open_meter(model)))
    return Training(model, optimizer, scheduler, objectives, metrics, state)
