"""Run the command with ``python -m horizon_lm.cli``."""

from horizon_lm.cli import main

main()
