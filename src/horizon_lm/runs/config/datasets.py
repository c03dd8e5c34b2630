"""Formats of rows, and the settings of the rows that a run is trained and evaluated on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator

from horizon_lm.common.paths import exists, may_be_on_hub, near_path
from horizon_lm.runs.config.rules import Needs, OnResume, PerMachine
from horizon_lm.runs.config.types import MAX_COUNT, Count, Names, Settings


@dataclass(frozen=True)
class RowFormat:
    """A format of rows.

    Attributes:
        name: name of the format in the setting `format`.
        objectives: the objectives that use such rows, the usual one first.
        required: alternative sets of fields; a row must have all fields of one set.
        optional: further fields that are used.
    """

    name: str
    objectives: tuple[str, ...]
    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the required fields."""
        return any(all(field in row for field in fields) for fields in self.required)

    def fields(self) -> list[str]:
        """Return all fields that are used, the required ones first."""
        return [*dict.fromkeys([*(field for fields in self.required for field in fields), *self.optional])]


_WITH_MESSAGES = ("system", "tools", "chat_template_kwargs", "images")
_WITH_HISTORY = ("history", *_WITH_MESSAGES)
_WITH_PREFERENCE = ("prompt", "conversations", "instruction", "input", *_WITH_HISTORY)
FORMATS = (
    RowFormat("preference", ("dpo",), (("chosen", "rejected"),), _WITH_PREFERENCE),
    RowFormat("messages", ("sft",), (("messages",),), _WITH_MESSAGES),
    RowFormat("sharegpt", ("sft",), (("conversations",),), _WITH_MESSAGES),
    RowFormat("prompt_completion", ("sft",), (("prompt", "completion"),), _WITH_MESSAGES),
    RowFormat("alpaca", ("sft",), (("instruction", "output"),), ("input", *_WITH_HISTORY)),
    RowFormat("question_answer", ("sft",), (("question", "answer"),), _WITH_HISTORY),
    RowFormat("text", ("sft", "pretrain"), (("text",),), ("images",)),
)
"""A format stands before those whose fields it has, too."""
OPTIONAL_FIELDS = ("input", "system", "history", "tools", "chat_template_kwargs", "images")  # fields that rows may lack
FIELDS = tuple(dict.fromkeys(field for each in FORMATS for field in each.fields()))

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(each.name for each in FORMATS)]


def _check_path(path: str) -> str:
    """Return the path of a file or folder, or a name that could be on the hub; raise ValueError for any other text."""
    if path and exists(path):
        return path
    if not may_be_on_hub(path):
        raise ValueError(f"no such file or folder{near_path(path)}")
    return path


class DatasetConfig(Settings):
    """An entry of `datasets` or `eval_datasets`: a file, a folder or a hub dataset with rows of one format."""

    path: Annotated[str, AfterValidator(_check_path)] = Field(
        description="File of rows (JSON, JSONL, Parquet, CSV, text), folder of such files, or dataset on the hub."
    )
    name: str | None = Field(None, description="Configuration of a hub dataset.")
    data_dir: str | None = Field(None, description="Folder of that dataset to read.")
    data_files: Names | None = Field(None, description="Files of that dataset to read; wildcards are allowed.")
    split: str | None = Field(
        None, description="Split of that dataset to read, such as train or train[:10%]. Default: train."
    )
    columns: dict[str, str] | None = Field(
        None,
        description="Names of fields in the rows, by the name expected here, such as {prompt: question}.",
    )
    format: FormatName | None = Field(None, description="Format of the rows. Default: recognized by their fields.")
    sample_by: Literal["line", "paragraph", "document"] = Field(
        "line",
        description="Row of a text file: a line, a paragraph (blank lines separate them) or the whole document. Blank lines "
        "are never rows.",
    )
    max_samples: Count | None = Field(
        None, description="Maximum number of rows to use, from the first on. Default: all rows."
    )
    fraction: float | None = Field(
        None, gt=0, lt=1, description="Fraction of the rows to use, sampled once with data_seed. Default: all rows."
    )
    weight: PositiveFloat = Field(
        1.0,
        le=1e6,
        description="Number of times each row is used in an epoch; the fractional part is a random subset, drawn anew for "
        "every epoch.",
    )

    @field_validator("columns")
    @classmethod
    def _reject_unknown_fields(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        unknown = [name for name in value or {} if name not in FIELDS]
        if unknown:
            theirs = (value or {})[unknown[0]]  # a field that we know, if both names are in the wrong order
            hint = f"; did you mean {{{theirs}: {unknown[0]}}}, the expected name first?" if theirs in FIELDS else ""
            raise ValueError(f"{unknown[0]!r} is not a field of rows; must be one of {', '.join(FIELDS)}{hint}")
        return value

    @field_validator("sample_by")
    @classmethod
    def _reject_sampling_of_other_files(cls, value: str, info: ValidationInfo) -> str:
        file = Path(info.data.get("path", "")).expanduser()
        if value != "line" and file.is_file() and file.suffix != ".txt":
            raise ValueError(f"is for text files, and {file.name} is none; remove it")
        return value

    @field_validator("fraction")
    @classmethod
    def _reject_two_selections(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("max_samples") is not None:
            raise ValueError("cannot be combined with max_samples; remove one of the two")
        return value

    @field_validator("name", "data_dir", "data_files", "split")
    @classmethod
    def _reject_parts_of_a_file(cls, value: Any, info: ValidationInfo) -> Any:
        path = info.data.get("path")
        if value is not None and path is not None and Path(path).expanduser().is_file():
            raise ValueError(f"is not used with a file, and {path} is one; remove it")
        return value

    @field_validator("name")
    @classmethod
    def _reject_name_of_a_folder(cls, value: str | None, info: ValidationInfo) -> str | None:
        path = info.data.get("path")
        if value is not None and path is not None and Path(path).expanduser().is_dir():
            raise ValueError(
                f"is for datasets on the hub, and {path} is a folder; select its files with data_dir or data_files"
            )
        return value


def _as_entries(value: Any) -> Any:
    """Return a path, an entry, or a list of both as a list of entries; raise ValueError for anything else."""
    entries = [value] if isinstance(value, str | dict | DatasetConfig) else value
    if not isinstance(entries, list):
        raise ValueError("must be a path, or a list of paths or of {path, columns, ...}")
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


def _unused_name(name: str, taken: Sequence[str]) -> str:
    """Return a name for an eval set that is not ``taken``: this one, or this one with a number from 2 on."""
    if name not in taken:
        return name
    return next(numbered for i in range(2, 1000) if (numbered := f"{name}_{i}") not in taken)


DatasetList = Annotated[list[DatasetConfig], BeforeValidator(_as_entries), Field(min_length=1)]


class DataSettings(Settings):
    """Training rows, eval sets and the length of rows."""

    heading: ClassVar[str] = "Data"

    datasets: Annotated[DatasetList | None, OnResume.FREE, PerMachine()] = Field(
        None,
        validate_default=True,
        description="Training rows: a path, or a list of paths or of {path, columns, ...}.",
    )
    eval_datasets: Annotated[DatasetList | None, OnResume.FREE, PerMachine()] = Field(
        None, description="Eval sets, in the same form. Their loss is computed before and after training."
    )
    test_split_size: Annotated[float | None, Needs(eval_datasets=None)] = Field(
        None,
        gt=0,
        le=MAX_COUNT,
        description="Number of rows of datasets to hold out as the eval set, or a fraction of them if below 1; "
        "instead of eval_datasets.",
    )
    max_length: Count | None = Field(
        1024, description="Maximum number of tokens in a row; longer rows are truncated at the end. null for no limit."
    )
    image_max_pixels: Count | None = Field(
        None,
        description="Pixels to which larger images of rows are scaled down, before the model's processor. Default: no limit.",
    )
    image_min_pixels: Count | None = Field(
        None,
        description="Pixels to which smaller images of rows are scaled up, before the model's processor. Default: no limit.",
    )
    allow_downloads: Annotated[bool, OnResume.FREE, PerMachine()] = Field(
        False,
        description="Download images whose addresses (http, https) are in rows, once, into the cache of datasets.",
    )
    dataset_num_proc: Annotated[Count | None, OnResume.FREE, PerMachine()] = Field(
        None, le=1024, description="Number of processes that tokenize rows; the result is cached. Default: one."
    )

    @field_validator("datasets")
    @classmethod
    def _require_rows(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not (info.context and info.context.without_rows):
            raise ValueError("is missing")
        return value

    @field_validator("eval_datasets")
    @classmethod
    def _reject_weights(cls, value: Any) -> Any:
        if any(entry.weight != 1 for entry in value or ()):
            raise ValueError("has a weight, which applies to training rows only; remove it")
        return value

    @field_validator("test_split_size")
    @classmethod
    def _reject_parts_of_a_row(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise ValueError("must be a whole number of rows, or a fraction of them below 1")
        return value

    @field_validator("image_min_pixels")
    @classmethod
    def _reject_empty_range(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value > (info.data.get("image_max_pixels") or value):
            raise ValueError("is greater than image_max_pixels; lower it")
        return value

    @property
    def eval_set_names(self) -> list[str]:
        """The names of the eval sets, in the order of their metrics."""
        names = [] if self.test_split_size is None else ["held_out"]
        for dataset in self.eval_datasets or ():
            names.append(_unused_name(Path(dataset.path).stem, names))
        return names

    @property
    def has_held_out(self) -> bool:
        """True if the run has an eval set."""
        return self.eval_datasets is not None or self.test_split_size is not None
