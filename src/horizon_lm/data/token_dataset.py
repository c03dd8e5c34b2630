"""Tokenized rows, on disk, by their number."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from horizon_lm.data.sources import digest
from horizon_lm.data.tokenize import Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """What is trained on at once: one sequence of tokens, or the two of a preference.

    Attributes:
        sequences: with their tokens and targets.
        segments: for packed rows, the lengths of the rows in it; None for others.
        place: where the row comes from, for messages.
    """

    sequences: Sequence[Tokens]
    segments: Sequence[int] | None
    place: str

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence.ids) for sequence in self.sequences)


class TokenTable(Sequence[Row]):
    """Rows of which only those that are asked for are in memory.

    Attributes:
        lengths: int (n,), tokens of each row, of the longer sequence where there are two.
        num_tokens: int (n,), tokens of each row in all.
        num_targets: int (n,).
    """

    def __init__(self, parts: Sequence["Part"]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part.indices) for part in self._parts])
        empty = [np.zeros(0, dtype=np.int64)]
        self.lengths = np.concatenate([part.lengths[part.indices] for part in self._parts] or empty)
        self.num_tokens = np.concatenate([part.num_tokens[part.indices] for part in self._parts] or empty)
        self.num_targets = np.concatenate([part.num_targets[part.indices] for part in self._parts] or empty)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[number]
        return part.row(int(part.indices[index - (self._ends[number] - len(part.indices))]))

    @property
    def parts(self) -> Sequence["Part"]:
        """Its data sets."""
        return self._parts

    @property
    def needs_mask(self) -> bool:
        """Rows are packed, or some sequence is shorter than others."""
        if any("seq_lengths" in part.table.column_names for part in self._parts):
            return True
        per_row = max((part.num_sequences for part in self._parts), default=1)
        return bool(len(self)) and int(self.num_tokens.min()) < per_row * int(self.lengths.max())

    def part_sizes(self) -> list[int]:
        """Rows of each data set, in order."""
        return [len(part.indices) for part in self._parts]

    def weights(self) -> list[float]:
        """How often the rows of each data set come in an epoch."""
        return [part.weight for part in self._parts]

    @property
    def fingerprint(self) -> str:
        """Of the rows and their order."""
        return digest(*(part.fingerprint for part in self._parts))

    def token_ids(self) -> Iterator[np.ndarray]:
        """All tokens of all rows, some at a time."""
        for part in self._parts:
            yield from part.token_ids()

    def split(self, held_out: np.ndarray) -> tuple["TokenTable", "TokenTable"]:
        """The rows of a mask (n,), and the others."""
        inside, outside, start = [], [], 0
        for part in self._parts:
            mask = held_out[start : start + len(part.indices)]
            inside.append(part.only(part.indices[mask]))
            outside.append(part.only(part.indices[~mask]))
            start += len(part.indices)
        return TokenTable(inside), TokenTable(outside)


class Part:
    """The rows of one data set that are used.

    Args:
        table: a `datasets.Dataset` of tokens: ``input_ids``, ``trained``, ``num_targets``, and for preferences also
            ``rejected_ids`` and ``rejected_trained``; ``seq_lengths`` where rows are packed.
        place: from a row's number to where it comes from.
        indices: numbers of the rows in use.
        weight: how often each comes in an epoch.
    """

    def __init__(self, table: Any, place: Callable[[int], str], indices: np.ndarray, weight: float = 1.0) -> None:
        self.table, self._place, self.indices, self.weight = table, place, indices, weight
        each = np.stack([_list_lengths(table.data.column(name)) for name in self._names])
        self.lengths, self.num_tokens = each.max(0), each.sum(0)
        self.num_targets = table.data.column("num_targets").to_numpy().astype(np.int64)

    def __len__(self) -> int:
        """Rows in use."""
        return len(self.indices)

    @property
    def num_sequences(self) -> int:
        """Of a row: two of a preference."""
        return len(self._names)

    @property
    def _names(self) -> list[str]:
        return [name for name in ("input_ids", "rejected_ids") if name in self.table.column_names]

    @property
    def fingerprint(self) -> str:
        return digest(self.table._fingerprint, hashlib.sha256(self.indices.tobytes()).hexdigest())

    def only(self, indices: np.ndarray) -> "Part":
        """Other rows of it."""
        return Part(self.table, self._place, indices, self.weight)

    def row(self, index: int) -> Row:
        entry = self.table.data.fast_slice(index, 1)

        def values(name: str) -> np.ndarray:
            return np.array(entry.column(name)[0].values.to_numpy(zero_copy_only=False))

        masks = ("trained", "rejected_trained")
        sequences = [Tokens(values(ids), values(mask)) for ids, mask in zip(self._names, masks, strict=False)]
        segments = values("seq_lengths").tolist() if "seq_lengths" in entry.column_names else None
        return Row(sequences, segments, self._place(index))

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Rows in use, many at once: their numbers (n,), where their tokens end (n,), all their tokens, and their targets.

        Of a preference, the chosen answers alone.
        """
        used = np.zeros(len(self.lengths), dtype=bool)
        used[self.indices] = True
        start, columns = 0, (self.table.data.column(name).chunks for name in ("input_ids", "trained"))
        for ids, trained in zip(*columns, strict=True):
            lengths = ids.value_lengths().to_numpy()
            mask = used[start : start + len(lengths)]
            if mask.any():
                keep = np.repeat(mask, lengths)
                values = (each.flatten().to_numpy(zero_copy_only=False)[keep] for each in (ids, trained))
                yield start + np.flatnonzero(mask), np.cumsum(lengths[mask]), *values
            start += len(lengths)

    @cached_property
    def keys(self) -> np.ndarray:
        """For each row in use a number that tells its tokens from others'."""
        keys, used = np.zeros(len(self.lengths), dtype=np.uint64), np.sort(self.indices)
        for name in self._names:
            start = 0
            for chunk in self.table.data.column(name).chunks:
                values, ends = chunk.flatten().to_numpy(), np.cumsum(chunk.value_lengths())
                for row in used[np.searchsorted(used, start) : np.searchsorted(used, start + len(chunk))] - start:
                    text = keys[start + row].tobytes() + values[ends[row - 1] if row else 0 : ends[row]].tobytes()
                    keys[start + row] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
                start += len(chunk)
        return keys[self.indices]

    def place(self, index: int) -> str:
        """Where a row comes from."""
        return self._place(index)

    def token_ids(self) -> Iterator[np.ndarray]:
        for name in self._names:
            for chunk in self.table.data.column(name).chunks:
                yield chunk.flatten().to_numpy(zero_copy_only=False)


def _list_lengths(column: Any) -> np.ndarray:
    """Lengths of the lists in a column, from their offsets alone."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)
