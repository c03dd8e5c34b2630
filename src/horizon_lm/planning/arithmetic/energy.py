"""Estimate the energy of a step and the cost of its tokens, from the power limits in a machine's profile and from prices."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from horizon_lm.planning.arithmetic.plan import Plan

_NAMES = {"device": "the GPU", "host": "the processors"}
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in any currency; None if unknown.

    Attributes:
        per_hour: price of an hour of all machines of the run.
        per_kwh: price of a kilowatt-hour.
    """

    per_hour: float | None = None
    per_kwh: float | None = None


def energy_as_json(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Return the estimate as JSON values, null where a figure is unknown.

    Returns:
        - ``watts``: power limits by part of the machine.
        - ``joules_per_step``, ``joules_per_token``: at these limits, so a step hardly takes more. Known for one process.
        - ``rent_per_million_tokens``, ``electricity_per_million_tokens``: cost of a million tokens without padding.
    """
    time, hardware = plan.time, plan.machine.hardware
    watts = dict(hardware.watts) if hardware is not None and plan.request.num_ranks == 1 else {}
    power = sum(watts.values())
    joules = per_token = rent = electricity = None
    if time is not None and power:
        joules, per_token = power * time.seconds, power / time.tokens_per_second
        if prices.per_kwh is not None:
            electricity = per_token * 1e6 / _JOULES_PER_KWH * prices.per_kwh
    if time is not None and prices.per_hour is not None:
        rent = prices.per_hour / 3600 / time.tokens_per_second * 1e6
    return {
        "watts": watts, "joules_per_step": joules, "joules_per_token": per_token,
        "rent_per_million_tokens": rent, "electricity_per_million_tokens": electricity,
    }  # fmt: skip


def energy_lines(plan: Plan, prices: Prices) -> Iterator[str]:
    """Yield the known figures of the estimate as text."""
    known = energy_as_json(plan, prices)
    if known["joules_per_step"] is not None:
        limits = " and ".join(f"{_NAMES[part]} ({watts:,.0f} W)" for part, watts in known["watts"].items())
        yield (
            f"  energy: at most {known['joules_per_step'] / 1e3:.3g} kJ/step, {known['joules_per_token']:.3g} J/token, at the power "
            f"limits of {limits}; memory and the rest of the machine are not counted"
        )
    if known["rent_per_million_tokens"] is not None:
        yield f"  a million tokens: {known['rent_per_million_tokens']:.3g} at {prices.per_hour:g} per hour"
    if known["electricity_per_million_tokens"] is not None:
        yield f"  a million tokens: at most {known['electricity_per_million_tokens']:.3g} at {prices.per_kwh:g} per kWh"
