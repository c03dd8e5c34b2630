"""Kinds of values that settings have, and what pydantic would not check by itself."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from horizon_lm.quantities import parse_bytes


class UnusedError(ValueError):
    """A setting that the run would not use."""


class Settings(BaseModel):
    """A group of settings. What is not one of them is refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _device_name(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return name


def _steps_or_share(value: float) -> float:
    """transformers' rule: at least 1 is a number of steps, less is a share of all steps."""
    if value < 0 or (value >= 1 and value != int(value)):
        raise ValueError("must be a whole number of steps, or a share of all steps below 1")
    return int(value) if value >= 1 else value


def _with_unit(num_bytes: int) -> int:
    if num_bytes < 4096:  # nobody means so few
        raise ValueError(f"is {num_bytes} bytes; write a unit, such as {max(1, num_bytes)}GiB")
    return num_bytes


def as_list(value: Any) -> Any:
    """One entry stands for a list of one."""
    return [value] if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_with_unit)]
DeviceName = Annotated[str, AfterValidator(_device_name)]
Names = Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
StepsOrShare = Annotated[float, AfterValidator(_steps_or_share)]
Interval = Annotated[StepsOrShare, Field(gt=0)]
