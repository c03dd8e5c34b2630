"""``horizon-lm plan``: plan a run, or find the largest known models that fit."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from horizon_lm.cli import common
from horizon_lm.cli.common import exits, without_garbage_collection
from horizon_lm.cli.names import name_lines
from horizon_lm.cli.plan_arguments import Size, other_hardware, read_amounts, read_arguments
from horizon_lm.common.visible import announced, fitted
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import published
from horizon_lm.planning.arithmetic.energy import Prices, energy_as_json, energy_lines
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import detail_lines, plan_as_json, plan_lines


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
    details: Annotated[
        bool, typer.Option("--details", help="Add every byte, the settings that were chosen, and where the time goes.")
    ] = False,
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
        from horizon_lm.cli.planned_run import alternative_as_json, plan_each
        from horizon_lm.runs.admission.run_plan import does_not_fit

        with _without_advice():
            result, *others = plan_each(config, hardware, size)
    prices = Prices(price_per_hour, price_per_kwh)
    if as_json:
        content = plan_as_json(result.plan, result.device, result.remedies)
        content["energy"] = energy_as_json(result.plan, prices)
        if others:
            content["alternatives"] = [alternative_as_json(each) for each in others]
        print(json.dumps(content, indent=2))
    else:
        plans = [each.plan for each in (result, *others)]
        print(fitted("\n".join(_plan_lines(plans, prices, details)), sys.stdout))
    if not any(each.plan.fits for each in (result, *others)):
        raise does_not_fit(result.plan, result.remedies, is_shown=not as_json)
