"""Check the first rows of JSON files. Nothing here imports a package that takes seconds."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from horizon_lm.errors import DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.conversations import RowError, has_answer
from horizon_lm.runs.data.findings import ExampleCounts, no_row_left, without_answer
from horizon_lm.runs.data.formats import RowFormat
from horizon_lm.runs.data.local_files import JSON_SUFFIXES, find_files
from horizon_lm.runs.data.preprocess import ROWS_INSPECTED, Problems, find_row_format, read_example
from horizon_lm.runs.data.sources import names_in_messages, read_rows, require_known_type


class _Rows:
    """The rows of JSON files, read as far as a check needs them: the first ones, further ones until one has an answer, and all of them
    once one is invalid.

    Attributes:
        config: the entry of ``datasets``.
        num_read: the number of rows that were read.
        may_have_answer: a row has an answer, or may have one that this check cannot find.
    """

    def __init__(self, config: DatasetConfig, names: list[str]) -> None:
        self.config, self._invalid_places = config, dict[int, str]()
        self.num_read, self.may_have_answer, self._last_place = 0, False, ""
        self._rows = islice(chain.from_iterable(map(read_rows, names)), config.max_samples)
        self._first = list(islice(self._rows, ROWS_INSPECTED))
        if not self._first:
            raise DataError(f"{', '.join(names)}: no rows found")

    def __len__(self) -> int:
        return len(self._first)

    def row(self, index: int) -> Any:
        """Return one of the first rows."""
        return self._first[index][1]

    def place(self, index: int) -> str:
        """Return the place of an invalid row, of the row read last, or else of the first row; others are neither kept nor asked for."""
        return self._invalid_places.get(index, self._last_place if index == self.num_read - 1 else self._first[0][0])

    def _rows_needed(self) -> Iterator[tuple[str, Any]]:
        """Yield the places and values of the first rows, then of further ones while a row is invalid or none may have an answer."""
        yield from self._first
        while self._invalid_places or not self.may_have_answer:
            row = next(self._rows, None)
            if row is None:
                return
            yield row

    def faults(self, row_format: RowFormat, objective: str) -> Iterator[tuple[int, str, str]]:
        """Yield the index, the fault and the message of each invalid row. Update ``num_read``, ``may_have_answer`` and the known places."""
        for index, (place, row) in enumerate(self._rows_needed()):
            self.num_read, self._last_place = index + 1, place
            # Not checked: it takes TRL to find the prompt of preferences, and transformers to know the options of a template.
            if objective == "dpo" or (isinstance(row, dict) and row.get("chat_template_kwargs")):
                self.may_have_answer = True
                continue
            try:
                example = read_example(row, self.config, row_format, objective)
                self.may_have_answer = self.may_have_answer or has_answer(example)
            except RowError as error:
                self._invalid_places[index] = place
                yield index, error.fault, str(error)

    def counts(self) -> ExampleCounts:
        """Return the number of rows that were read, with the places of the first ones."""
        rows = ExampleCounts()
        rows.add(np.arange(self.num_read), self.place)
        return rows


def check_first_rows(config: DatasetConfig, objective: str, name: str | None = None) -> None:
    """Raise DataError if the files of an entry of ``datasets`` are of no known type, or some of their first rows are invalid.

    Rows of other files than JSON, of a ``split`` and on the hub are not checked. ``name``: the name in messages of data whose only entry
    this is, for which it is also an error that no row has an answer; None for one of several entries.
    """
    splits = find_files(config)
    if splits is None or config.split is not None:
        return
    files = splits["train"]
    require_known_type(config, files)
    if files[0].suffix not in JSON_SUFFIXES:
        return
    rows, problems = _Rows(config, names_in_messages(config, files)), Problems()
    try:
        problems.add(rows, rows.faults(find_row_format(rows, objective), objective))
    except RowError as error:  # of the first row, whose format all rows have
        problems.add(rows, [(0, error.fault, str(error))])
    problems.reject()
    if name is not None and not rows.may_have_answer:
        raise no_row_left(name, [without_answer(rows.counts())])
