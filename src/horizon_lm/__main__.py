"""Run the command with ``python -m horizon_lm``, or on several devices with ``torchrun -m horizon_lm``."""

from horizon_lm.cli import main

main()
