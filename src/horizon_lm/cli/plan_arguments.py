"""The arguments of ``horizon-lm plan``, checked before torch is imported."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.cli.common import read_size, run_arguments
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import Hardware, find_profile
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.load import parse_overrides, read_run_config
from horizon_lm.runs.training.early_mistakes import mistakes_in_plan


@dataclass(frozen=True, slots=True)
class Size:
    """Number of processes of a run: one for each GPU of each machine."""

    gpus: int = 1
    machines: int = 1

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.machines


def read_arguments(
    arguments: Sequence[str], model: str | None, device: str | None, host_memory: str | None
) -> tuple[RunConfig, Hardware | None]:
    """Return the run that the arguments of the command name, and the machine to plan for; None for this one.

    Raises:
        ConfigError: no model is named, or a setting or the machine is not valid.
    """
    path, overrides = run_arguments(arguments, model=model, host_memory=host_memory)
    if path is None and "model_name_or_path" not in parse_overrides(overrides):
        raise ConfigError("name a run file, or a model: horizon-lm plan --model Qwen/Qwen2.5-7B --device h200")
    hardware, overrides = machine_of(device, overrides)
    return read_run_config(path, overrides, without_rows=True, checks=mistakes_in_plan), hardware


def machine_of(device: str | None, overrides: list[str]) -> tuple[Hardware | None, list[str]]:
    """Return the hardware profile that ``--device`` names, and the overrides of the run; a device of this machine is among these instead."""
    hardware = other_hardware(device)
    if device is None or hardware is not None:
        return hardware, overrides
    return None, [*overrides, "--device", device]


def read_amounts(host_memory: str | None) -> list[tuple[str, int]]:
    """Return the amounts of host memory in a list with commas, as text and in bytes; raise ConfigError if one is no size."""
    texts = [part.strip() for part in host_memory.split(",")] if host_memory else []
    return [(text, read_size("--host-memory", text)) for text in texts]


def other_hardware(device: str | None) -> Hardware | None:
    """Return the hardware profile that ``--device`` names, or None for a device of this machine."""
    if device is None or re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return None
    return find_profile(device)
