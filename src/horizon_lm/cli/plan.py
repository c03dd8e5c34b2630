"""``horizon-lm plan``: plan a run, or find the largest known models that fit."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.common import exits, without_garbage_collection
from horizon_lm.cli.names import name_lines
from horizon_lm.cli.plan_arguments import Size, other_hardware, read_amounts, read_arguments
from horizon_lm.common.visible import announced, fitted
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware, published
from horizon_lm.planning.arithmetic.energy import Prices, energy_lines
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import detail_lines, plan_lines
from horizon_lm.runs.config import RunConfig


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
    images_per_row: Annotated[
        int | None,
        typer.Option(
            "--images-per-row",
            "--images_per_row",
            min=0,
            help="Images of each row, of image_max_pixels each. Default: those of the data, else rows of text.",
        ),
    ] = None,
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
    details: Annotated[
        bool, typer.Option("--details", help="Add every byte, the settings that were chosen, and where the time goes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    size = Size(gpus, nodes)
    if list_names:
        print("\n".join(name_lines()))
    elif largest:
        _print_largest(run or [], model, device, host_memory, size, as_json)
    else:
        config, hardware = read_arguments(run or [], model, device, host_memory)
        _print_plan(config, hardware, size, images_per_row, Prices(price_per_hour, price_per_kwh), details, as_json)


def _print_plan(
    run: RunConfig,
    hardware: Hardware | None,
    size: Size,
    images_per_row: int | None,
    prices: Prices,
    details: bool,
    as_json: bool,
) -> None:
    """Plan a run and print the plan. Raise DoesNotFitError, with the changes that would make it fit, if it does not fit."""
    with _planning():
        from horizon_lm.cli.planned_run import plan_each, results_as_json
        from horizon_lm.runs.admission.run_plan import does_not_fit

        results = plan_each(run, hardware, size, images_per_row)
    plans = [each.plan for each in results]
    if as_json:
        print(json.dumps(results_as_json(results, prices), indent=2))
    else:
        print(fitted("\n".join(_plan_lines(plans, prices, details)), sys.stdout))
    if not any(each.fits for each in plans):
        raise does_not_fit(plans[0], results[0].remedies, is_shown=not as_json)


def _plan_lines(plans: Sequence[Plan], prices: Prices, details: bool) -> Iterator[str]:
    """Yield the lines of a plan and, for quantized weights, of a second plan with decoded ones. Without ``details``, lines about energy are
    only yielded if ``prices`` are given.
    """
    for plan in plans:
        if plan is not plans[0]:
            yield "or all weights, decoded while they are read (--dequantize true):"
        yield from plan_lines(plan)
        if len(plans) > 1 and plan is plans[0]:
            yield f"note: {plan.step.outline.name} has quantized weights, so adapters on them are planned (--use_peft true)"
        if details:
            yield from ("", *detail_lines(plan))
        if details or prices != Prices():
            yield from energy_lines(plan, prices)
    if not details:
        yield "--details lists every byte and the settings."


def _print_largest(
    arguments: list[str], model: str | None, device: str | None, host_memory: str | None, size: Size, as_json: bool
) -> None:
    """Find the largest known models that fit, and print them. Raise ConfigError if a model is named."""
    if model is not None:
        raise ConfigError("--largest tries all known models; remove --model")
    other_hardware(device)  # mistakes are reported before torch is imported
    read_amounts(host_memory)
    with _planning() as progress:
        from horizon_lm.cli.largest_models import largest_lines, plan_largest

        table = plan_largest(arguments, device, host_memory, size, progress)
    print(json.dumps(table, indent=2) if as_json else "\n".join(largest_lines(table)))


@contextmanager
def _planning() -> Iterator[Callable[[str], None]]:
    """Context manager: show on the terminal that a plan is made, and hide warnings of transformers, such as those about faster kernels:
    a plan runs nothing. Its value is a function that shows another text.
    """
    with announced("planning...") as progress, without_garbage_collection():
        from transformers import logging

        before = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield progress
        finally:
            logging.set_verbosity(before)
