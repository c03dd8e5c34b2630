"""Plan a run as training does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from horizon_lm.cli.plan_arguments import Size
from horizon_lm.common.constants import LANGUAGE_MODEL
from horizon_lm.errors import HorizonError, QuantizedWeightsError
from horizon_lm.memory.layout.ranks import WHOLE, Shard
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.folder import code_remedy
from horizon_lm.model.known_models import find_known
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.energy import Prices, energy_as_json
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.remedies import Remedy
from horizon_lm.planning.arithmetic.render import plan_as_json
from horizon_lm.planning.arithmetic.request import Machine, Saves
from horizon_lm.runs.admission.inputs import RowShape, Source, open_source
from horizon_lm.runs.admission.planned_images import images_of_first_rows, images_of_rows, with_images_of_data
from horizon_lm.runs.admission.remedies import remedies_of
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine, this_machine
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.ranks import mesh_shape, reject_unsupported
from horizon_lm.runs.training.rows import estimate_sampler
from horizon_lm.runs.training.setup import check_weights, choose_device, load_tokenizer

_ELSEWHERE = ", or plan for another machine, such as --device h200 (horizon-lm plan --list names them)"
# The settings of the two ways to train a model with quantized weights.
_ADAPTERS: dict[str, Any] = {"use_peft": True, "trainable": None}
_DECODED = {"dequantize": True}


@dataclass(frozen=True)
class Result:
    """A plan, its device, and the changes that would make it fit if it does not."""

    plan: Plan
    device: str
    remedies: Sequence[Remedy]


def plan_each(run: RunConfig, hardware: Hardware | None, size: Size, images_per_row: int | None = None) -> list[Result]:
    """Return the plan of a run (`plan_one`). If the run would train quantized weights, which is impossible, return the plans of both ways to
    train the model: with adapters, and with decoded weights.
    """
    try:
        return [plan_one(run, hardware, size, images_per_row)]
    except QuantizedWeightsError as error:
        try:
            adapted = plan_one(run.model_copy(update=_ADAPTERS), hardware, size, images_per_row)
        except HorizonError:  # PEFT is not installed, or has no adapters for this model
            raise error from None
    return [adapted, plan_one(run.model_copy(update=_DECODED), hardware, size, images_per_row)]


def results_as_json(results: Sequence[Result], prices: Prices) -> dict[str, Any]:
    """Return the results of `plan_each` as JSON values: the first plan with its energy, and the bytes of one with decoded weights."""
    result, *others = results
    content = plan_as_json(result.plan, result.device, result.remedies)
    content["energy"] = energy_as_json(result.plan, prices)
    if others:
        content["alternatives"] = [
            {"settings": _DECODED, "fits": each.plan.fits, "bytes": each.plan.bytes} for each in others
        ]
    return content


def plan_one(run: RunConfig, hardware: Hardware | None, size: Size, images_per_row: int | None = None) -> Result:
    """Plan a run for the machine ``hardware``; None for this one. A plan that does not fit is returned, not raised.

    ``images_per_row``: images of each row; None for those of the first rows of the run's data, if there are any.
    """
    source = open_source(run)
    notes = _notes_on_weights(run, source)
    loaded, tokenizer, tokenizer_notes = _load_as_training_does(run, source) if hardware is None else ((), None, [])
    run, machine = place_run(run, hardware, size)
    if images_per_row:
        source = replace(source, images=images_of_rows(run, source, images_per_row))
    elif images_per_row is None and run.max_length and find_parts(source.model.skeleton()).towers:
        longest = RowShape(run.max_length, run.max_length)
        source, uncounted = with_images_of_data(run, source, longest, partial(images_of_first_rows, run, source))
        if source.images is None:
            notes += uncounted or ["images: rows of text are planned; --images_per_row N counts images"]
    machine = replace(machine, notes=[*machine.notes, *notes, *tokenizer_notes])
    del loaded  # only needed while the memory of this process was measured
    num_steps, saves = _steps_and_saves(run, size.num_ranks)
    rows = None
    if images_per_row == 0 and run.max_length is not None:
        rows = RowShape(run.max_length, run.max_length, has_images=False)
    plan_with = partial(
        plan_run,
        run,
        source,
        machine,
        rows=rows,
        num_steps=num_steps,
        saves=saves,
        num_ranks=size.num_ranks,
        tokenizer=tokenizer,
    )
    shard = own_shard(run, size)
    plan = plan_with(shard=shard)
    remedies = remedies_of(plan, run, source)
    if plan.host.deficit and shard.count < size.num_ranks and (wider := plan_with(shard=Shard(0, size.num_ranks))).fits:
        cost = "the machines share one copy of the model, so its weights cross the network twice a step"
        remedies = [Remedy({"dp_shard_size": size.num_ranks}, cost, wider), *remedies]
    return Result(plan, run.device, remedies)


def own_shard(run: RunConfig, size: Size) -> Shard:
    """Return the range of the weights that the first process owns.

    Raises:
        ConfigError: several processes do not support a setting.
    """
    if size.num_ranks == 1:
        return WHOLE
    reject_unsupported(run, size.num_ranks)
    _, ranges = mesh_shape(run, size.num_ranks, size.gpus)
    return Shard(0, ranges)


def _notes_on_weights(run: RunConfig, source: Source) -> list[str]:
    """Return warnings about the headers of the weight files, or about the published folder of a model that is known by name."""
    folder = source.model.folder
    if folder is not None:
        return check_weights(run, source.model) if Checkpoint.is_in(folder) else []
    known = find_known(run.model_name_or_path)
    if known is None:
        return []
    notes = [f"model: to open the published folder, {known.needs}"] if known.needs else []
    if known.name.endswith(LANGUAGE_MODEL):
        name = run.model_name_or_path.removesuffix(LANGUAGE_MODEL)
        notes.append(f"model: only the language model of {name} is planned, not its vision tower")
    return notes


def _steps_and_saves(run: RunConfig, num_ranks: int) -> tuple[int | None, Saves]:
    """Return the number of optimizer steps in a run (None if unknown) and its checkpoints."""
    by_epoch = run.save_strategy == "epoch" or (run.load_best_model_at_end and run.eval_strategy == "epoch")
    sampler = estimate_sampler(run, num_ranks) if by_epoch or run.max_steps <= 0 else None
    if run.max_steps > 0:
        num_steps = run.max_steps
    elif sampler is not None:
        num_steps = sampler.num_steps(run.num_train_epochs)
    else:
        return None, Saves()
    steps_per_epoch = sampler.steps_per_epoch if sampler else num_steps
    return num_steps, Intervals(run, num_steps, steps_per_epoch).planned_saves()


def _load_as_training_does(run: RunConfig, source: Source) -> tuple[Sequence[object], Any, list[str]]:
    """Load the objects that a run holds before its first step, so that this process uses as much memory as a run would. Return
    them, the tokenizer of the run (None if there is none), and warnings about it.
    """
    import datasets

    from horizon_lm.runs.data.trl_compat import training_template

    if source.model.folder is None:  # a plan downloads nothing
        return (datasets,), None, []
    try:
        tokenizer = load_tokenizer(run.model_copy(update={"chat_template_path": None}), source.model)
    except HorizonError as error:  # a plan needs no tokenizer; a run is rejected until it may run the tokenizer's code
        return (datasets,), None, [f"tokenizer: {error}"] if code_remedy(error) else []
    return (datasets, training_template(tokenizer)), tokenizer, []


def place_run(run: RunConfig, hardware: Hardware | None, size: Size) -> tuple[RunConfig, Machine]:
    """Return the run with its device resolved, and the machine to plan for, cut to the share of one process."""
    if hardware is None:
        run = run.model_copy(update={"device": choose_device(run.device, _ELSEWHERE)})
        return run, this_machine(run, num_processes=size.gpus)
    run = run.model_copy(update={"device": "cpu" if hardware.on_host else "cuda"})
    return run, other_machine(hardware, run.host_memory, size.gpus, size.machines)
