"""Count rows, and name the places of the first ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

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
