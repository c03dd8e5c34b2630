"""Convert the rows of a dataset to examples, and reject rows that hold more than text, that another objective needs, or that are too long."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.config.datasets import OPTIONAL_FIELDS, RowFormat
from horizon_lm.runs.data.conversations import Completion, Conversation, Example, Preference, RowError, Text
from horizon_lm.runs.data.formats import convert, find_format, rename_fields, require_fields
from horizon_lm.runs.data.row_images import COLUMNS

ROWS_INSPECTED = 1000  # rows of a dataset that are searched for optional and for unused fields
_MAX_ROW_CHARS = 1 << 24  # maximum length of a row's text: about four million tokens
_MEDIA_FIELDS = ("video", "videos", "audio", "audios")
_KTO_FIELDS = ("label", "kto_tag")  # of TRL and of LLaMA-Factory
_ANSWER_FIELDS = ("completion", "messages", "conversations", "output", "answer")
# A tag of HTML has an end, or is quoted where it is talked about. `<image>` is no tag of HTML, but `<video>` and `<audio>` are,
# so these are placeholders only before and after the text.
_PLACEHOLDER = re.compile(r"(?<![`'\"\w])<(image)>(?![`'\"])|\A\s*<(video|audio)>|<(video|audio)>\s*\Z")
_TEXT_PLACEHOLDER = re.compile(r"\A\s*<(image)>")  # a text of the web may have any word in it


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Converts the rows of a dataset, which all have the format of the first one, to examples.

    Attributes:
        columns: the fields that rows have instead of the expected ones, by the names of these.
        row_format: the format of the rows.
        objective: the objective of the run.
    """

    columns: Mapping[str, str]
    row_format: RowFormat
    objective: str

    @classmethod
    def of_rows(cls, config: DatasetConfig, first_rows: Iterable[Any], objective: str) -> "ExampleReader":
        """Return the reader of the rows of an entry of ``datasets``, given `ROWS_INSPECTED` of them or all.

        Raises:
            RowError: the first row matches no format, or ``columns`` names an optional field that none of the rows has.
        """
        columns, rows = config.columns or {}, iter(first_rows)
        first = next(rows)
        missing = {theirs for ours, theirs in columns.items() if ours in OPTIONAL_FIELDS}
        for row in chain([first], rows):
            if not missing:
                break
            missing -= set(row) if isinstance(row, dict) else set()
        if missing:
            raise RowError(f"field {min(missing)!r} of columns is in none of the first {ROWS_INSPECTED:,} rows")
        return cls(columns, find_format(rename_fields(first, columns), config.format, objective, columns), objective)

    def read(self, row: Any) -> Example:
        """Return the example in a row; raise RowError if the row is invalid."""
        require_fields(row)
        _reject_huge(row)
        renamed = rename_fields(row, self.columns)
        _reject_other_rows(renamed, self.objective)
        example = convert(renamed, self.row_format)
        _reject_placeholders(example)
        return example

    def unused_fields(self, row: Any) -> list[str]:
        """Return the fields of a row with a value that are not used; none of a row that is no object."""
        if not isinstance(row, Mapping):
            return []
        used = {*self.row_format.fields(), *self.columns.values(), *COLUMNS}
        return [name for name, value in row.items() if value is not None and name not in used]


def _reject_huge(row: Any) -> None:
    """Raise RowError for a row that is too long to tokenize; a tokenizer uses about 200 times the size of its text."""
    num_chars = _num_chars(row)
    if num_chars > _MAX_ROW_CHARS:
        raise RowError(
            f"the row has {num_chars:,} characters of text, more than {_MAX_ROW_CHARS:,}; split it into several rows"
        )


def _num_chars(value: Any) -> int:
    """Return the number of characters in all texts of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _reject_other_rows(row: Mapping[str, Any], objective: str) -> None:
    """Raise RowError for a row, with renamed fields, that holds audio or videos, or that is for another objective."""
    for name in _MEDIA_FIELDS:
        if row.get(name):
            raise RowError(
                f"field {name!r}: only text and images are supported; drop the row, or remove the field if its text stands alone"
            )
    if objective == "dpo":
        return
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise RowError(
            f"fields 'chosen' and 'rejected' are preferences, which objective: {objective} does not use; use objective: dpo, or name the "
            "answer to train on with columns, such as columns: {completion: chosen}"
        )
    for name in _KTO_FIELDS:
        value = row.get(name)
        marks_answer = isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false"))
        if marks_answer and any(each in row for each in _ANSWER_FIELDS):
            raise RowError(
                f"field {name!r} marks good and bad answers, and objective: {objective} would train on both alike; use "
                "horizon_lm.trainer(KTOTrainer), or keep the rows with good answers and remove the field"
            )


def _reject_placeholders(example: Example) -> None:
    """Raise RowError if a prompt has a placeholder of a picture, a film or a sound, or a text begins with one.

    A name whose end tag follows is a tag of HTML instead, which rows may talk about.
    """
    is_text = isinstance(example, Text)
    pattern = _TEXT_PLACEHOLDER if is_text else _PLACEHOLDER
    for text in _prompts(example):
        found = pattern.search(text)
        if found is None:
            continue
        name = next(filter(None, found.groups()))  # of the alternative that matched
        if f"</{name}>" not in text:
            raise RowError(
                f"the {'text' if is_text else 'prompt'} has the placeholder <{name}>, "
                f"{'and the row has no image for it' if name == 'image' else 'and only text and images are supported'}; "
                f"drop the row, or write `<{name}>` in backquotes if the tag is meant"
            )


def _prompts(example: Example) -> Iterator[str]:
    """Yield the prompts of an example: texts of the user, or the whole of a text. Both answers of a preference have the same."""
    if isinstance(example, Preference):
        yield from _prompts(example.chosen)
    elif isinstance(example, Conversation):
        yield from (message["content"] for message in example.messages if message["role"] == "user")
    else:
        yield example.prompt if isinstance(example, Completion) else example.text
