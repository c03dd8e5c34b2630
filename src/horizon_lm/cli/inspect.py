"""``horizon-lm inspect``: show how the rows are tokenized and which tokens are trained on."""

import json
from pathlib import Path
from typing import Annotated

import typer

from horizon_lm.cli.common import Model, exits, run_argument, run_arguments
from horizon_lm.runs.config.load import read_run_config


@exits
def inspect(
    run: Annotated[list[str] | None, run_argument("A run file and overrides of its settings, as for train.")] = None,
    model: Model = None,
    batches: Annotated[int, typer.Option(min=0, help="Number of batches to show.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show of each batch.")] = 4,
    html: Annotated[
        Path | None, typer.Option(help="Write the rows to this file, too, as a page with their images.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics and findings as JSON.")] = False,
) -> None:
    from horizon_lm.runs.training.early_mistakes import mistakes_in_rows

    config = read_run_config(*run_arguments(run, model=model), checks=mistakes_in_rows)
    from horizon_lm.cli.inspection import inspect_run, show, write_page  # imports torch, which takes seconds

    inspection = inspect_run(config)
    if as_json:
        print(json.dumps(inspection.as_json(), indent=2))
    else:
        show(inspection, batches, rows)
    if html is not None:
        write_page(inspection, batches, rows, html)
    inspection.reject_errors()
