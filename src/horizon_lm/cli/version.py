"""``horizon-lm version``."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import typer

import horizon_lm
from horizon_lm.cli.exits import exits


@exits
def version() -> None:
    """Print the versions of Horizon-LM and of what its numbers depend on."""
    print(f"horizon-lm {horizon_lm.__version__}")
    for name in ("torch", "transformers", "numba"):
        try:
            print(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")


def print_version(wanted: bool) -> None:
    """The same as an option, where people look for it."""
    if wanted:
        version()
        raise typer.Exit
