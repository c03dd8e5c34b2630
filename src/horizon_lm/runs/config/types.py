"""Types of setting values, with checks that pydantic does not provide."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from horizon_lm.common.optimizers import OPTIMIZERS, by_other_name
from horizon_lm.common.quantities import parse_size
from horizon_lm.common.streaming_options import OPTION_TEXTS
from horizon_lm.runs.config.rules import Reading, require_use

_MIN_SIZE, _MAX_SIZE = 1e-30, 1e30  # of fractional numbers, which float32 computes with
_MAX_WHOLE = 2**60  # of whole numbers without a limit of their own
MAX_COUNT = 2**31


def shared_option(name: str, default: Any, *more: str) -> Any:
    """Return the field of a setting that is an argument in Python, too.

    Args:
        name: the setting, a key of `OPTION_TEXTS`.
        default: its default; ``...`` if it is required.
        more: sentences about the setting alone, after the description that both have.
    """
    return Field(default, description=" ".join((OPTION_TEXTS[name], *more)))


class Settings(BaseModel):
    """A group of settings. Unknown names are rejected and values are never converted.

    Attributes:
        heading: title of the group in run files and in the documentation.
    """

    heading: ClassVar[str] = ""
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _reject_extreme_values(cls, value: Any) -> Any:
        for each in _plain_values(value):
            if isinstance(each, str) and "\0" in each:
                raise ValueError("has a null character; remove it")
            if isinstance(each, float) and each != 0 and not _MIN_SIZE <= abs(each) <= _MAX_SIZE:
                raise ValueError(f"must be 0, or between {_MIN_SIZE:g} and {_MAX_SIZE:g} in size")
            if isinstance(each, int) and abs(each) > _MAX_WHOLE:
                raise ValueError(f"must be at most {_MAX_WHOLE:,} in size")
        return value

    @field_validator("*")
    @classmethod
    def _require_use(cls, value: Any, info: ValidationInfo) -> Any:
        require_use(str(info.field_name), value, info.data, cls.model_fields, info.context or Reading())
        return value


def _plain_values(value: Any) -> Iterator[Any]:
    """Yield the plain values in nested lists and mappings, with the keys of mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _plain_values(each)
    else:
        yield value


def _check_device_name(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N{'; a Mac computes on its CPU' * name.startswith('mps')}")
    return name


def _our_optimizer(name: str) -> str:
    """Return our name of an optimizer, given it or one of transformers' names; raise ValueError for others."""
    known = by_other_name(name)
    if known is not None and known[1] != "float32":
        raise ValueError(f"write optim: {known[0]} and moments: {known[1]}")
    if known is None and name not in OPTIMIZERS:
        raise ValueError(f"must be {' or '.join(OPTIMIZERS)}, or transformers' name for it")
    return name if known is None else known[0]


def _check_steps_or_fraction(value: float) -> float:
    """Return a number of steps (at least 1) as int, or a fraction of all steps (below 1) as it is, by transformers' rule."""
    if value > MAX_COUNT:
        raise ValueError(f"must be at most {MAX_COUNT:,} steps")
    if value < 0 or (value >= 1 and value != int(value)):
        raise ValueError("must be a whole number of steps, or a fraction of all steps below 1")
    return int(value) if value >= 1 else value


def as_list(value: Any) -> Any:
    """Return a string as a list of one; return anything else unchanged."""
    return [value] if isinstance(value, str) else value


def _check_norm(value: float) -> float:
    if 0 < value < _MIN_NORM:
        raise ValueError(f"must be 0 for no clipping, or at least {_MIN_NORM:g}")
    return value


_MIN_NORM = 1e-9

Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=1e-9, le=1e9)]
Norm = Annotated[float, Field(ge=0, le=1e12), AfterValidator(_check_norm)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
DeviceName = Annotated[str, AfterValidator(_check_device_name)]
OptimizerName = Annotated[str, AfterValidator(_our_optimizer)]
Names = Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
StepsOrFraction = Annotated[float, AfterValidator(_check_steps_or_fraction)]
Interval = Annotated[StepsOrFraction, Field(gt=0)]
