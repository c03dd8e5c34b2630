"""Run ``horizon-lm`` in this process."""

from typing import Any

from typer.testing import CliRunner

from horizon_lm.cli import app


def run(*arguments: Any) -> Any:
    """Run a command and return its result. Exceptions other than SystemExit are raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
