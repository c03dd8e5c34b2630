"""How a command ends: an error of ours is a message and an exit code, never a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from horizon_lm.errors import HorizonError, InterruptedRunError

P = ParamSpec("P")


def exits(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command: print errors on standard error and exit with their code. What else is raised is a bug."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HorizonError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("error: interrupted; what was written before is intact", file=sys.stderr, flush=True)
            raise typer.Exit(InterruptedRunError.exit_code) from None

    return run
