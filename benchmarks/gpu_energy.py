"""The energy of steps beyond that of a machine at rest, from the counters of `horizon_lm.runs.training.energy`."""

import time

import torch

from horizon_lm.runs.training.energy import UNKNOWN, Energy, EnergyMeter


def open_meter(device: torch.device) -> EnergyMeter:
    """Return a meter of this machine and a device."""
    return EnergyMeter(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None)


def watts_at_rest(device: torch.device, seconds: float) -> Energy:
    """Return the power of the machine while nothing runs, in watts: before any system has touched the device."""
    meter = open_meter(device)
    if meter.read().total is None:  # there are no counters
        return UNKNOWN
    time.sleep(seconds)
    energy = meter.read()
    return Energy(*(None if each is None else each / seconds for each in (energy.host, energy.device)))


def joules_per_token(used: Energy, seconds: float, rest: Energy, tokens: int) -> str:
    """Return the joules of a token beyond those at rest, of processors and GPU, as text; empty where no counter tells.

    Args:
        used: energy of all steps.
        seconds: duration of all steps.
        rest: watts at rest.
        tokens: tokens of all steps.
    """
    parts = ((used.host, rest.host), (used.device, rest.device))
    texts = ["" if a is None or b is None else f"{(a - b * seconds) / tokens:.3g}" for a, b in parts]
    return " / ".join(texts) if any(texts) else ""
