"""``horizon-lm`` in this process."""

from typing import Any

from typer.testing import CliRunner

from horizon_lm.cli import app


def run(*arguments: Any) -> Any:
    """A command's result; whatever is not an error of ours comes through."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
