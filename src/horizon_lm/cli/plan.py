"""``horizon-lm plan``: plan a run, or find the largest known models that fit."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.common import exits, run_arguments, without_garbage_collection
from horizon_lm.cli.names import name_lines
from horizon_lm.cli.waiting import announced
from horizon_lm.config import RunConfig
from horizon_lm.config.load import parse_overrides, read_run_config
from horizon_lm.errors import ConfigError, HorizonError
from horizon_lm.model.known_models import PART, KnownModel, find_known, known_models
from horizon_lm.model.routed_experts import num_experts
from horizon_lm.optim.choosing import optimizer_class
from horizon_lm.planning.catalog import Hardware, find_profile, published
from horizon_lm.planning.energy import Prices, energy_as_json, energy_lines
from horizon_lm.planning.host_memory import SAVED_BYTES
from horizon_lm.planning.plan import Plan
from horizon_lm.planning.remedies import Remedy
from horizon_lm.planning.render import plan_as_json, plan_lines
from horizon_lm.planning.request import Machine, Saves
from horizon_lm.preflight.admission import does_not_fit, plan_run
from horizon_lm.preflight.inputs import Source, open_source
from horizon_lm.preflight.remedies import remedies_of
from horizon_lm.preflight.this_machine import other_machine, this_machine
from horizon_lm.quantities import counted, parse_bytes
from horizon_lm.slabs import WHOLE, Shard
from horizon_lm.store.checkpoint_reader import Checkpoint
from horizon_lm.training.intervals import Intervals
from horizon_lm.training.ranks import mesh_shape, reject_unsupported
from horizon_lm.training.rows import estimate_sampler
from horizon_lm.training.setup import check_weights, choose_device, load_tokenizer
from horizon_lm.visible import visible


@dataclass(frozen=True)
class Result:
    """A plan, its device, and the changes that would make it fit if it does not."""

    plan: Plan
    device: str
    remedies: Sequence[Remedy]


@dataclass(frozen=True, slots=True)
class Size:
    """Number of processes of a run: one for each GPU of each machine."""

    gpus: int = 1
    machines: int = 1

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.machines


def plan_one(
    arguments: Sequence[str], model: str | None, device: str | None, host_memory: str | None, size: Size = Size()
) -> Result:
    """Plan a run with the arguments of the command. A plan that does not fit is returned, not raised."""
    path, overrides = run_arguments(arguments, model_name_or_path=model, host_memory=host_memory)
    if path is None and "model_name_or_path" not in parse_overrides(overrides):
        raise ConfigError("name a run file, or a model: horizon-lm plan --model Qwen/Qwen2.5-7B --device h200")
    hardware = _other_hardware(device)
    if device is not None and hardware is None:
        overrides += ["--device", device]
    run = read_run_config(path, overrides, without_rows=True)
    source = open_source(run)
    notes = _notes_on_weights(run, source)
    loaded = _load_as_training_does(run, source) if hardware is None else ()
    run, machine = _place(run, hardware, size)
    machine = replace(machine, notes=[*machine.notes, *notes])
    del loaded  # only needed while the memory of this process was measured
    num_steps, saves = _steps_and_saves(run, size.num_ranks)

    def planned(shard: Shard) -> Plan:
        return plan_run(run, source, machine, num_steps=num_steps, saves=saves, shard=shard, num_ranks=size.num_ranks)

    shard = _shard(run, size)
    plan = planned(shard)
    remedies = remedies_of(plan, run, source)
    if plan.host.deficit and shard.count < size.num_ranks and (wider := planned(Shard(0, size.num_ranks))).fits:
        cost = "the machines share one copy of the model, so its weights cross the network twice a step"
        remedies = [Remedy({"dp_shard_size": size.num_ranks}, cost, wider), *remedies]
    return Result(plan, run.device, remedies)


def _shard(run: RunConfig, size: Size) -> Shard:
    """Return the range of the first process.

    Raises:
        ConfigError: several processes do not support a setting.
    """
    if size.num_ranks == 1:
        return WHOLE
    reject_unsupported(run, size.num_ranks)
    _, ranges = mesh_shape(run, size.num_ranks, size.gpus)
    return Shard(0, ranges)


def _notes_on_weights(run: RunConfig, source: Source) -> list[str]:
    """Return warnings about the headers of the weight files, or about a config that is known for a part of the model."""
    folder = source.model.folder
    known = find_known(run.model_name_or_path)
    if folder is None and known is not None and known.name.endswith(PART):
        return [
            f"model: only the language model of {run.model_name_or_path.removesuffix(PART)} is planned, not its vision tower"
        ]
    return check_weights(run, source.model) if folder is not None and Checkpoint.is_in(folder) else []


def _steps_and_saves(run: RunConfig, num_ranks: int) -> tuple[int | None, Saves]:
    """Return the number of optimizer steps in a run (None if unknown) and its checkpoints."""
    by_epoch = run.save_strategy == "epoch"
    sampler = estimate_sampler(run, num_ranks) if by_epoch or run.max_steps <= 0 else None
    if run.max_steps > 0:
        num_steps = run.max_steps
    elif sampler is not None:
        num_steps = sampler.num_steps(run.num_train_epochs)
    else:
        return None, Saves()
    return num_steps, Intervals(run, num_steps, sampler.steps_per_epoch if sampler else num_steps).planned_saves()


def _other_hardware(device: str | None) -> Hardware | None:
    """Return the hardware profile that ``--device`` names, or None for a device of this machine."""
    if device is None or re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return None
    return find_profile(device)


def _load_as_training_does(run: RunConfig, source: Source) -> Sequence[object]:
    """Load the objects that a run holds before its first step, so that this process uses as much memory as a
    run would.
    """
    import datasets

    from horizon_lm.data.trl_compat import training_template

    if source.model.folder is None:  # a plan downloads nothing
        return (datasets,)
    try:
        tokenizer = load_tokenizer(run.model_copy(update={"chat_template_path": None}), source.model)
        return datasets, tokenizer, training_template(tokenizer)
    except HorizonError:  # a plan needs no tokenizer
        return (datasets,)


def _place(run: RunConfig, hardware: Hardware | None, size: Size) -> tuple[RunConfig, Machine]:
    """Return the run with its device resolved, and the machine to plan for, or the share of one process."""
    if hardware is None:
        run = run.model_copy(update={"device": choose_device(run.device)})
        return run, this_machine(run, num_processes=size.gpus)
    run = run.model_copy(update={"device": "cpu" if hardware.on_host else "cuda"})
    return run, other_machine(hardware, run.host_memory, size.gpus, size.machines)


# The largest models that a machine can train

MODES: dict[str, dict[str, str]] = {
    "fp32_master": {"precision": "fp32_master", "moments": "float32", "update_in_backward": "false"},
    "bf16": {"precision": "bf16", "moments": "float32", "update_in_backward": "false"},
    "bf16, 8-bit moments, in backward": {
        "precision": "bf16", "moments": "8bit", "update_in_backward": "true", "max_grad_norm": "0",
    },
    "adapters, 4-bit base": {
        "use_peft": "true", "lora_target_modules": r".*attn\.\w*proj\w*", "load_in_4bit": "true",
    },
}  # fmt: skip


@dataclass(frozen=True)
class LargestTable:
    """The largest known dense model and mixture of experts that fit, by host memory and mode.

    Attributes:
        machine: name of the machine.
        shape: rows and tokens of a step, as text.
        modes: names of the modes.
        rows: for each amount of host memory its name, and for each mode the names and parameters of models.
    """

    machine: str
    shape: str
    modes: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Sequence[tuple[str, int]]]]]

    def as_json(self) -> dict[str, object]:
        """Return the table as JSON values."""
        content = [
            {
                "host_memory": amount,
                "largest": {
                    mode: [{"name": name, "parameters": n} for name, n in cell]
                    for mode, cell in zip(self.modes, cells, strict=True)
                },
            }
            for amount, cells in self.rows
        ]
        return {"machine": self.machine, "step": self.shape, "rows": content}

    def lines(self) -> list[str]:
        """Return the table as lines of Markdown."""
        table = [
            f"Largest known models by host memory, on {self.machine}, steps of {self.shape}:",
            "",
            f"| host memory | {' | '.join(f'`{mode}`' if ',' not in mode else mode for mode in self.modes)} |",
            "|---" * (len(self.modes) + 1) + "|",
        ]
        for amount, cells in self.rows:
            texts = [", ".join(f"{name.rpartition('/')[2]}" for name, _ in cell) or "none" for cell in cells]
            table.append(f"| {amount} | {' | '.join(texts)} |")
        return table


def plan_largest(
    arguments: Sequence[str],
    device: str | None,
    host_memory: str | None,
    size: Size = Size(),
    progress: Callable[[str], None] = lambda text: None,
) -> LargestTable:
    """Find the largest known models that this machine or another machine can train.

    Args:
        arguments: settings of the run except its model.
        device: ``--device`` of the command.
        host_memory: one or more amounts, separated by commas; None for this machine's.
        size: number of processes.
        progress: called with a line about each search.
    """
    path, overrides = run_arguments(arguments)
    fixed = parse_overrides(overrides).keys() & {
        "model_name_or_path",
        *(key for mode in MODES.values() for key in mode),
    }
    if fixed:
        raise ConfigError(f"--largest tries all models and modes; remove --{sorted(fixed)[0]}")
    hardware = _other_hardware(device)
    if device is not None and hardware is None:
        overrides = [*overrides, "--device", device]
    amounts = [part.strip() for part in host_memory.split(",")] if host_memory else [None]
    runs = {}
    for mode, settings in MODES.items():
        chosen = [text for key, value in settings.items() for text in (f"--{key}", value)]
        runs[mode] = read_run_config(path, [*overrides, "--model_name_or_path", "-", *chosen], without_rows=True)
    search = _Search()
    rows: list[tuple[str, list[list[tuple[str, int]]]]] = []
    for amount in amounts:
        cells: list[list[tuple[str, int]]] = []
        for mode, run in runs.items():
            progress(f"planning... {len(rows) * len(MODES) + len(cells) + 1} of {len(amounts) * len(MODES)}: {mode}")
            limited = run if amount is None else run.model_copy(update={"host_memory": parse_bytes(amount)})
            placed, machine = _place(limited, hardware, size)
            cells.append(search.largest(placed, machine, size))
        rows.append((amount or f"{machine.host_limits[0].name}", cells))
    shape = f"{counted(run.rows_per_step * size.num_ranks, 'row')} of {run.max_length:,} tokens"
    return LargestTable(machine.name, shape, list(MODES), rows)


class _Search:
    """A search for the largest models that fit. Each model is outlined only once."""

    def __init__(self) -> None:
        self._known = list(reversed(known_models()))
        self._sources: dict[tuple[str, bool], Source] = {}

    def largest(self, run: RunConfig, machine: Machine, size: Size) -> list[tuple[str, int]]:
        """Return the largest dense model that fits, and the largest mixture of experts if it is larger."""
        found: list[tuple[str, int]] = []
        shard = _shard(run, size)
        for known in self._known:
            if _least_bytes(run, known.parameters) // shard.count > machine.host_limits[0].num_bytes:
                continue
            run = self._settings_for(run, known)
            source = self._open(run)
            sparse = bool(num_experts(source.config.get_text_config()))
            if sparse and found:
                continue
            if plan_run(run, source, machine, priced=False, shard=shard, num_ranks=size.num_ranks).fits:
                found.append((known.name, known.parameters))
                if not sparse:
                    return found
        return found

    def _settings_for(self, run: RunConfig, known: KnownModel) -> RunConfig:
        """Return the run with a model. Adapters are trained on its weights as they were published, all weights once they are decoded."""
        decoded = known.quantization is not None and not run.use_peft
        return run.model_copy(update={"model_name_or_path": known.name, "dequantize": decoded})

    def _open(self, run: RunConfig) -> Source:
        key = (run.model_name_or_path, run.use_peft)
        if key not in self._sources:
            self._sources[key] = open_source(run)
        return self._sources[key]


def _least_bytes(run: RunConfig, parameters: int) -> int:
    """Return a lower bound of the host memory that a run needs, to rule out most models without planning them."""
    if run.use_peft:
        return parameters // 2  # codes of 4 bits
    moments = optimizer_class(run.optim).planned().moment_bytes(run.moments)
    return parameters * (SAVED_BYTES[run.precision] + moments + (0 if run.update_in_backward else 2))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Context manager: hide warnings of transformers, such as those about kernels that make its code faster. A plan runs nothing."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@exits
def plan(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [--key value]",
            help="A run file and overrides of its settings: horizon-lm plan run.yaml --max_length 4096",
            show_default=False,
        ),
    ] = None,
    model: common.Model = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="auto, cpu, cuda or cuda:N; or another machine: one of "
            + ", ".join(published())
            + ", or a profile in a file, MACHINE.json (docs/planning.md)."
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory of each machine that the run may use, such as 512GiB.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each machine, with one process each (torchrun).")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest known models that fit, by precision.")
    ] = False,
    list_names: Annotated[
        bool, typer.Option("--list", help="List the machines and the models that are known by name.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of an hour of all machines, for the cost of a million tokens.")
    ] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option(min=0, help="Price of a kilowatt-hour, for the cost of a million tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    if list_names:
        print("\n".join(name_lines()))
        return
    if largest and model is not None:
        raise ConfigError("--largest tries all known models; remove --model")
    if largest:
        with announced("planning...") as progress, _without_advice():
            table = plan_largest(run or [], device, host_memory, Size(gpus, nodes), progress)
        print(json.dumps(table.as_json(), indent=2) if as_json else "\n".join(table.lines()))
        return
    with announced("planning..."), without_garbage_collection(), _without_advice():
        result = plan_one(run or [], model, device, host_memory, Size(gpus, nodes))
    prices = Prices(price_per_hour, price_per_kwh)
    if as_json:
        content = plan_as_json(result.plan, result.device, result.remedies)
        print(json.dumps(content | {"energy": energy_as_json(result.plan, prices)}, indent=2))
    else:
        print(visible("\n".join([*plan_lines(result.plan), *energy_lines(result.plan, prices)])))
    if not result.plan.fits:
        raise does_not_fit(result.plan, result.remedies)
