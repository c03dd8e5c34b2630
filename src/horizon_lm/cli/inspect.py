"""``horizon-lm inspect``."""

import json
from typing import Annotated

import typer

from horizon_lm.cli.exits import exits


@exits
def inspect(
    run: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN.yaml [--key value]", help="The run's settings, as for train.", show_default=False),
    ] = None,
    batches: Annotated[int, typer.Option(min=0, help="So many first batches are shown.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="So many rows of each.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs: numbers and findings.")] = False,
) -> None:
    """Show what a run would train on: tokens as the model will see them, numbers, and what looks wrong."""
    from horizon_lm.cli.inspection import inspect_run, show
    from horizon_lm.config.file import read_run_config, split_arguments

    config = read_run_config(*split_arguments(run or []))
    inspection = inspect_run(config)
    if as_json:
        print(json.dumps(inspection.as_json(), indent=2))
    else:
        show(inspection, batches, rows)
    inspection.refuse()
