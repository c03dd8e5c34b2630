"""``horizon-lm train``: train a model."""

import os
from contextlib import AbstractContextManager
from typing import Annotated, Any

import typer

from horizon_lm.cli.common import Model, exits, run_argument, run_arguments
from horizon_lm.common.visible import announced


@exits
def train(
    run: Annotated[
        list[str] | None,
        run_argument("A run file and overrides of its settings: horizon-lm train run.yaml --learning_rate 1e-5"),
    ] = None,
    model: Model = None,
    settings: Annotated[bool, typer.Option("--settings", help="List all settings with their defaults.")] = False,
) -> None:
    from horizon_lm.runs.config.load import read_run_config
    from horizon_lm.runs.config.text import describe_settings
    from horizon_lm.runs.training.early_mistakes import mistakes_in_run

    if settings:
        print(describe_settings())
        return
    starting: AbstractContextManager[Any] = announced("starting...")
    if "RANK" in os.environ:  # one of several processes; torch is imported late otherwise
        from horizon_lm.distributed.rendezvous import failing_together

        starting = failing_together()
    with starting:
        config = read_run_config(*run_arguments(run, model=model), checks=mistakes_in_run)
        from horizon_lm.runs.training.train import train as run_training
    run_training(config)
