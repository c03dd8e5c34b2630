"""Invalid rows and likely mistakes in rows, with their places: collected while rows are read, and how they are reported."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horizon_lm.errors import DataError
from horizon_lm.runs.data.tokenize import LEFT_OUT, RowFlag
from horizon_lm.runs.data.tokenized_table import FAULT, PROBLEM

_RANGES_SHOWN = 3
_MAX_FAULTS_SHOWN = 5  # maximum number of faults listed in one error
_PLACE = re.compile(r"(.*?)(\d+)")  # what stands before the number of a row or line, and the number


@dataclass
class ExampleCounts:
    """A number of rows, with the places of the first ones.

    Attributes:
        count: the number of rows.
        places: places of the first ones, or ranges of places.
        others: number of rows that are in none of these.
    """

    count: int = 0
    places: list[str] = field(default_factory=list)
    others: int = 0

    def add(self, indices: np.ndarray, place: Callable[[int], str]) -> None:
        """Count rows, given their indices (n,) in ascending order and a function that returns the place of an index."""
        self.count += len(indices)
        starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)  # of the ranges of rows that follow each other
        ends = np.append(starts, len(indices))[1:]
        room = _RANGES_SHOWN - len(self.places)
        for start, end in zip(starts[:room], ends[:room], strict=True):
            self.places.append(_describe_range(place(int(indices[start])), place(int(indices[end - 1]))))
        self.others += len(indices) - int(ends[:room].max(initial=0))

    def __str__(self) -> str:
        return ", ".join(self.places) + (", ..." if self.others else "")


def _describe_range(first: str, last: str) -> str:
    """Return the places from the first to the last one, such as ``rows.jsonl:2-7``."""
    if first == last:
        return first
    begin, end = _PLACE.fullmatch(first), _PLACE.fullmatch(last)
    if begin is None or end is None or begin[1] != end[1]:
        return f"{first} to {last}"
    return f"{begin[1].replace(', row ', ', rows ')}{begin[2]}-{end[2]}"


TRAINING = "training data"  # the name of the training rows in messages


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely mistake and the rows that have it.

    Attributes:
        problem: the mistake as a predicate of the rows, such as "are copies of others".
        remedy: consequence of the mistake, and what to do.
        rows: number of rows and places of the first ones.
        is_error: a run with these rows is rejected.
        leaves_out: these rows are not used.
    """

    problem: str
    remedy: str
    rows: ExampleCounts
    is_error: bool = False
    leaves_out: bool = False

    @property
    def summary(self) -> str:
        """The mistake with its rows, without the remedy."""
        return f"rows that {self.problem}: {self.rows.count:,} ({self.rows})"

    def __str__(self) -> str:
        return f"{self.summary}; {'they are left out; ' if self.leaves_out else ''}{self.remedy}"


def describe(findings: Iterable[Finding]) -> list[str]:
    """Return a text for each finding; of findings with the same remedy, only the first text has it."""
    shown: set[str] = set()
    texts = []
    for each in findings:
        texts.append(each.summary if each.remedy in shown else str(each))
        shown.add(each.remedy)
    return texts


def without_answer(rows: ExampleCounts) -> Finding:
    """Return the finding of rows that have no target or none but whitespace, whatever their length."""
    remedy = "nothing can be learned from them; add what is missing, or remove them"
    return Finding("have no text or answer to train on", remedy, rows, leaves_out=True)


def cut_before_answer(rows: ExampleCounts) -> Finding:
    """Return the finding of rows in which truncation or packing leaves no target, or none but whitespace."""
    return Finding("are cut before any answer to train on", "raise max_length", rows, leaves_out=True)


def no_row_left(name: str, findings: Iterable[Finding]) -> DataError:
    """Return the error of data that has no row left. ``name``: `TRAINING`, or the name of an eval set."""
    use = "train on" if name == TRAINING else "evaluate"
    causes = [f"{each.summary}; {each.remedy}" for each in findings if each.leaves_out]
    return DataError(f"{name}: no row is left to {use}: {'; '.join(causes)}")


def reject_errors(findings: Sequence[Finding]) -> None:
    """Raise DataError if some findings are errors."""
    errors = describe(finding for finding in findings if finding.is_error)
    if errors:
        raise DataError("\n".join(errors))


class Findings:
    """Collects the invalid rows and the likely mistakes that are found while rows are read.

    Attributes:
        flagged: rows with each flag.
        unused: rows with fields that are not used, among the first ones of each dataset.
        unused_fields: the names of these fields.
    """

    def __init__(self) -> None:
        self.flagged = {flag: ExampleCounts() for flag in RowFlag}
        self.unused, self.unused_fields = ExampleCounts(), set[str]()
        self._invalid: dict[str, ExampleCounts] = {}  # by fault
        self._messages: dict[str, list[str]] = {}  # by fault: the first message, and another one if there is any

    def add_table(self, table: Any, chosen: np.ndarray, place: Callable[[int], str]) -> np.ndarray:
        """Count the invalid rows of a dataset, and its chosen rows by their flags. Return the indices of the rows that can be used, int (m,).

        Args:
            table: the token table of the dataset (`tokenize_source`).
            chosen: the indices of the chosen rows, int (n,).
            place: function from an index to the place of the row.
        """
        faults = table.data.column(FAULT)
        invalid = np.flatnonzero(faults.is_valid().to_numpy())
        texts = (column.take(invalid).to_pylist() for column in (faults, table.data.column(PROBLEM)))
        self.add_invalid(zip(invalid.tolist(), *texts, strict=True), place)
        flags = table.data.column("flags").to_numpy()
        used = chosen[(flags[chosen] & LEFT_OUT) == 0]
        for flag, rows in self.flagged.items():
            # Truncation, its errors and reasons to leave a row out are counted among all chosen rows, other flags among the rows that are used.
            counted = chosen if flag in LEFT_OUT | RowFlag.TRUNCATED | RowFlag.CUT_IMAGE else used
            rows.add(counted[(flags[counted] & flag) != 0], place)
        return used

    def add_unused(self, fields: Sequence[Sequence[str]], place: Callable[[int], str]) -> None:
        """Count the rows that have fields that are not used. ``fields``: the names of such fields of each of the first rows of a dataset."""
        self.unused_fields.update(*fields)
        self.unused.add(np.flatnonzero([bool(names) for names in fields]), place)

    def add_invalid(self, rows: Iterable[tuple[int, str, str]], place: Callable[[int], str]) -> None:
        """Count invalid rows of a dataset by their fault.

        Args:
            rows: the index, the fault and the message of each, in ascending order of the indices.
            place: function from an index to the place of the row.
        """
        indices: dict[str, list[int]] = {}
        for index, fault, message in rows:
            indices.setdefault(fault, []).append(index)
            messages = self._messages.setdefault(fault, [message])
            if len(messages) == 1 and message != messages[0]:
                messages.append(message)
        for fault, indices_of_fault in indices.items():
            self._invalid.setdefault(fault, ExampleCounts()).add(np.array(indices_of_fault), place)

    def reject_invalid(self, chat_template: str | None = None) -> None:
        """Raise DataError if any row is invalid, with a line for each fault and its rows.

        ``chat_template``: where the chat template is from; None for the model's own.
        """
        if not self._invalid:
            return
        lines, num_unlisted = [], sum(rows.count for rows in self._invalid.values())
        for fault, rows in [*self._invalid.items()][:_MAX_FAULTS_SHOWN]:
            row_count = f" ({rows.count:,} rows)" if rows.count > 1 else ""
            differs = " (in the first of them)" if len(self._messages[fault]) > 1 else ""
            template = f" (chat_template_path: {chat_template})" if chat_template and "chat template" in fault else ""
            lines.append(f"{rows}{row_count}: {self._messages[fault][0]}{template}{differs}")
            num_unlisted -= rows.count
        if num_unlisted:
            lines.append(f"... and {num_unlisted:,} more")
        if len(lines) > 1:
            lines.insert(0, f"{sum(rows.count for rows in self._invalid.values()):,} invalid rows:")
        raise DataError("\n".join(lines))
