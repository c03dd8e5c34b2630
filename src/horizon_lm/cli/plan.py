"""``horizon-lm plan``: plan a run, or find the largest known models that fit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.common import exits, without_garbage_collection
from horizon_lm.cli.names import name_lines
from horizon_lm.cli.plan_arguments import Size, other_hardware, read_amounts, read_arguments
from horizon_lm.errors import ConfigError
from horizon_lm.planning.catalog import published
from horizon_lm.planning.energy import Prices, energy_as_json, energy_lines
from horizon_lm.planning.render import plan_as_json, plan_lines
from horizon_lm.visible import visible
from horizon_lm.waiting import announced


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
        common.run_argument(
            "A run file and overrides of its settings: horizon-lm plan run.yaml --max_length 4096",
            metavar="[RUN.yaml] [--key value]",
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
    size = Size(gpus, nodes)
    if largest:
        other_hardware(device)  # mistakes are reported before torch is imported
        read_amounts(host_memory)
        with announced("planning...") as progress, without_garbage_collection():
            from horizon_lm.cli.largest_models import largest_lines, plan_largest

            with _without_advice():
                table = plan_largest(run or [], device, host_memory, size, progress)
        print(json.dumps(table, indent=2) if as_json else "\n".join(largest_lines(table)))
        return
    config, hardware = read_arguments(run or [], model, device, host_memory)
    with announced("planning..."), without_garbage_collection():
        from horizon_lm.cli.planned_run import plan_one
        from horizon_lm.preflight.admission import does_not_fit

        with _without_advice():
            result = plan_one(config, hardware, size)
    prices = Prices(price_per_hour, price_per_kwh)
    if as_json:
        content = plan_as_json(result.plan, result.device, result.remedies)
        print(json.dumps(content | {"energy": energy_as_json(result.plan, prices)}, indent=2))
    else:
        print(visible("\n".join([*plan_lines(result.plan), *energy_lines(result.plan, prices)])))
    if not result.plan.fits:
        raise does_not_fit(result.plan, result.remedies)
