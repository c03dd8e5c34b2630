"""Likely mistakes that are found in rows, the places of these rows, and how they are reported."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from horizon_lm.errors import DataError

_RANGES_SHOWN = 3
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
