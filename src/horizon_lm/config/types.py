"""Types of setting values, with checks that pydantic does not provide."""

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from horizon_lm.quantities import parse_bytes


class UnusedError(ValueError):
    """A setting that the run would not use."""


class Settings(BaseModel):
    """A group of settings. Unknown names are rejected and values are never converted.

    Attributes:
        heading: title of the group in run files and in the documentation.
    """

    heading: ClassVar[str] = ""
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _check_device_name(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return name


def _check_steps_or_fraction(value: float) -> float:
    """Apply transformers' rule: values of at least 1 are a number of steps, smaller values a fraction of all steps."""
    if value < 0 or (value >= 1 and value != int(value)):
        raise ValueError("must be a whole number of steps, or a fraction of all steps below 1")
    return int(value) if value >= 1 else value


def _check_unit(num_bytes: int) -> int:
    if num_bytes < 4096:  # a bare number is almost always a forgotten unit
        raise ValueError(f"is {num_bytes} bytes; write a unit, such as {max(1, num_bytes)}GiB")
    return num_bytes


def as_list(value: Any) -> Any:
    """Return a string as a list of one; return anything else unchanged."""
    return [value] if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), AfterValidator(_check_unit)]
DeviceName = Annotated[str, AfterValidator(_check_device_name)]
Names = Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
StepsOrFraction = Annotated[float, AfterValidator(_check_steps_or_fraction)]
Interval = Annotated[StepsOrFraction, Field(gt=0)]
