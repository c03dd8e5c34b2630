"""``horizon-lm version``: print versions."""

from horizon_lm.cli.common import exits, print_version


@exits
def version() -> None:
    print_version(True)
