"""Products in FP8: the machines that have them, and the rate that their time is computed from."""

from horizon_lm.errors import ConfigError
from horizon_lm.model.float8.requirements import CAPABILITY, LEAVE_OUT, NEEDS_BFLOAT16, needs_capability
from horizon_lm.planning.arithmetic.request import Machine, Request


def require_float8(request: Request, machine: Machine, priced: bool) -> None:
    """Raise ConfigError if a run asks for products in FP8 that its machine does not have, or whose time is not known.

    Args:
        request: settings of the run.
        machine: the machine.
        priced: the time of a step is planned.
    """
    if request.products != "float8":
        return
    hardware = machine.hardware
    if not machine.on_host:
        if request.precision == "float32":
            raise ConfigError(NEEDS_BFLOAT16)
        if hardware is not None and 0 < hardware.capability < float(".".join(map(str, CAPABILITY))):
            raise ConfigError(needs_capability(hardware.name, str(hardware.capability)))
    if priced and hardware is not None and not hardware.float8:
        raise ConfigError(
            f"products: float8: the profile of {hardware.name} has no rate of products in FP8, so a step cannot be priced. Measure it with "
            f"horizon-lm doctor on that machine, give it as float8 in MACHINE.json (docs/planning.md), or {LEAVE_OUT}"
        )
