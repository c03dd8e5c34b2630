"""Check the first rows of JSON files. Nothing here imports a package that takes seconds."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from horizon_lm.config import DatasetConfig
from horizon_lm.data.conversations import RowError
from horizon_lm.data.formats import RowFormat
from horizon_lm.data.local_files import JSON_SUFFIXES, find_files
from horizon_lm.data.preprocess import ROWS_INSPECTED, Problems, find_row_format, read_example
from horizon_lm.data.sources import names_in_messages, read_rows, require_known_type
from horizon_lm.errors import DataError


class _Rows:
    """The rows of JSON files, of which the first ones are read, and all others if one of these is invalid.

    Attributes:
        config: the entry of ``datasets``.
    """

    def __init__(self, config: DatasetConfig, names: list[str]) -> None:
        self.config, self._places = config, dict[int, str]()
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
        """Return the place of an invalid row, or of the first one."""
        return self._places.get(index, self._first[0][0])

    def _read(self) -> Iterator[tuple[str, Any]]:
        """Yield the places and the values of the first rows, and of all others if one of these is invalid."""
        yield from self._first
        if self._places:
            yield from self._rows

    def faults(self, row_format: RowFormat, objective: str) -> Iterator[tuple[int, str, str]]:
        """Yield the index, the fault and the message of each invalid row."""
        for index, (place, row) in enumerate(self._read()):
            # TRL finds the prompt of preferences, and transformers knows the options of a template.
            if objective == "dpo" or (isinstance(row, dict) and row.get("chat_template_kwargs")):
                continue
            try:
                read_example(row, self.config, row_format, objective)
            except RowError as error:
                self._places[index] = place
                yield index, error.fault, str(error)


def check_first_rows(config: DatasetConfig, objective: str) -> None:
    """Raise DataError if the files of an entry of ``datasets`` are of no known type, or some of their first rows are invalid.

    Rows of other files than JSON, of a ``split`` and on the hub are not looked at.
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
