"""Products in FP8: the machines that have them, and the rate that their time is computed from."""

from horizon_lm.errors import ConfigError
from horizon_lm.planning.request import Machine, Request

CAPABILITY = (8, 9)
"""The first compute capability with products in FP8: that of Ada. Hopper has 9.0, Blackwell 10.0 and 12.0."""
LEAVE_OUT = "leave products: plain"


def needs_capability(name: str, capability: str) -> str:
    """Return why a GPU of this name and compute capability has no products in FP8."""
    first = ".".join(map(str, CAPABILITY))
    return (
        f"products: float8 needs a GPU with compute capability {first} or later (Ada, Hopper, Blackwell); {name} has {capability}. "
        f"{LEAVE_OUT.capitalize()}"
    )


NEEDS_BFLOAT16 = (
    f"products: float8 needs weights in bfloat16 on a GPU; use precision fp32_master or bf16, or {LEAVE_OUT}"
)


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
