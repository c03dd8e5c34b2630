"""``horizon-lm plan``."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from horizon_lm.cli.exits import exits
from horizon_lm.errors import ConfigError


@exits
def plan(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [--key value]",
            help="A run's settings, and any of them overridden: horizon-lm plan run.yaml --max_length 4096",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, hub id or known model, in the place of a file's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N; or another machine's: h200, or a file of doctor's.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory that the run may take, such as 512GiB.")] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Which known models can be trained, by precision.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a run would take on host, device and disk, and how long, before anything is downloaded or allocated."""
    with _without_collection():
        from horizon_lm.cli.planning import plan_largest, plan_one
        from horizon_lm.plan.as_json import plan_as_json
        from horizon_lm.plan.text import plan_lines
        from horizon_lm.preflight.run import does_not_fit

    if largest and model is not None:
        raise ConfigError("--largest tries all known models; remove --model")
    if largest:
        table = plan_largest(run or [], device, host_memory)
        print(json.dumps(table.as_json(), indent=2) if as_json else "\n".join(table.lines()))
        return
    with _without_collection():
        result = plan_one(run or [], model, device, host_memory)
    if as_json:
        print(json.dumps(plan_as_json(result.plan, result.device, result.remedies), indent=2))
    else:
        print("\n".join(plan_lines(result.plan)))
    if not result.plan.fits:
        raise does_not_fit(result.plan, result.remedies)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, libraries are imported: a million objects, among which looking for garbage takes a seventh of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
