"""The ``horizon-lm`` command. One small file a command; torch and transformers are imported when a command runs."""

import atexit
import gc
from typing import Annotated

import typer

from horizon_lm.cli.doctor import doctor
from horizon_lm.cli.eval import evaluate
from horizon_lm.cli.generate import generate
from horizon_lm.cli.init import init
from horizon_lm.cli.inspect import inspect
from horizon_lm.cli.plan import plan
from horizon_lm.cli.report import report
from horizon_lm.cli.train import train
from horizon_lm.cli.version import print_version, version
from horizon_lm.errors import EXIT_CODES

_CODES = "  ".join(f"{code} {meaning.partition(':')[0]}," for code, meaning in EXIT_CODES.items()).rstrip(",")

app = typer.Typer(
    name="horizon-lm",
    help="Train large language models from host RAM.",
    epilog=f"Exit codes: {_CODES}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the versions of what numbers depend on."
        ),
    ] = False,
) -> None:
    """Train large language models from host RAM."""


# Settings of a run are not options of the command: they are in its file, and any of them can be overridden.
_TAKES_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
app.command(context_settings=_TAKES_SETTINGS)(plan)
app.command(context_settings=_TAKES_SETTINGS)(train)
app.command(context_settings=_TAKES_SETTINGS)(inspect)
app.command()(init)
# Their options may be written as settings are, with underscores.
_EITHER_WAY = {"token_normalize_func": lambda name: name.replace("_", "-")}
app.command(context_settings=_EITHER_WAY)(generate)
app.command("eval", context_settings=_EITHER_WAY)(evaluate)
app.command(context_settings=_EITHER_WAY)(report)
app.command(context_settings=_EITHER_WAY)(doctor)
app.command()(version)


def main() -> None:
    """The entry point of the installed command."""
    # At the end the interpreter looks through all objects of all libraries for garbage: a second for nothing.
    atexit.register(gc.freeze)
    app()
