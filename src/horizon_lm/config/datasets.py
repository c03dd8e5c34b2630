"""Settings of the rows that a run trains on and of those held out: where they are and which are used."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from horizon_lm.config.model import ModelSettings
from horizon_lm.config.types import Names, Settings, UnusedError

FIELDS = (
    "text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system", "chosen",
    "rejected", "tools", "chat_template_kwargs",
)  # fmt: skip
_FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip")


def _place_of_rows(path: str) -> str:
    """A file, a folder, or what may be the name of a dataset on the hub."""
    if path and Path(path).expanduser().exists():
        return path
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not path.startswith(".")
    if not is_name or path.endswith(_FILE_ENDINGS):
        raise ValueError(f"there is no such file or folder; a relative path starts in {Path.cwd()}")
    return path


class DatasetConfig(Settings):
    """Rows of one kind, in one place."""

    path: Annotated[str, AfterValidator(_place_of_rows)] = Field(
        description="A file of rows (JSON, JSONL, Parquet, CSV, text), a folder of such files, or a dataset of the hub."
    )
    name: str | None = Field(None, description="The configuration of a dataset of the hub.")
    data_dir: str | None = Field(None, description="The folder in that dataset to read.")
    data_files: Names | None = Field(None, description="The files in that dataset to read; wildcards are allowed.")
    split: str | None = Field(
        None, description="The part of that dataset, such as train or train[:10%]; null for train."
    )
    columns: dict[str, str] | None = Field(
        None, description="Where fields have other names: the name expected here, and theirs."
    )
    format: Literal["text", "messages", "sharegpt", "alpaca", "prompt_completion", "preference"] | None = Field(
        None, description="The form of the rows; null for what their fields say."
    )
    fraction: float | None = Field(
        None, gt=0, lt=1, description="The share of the rows to use, chosen once by data_seed; null for all."
    )
    weight: PositiveFloat = Field(
        1.0, description="How often each row comes in an epoch; a fraction takes another part of the rows every epoch."
    )

    @field_validator("columns")
    @classmethod
    def _renames_known_fields(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        unknown = [name for name in value or {} if name not in FIELDS]
        if unknown:
            theirs = (value or {})[unknown[0]]
            turned = f"; did you mean {{{theirs}: {unknown[0]}}}, the expected name first?" if theirs in FIELDS else ""
            raise ValueError(f"{unknown[0]!r} is not a field of rows; there are {', '.join(FIELDS)}{turned}")
        return value

    @field_validator("name", "data_dir", "data_files", "split")
    @classmethod
    def _has_parts(cls, value: Any, info: ValidationInfo) -> Any:
        path = info.data.get("path")
        if value is not None and path is not None and Path(path).expanduser().is_file():
            raise ValueError(f"is not used for a file, which {path} is; remove it")
        return value


def _as_list(value: Any) -> Any:
    """One path, or one entry, stands for a list of one."""
    entries = [value] if isinstance(value, str | dict | DatasetConfig) else value
    if not isinstance(entries, list):
        raise ValueError("must be a path, or a list of paths or of {path, columns, ...}")
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


DatasetList = Annotated[list[DatasetConfig], BeforeValidator(_as_list), Field(min_length=1)]


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
