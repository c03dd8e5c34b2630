"""The content of ``plan.json`` and of ``horizon-lm plan --json``, as plain data that the report of a run reads back.

Fields with a default may be missing: files of another version do not have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from horizon_lm.planning.arithmetic.request import Budget


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    parameters: int
    active_parameters: int
    num_blocks: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class PlannedImages:
    """The images of each row.

    Attributes:
        per_row: their number.
        patches: their tokens in the blocks of towers, before any of them are merged.
        tokens: tokens of the row that stand for them.
        device_bytes: bytes of the images of a step on the device: pixels, features, and masks and rotary tables of towers.
        host_bytes: bytes of pixels in host memory, at most.
        note: what had to be assumed about them.
    """

    per_row: int
    patches: int
    tokens: int
    device_bytes: int
    host_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The shape of a step and the settings chosen by the plan, with the reasons."""

    rows: int
    length: int
    tokens: int
    num_steps: int | None
    num_ranks: int = 1
    dp_shard_size: int = 1
    processes_per_machine: int = 1
    precision: str
    device: str
    settings: dict[str, Any]
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The simulated time of one step among many.

    Attributes:
        seconds: time from the last computation of one step to that of the next step.
        tokens_per_second: throughput of all ranks in tokens without padding.
        model_tflops: the model's operations (6·N·T and attention) per second on each device, not counting recomputation.
        limited_by: the most expensive of ``copy_in``, ``copy_out``, ``gather``, ``reduce`` and ``update``, if a step would be more
            than 5% shorter without it; otherwise ``compute``.
        exposed_seconds: time without computation, by its cause.
        exposed_update_seconds: time that updates add to the step.
        busy: utilization of each stream.
        hidden_from_tokens: tokens per step, of each rank, from which updates, loads and the gathering of weights are fully
            overlapped; without loads if that is impossible.
        run_seconds: expected seconds of all steps; None if their number is unknown.
    """

    seconds: float
    tokens_per_second: float
    model_tflops: float
    limited_by: str
    exposed_seconds: dict[str, float]
    exposed_update_seconds: float = 0.0
    busy: dict[str, float]
    hidden_from_tokens: Mapping[str, int | None]
    run_seconds: float | None


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory in use over a step; each value holds until the next moment.

    Attributes:
        seconds: time since the start of the step.
        device, host: bytes in use.
    """

    seconds: list[float]
    device: list[float]
    host: list[float]

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.device) == len(self.host):
            raise ValueError("seconds, device and host must have the same number of values")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan as plain data. ``buffers`` is the engine's share of the device, if the run limits it."""

    version: Literal[1] = 1
    fits: bool = True
    model: PlannedModel
    run: PlannedRun
    images: PlannedImages | None = None
    host: Budget
    device: Budget
    buffers: Budget | None = None
    disk: Budget
    download: Budget | None = None
    hardware: dict[str, Any] | None
    interconnect: dict[str, Any] | None = None
    save: dict[str, Any] | None = None
    step: PlannedStep | None
    memory: PlannedMemory | None
    problems: list[str] = field(default_factory=list)
    remedies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device_peak(self) -> Budget | None:
        """The planned bytes to compare with ``device_bytes_peak``, or None if no bytes are planned."""
        if self.buffers is not None and self.buffers.items:
            return self.buffers
        return self.device if self.device.items else None
