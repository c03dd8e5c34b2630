"""Settings of the rows that a run trains on, and of those held out."""

from typing import Any

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from horizon_lm.config.dataset import DatasetList
from horizon_lm.config.model import ModelSettings
from horizon_lm.config.types import UnusedError

WITHOUT_ROWS = {"without_rows": True}  # a context of validation: a plan is wanted before there are rows


class DataSettings(ModelSettings):
    """The rows"""

    datasets: DatasetList | None = Field(
        None,
        validate_default=True,
        description="The rows to train on: a path, or a list of paths or of {path, columns, ...}.",
    )
    eval_datasets: DatasetList | None = Field(
        None, description="Held-out rows, likewise; their loss is computed before and after training."
    )
    test_split_size: float | None = Field(
        None, gt=0, description="Instead of eval_datasets: so many rows of datasets, or a share below 1, are held out."
    )
    max_length: PositiveInt | None = Field(
        1024, description="Rows longer than this many tokens lose their end; null for no limit."
    )
    dataset_num_proc: PositiveInt | None = Field(
        None, description="Processes that tokenize rows; null for one. What they make is cached."
    )

    @field_validator("datasets")
    @classmethod
    def _there_are_rows(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.context != WITHOUT_ROWS:
            raise ValueError("is missing")
        return value

    @field_validator("eval_datasets")
    @classmethod
    def _held_out_rows_come_once(cls, value: Any) -> Any:
        if any(entry.weight != 1 for entry in value or ()):
            raise ValueError("has a weight, which is for rows to train on; remove it")
        return value

    @field_validator("test_split_size")
    @classmethod
    def _held_out_once(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None:
            return None
        if info.data.get("eval_datasets"):
            raise UnusedError("is not used with eval_datasets; remove one of the two")
        if value >= 1 and value != int(value):
            raise ValueError("must be a whole number of rows, or a share of them below 1")
        return value

    @property
    def has_held_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.eval_datasets is not None or self.test_split_size is not None
