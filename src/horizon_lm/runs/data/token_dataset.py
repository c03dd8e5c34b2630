"""Tokenized rows on disk, read by index."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import numpy as np
import xxhash

from horizon_lm.runs.data.loaded_images import ImagesOfRows
from horizon_lm.runs.data.table_cache import digest
from horizon_lm.runs.data.tokenize import Tokens
from horizon_lm.runs.data.tokenized_table import IMAGE_COLUMNS
from horizon_lm.runs.data.vision import TokenImage

ROW_OF_TOKEN = "row_of_token"  # column of packed rows with the index of each token's source row
_MAX_TYPED = (
    0.01  # occurrences of an end token inside of answers, for each at an end, that somebody may have typed into texts
)


@dataclass(frozen=True, slots=True)
class Row:
    """A training row: one sequence of tokens, or the two sequences of a preference.

    Attributes:
        sequences: the tokenized sequences.
        segments: lengths of the rows in a packed row; None for other rows.
        place: origin of the row, for messages.
        sources: index of the row in its dataset; of a packed row, those of its rows.
        images: the images of its dataset; None if these cannot be loaded.
    """

    sequences: Sequence[Tokens]
    segments: Sequence[int] | None
    place: str
    sources: Sequence[int] = (0,)
    images: ImagesOfRows | None = None

    def load_images(self, sequence: int) -> list[list[Any]]:
        """Return the images of a sequence in the order of their tokens, those of each packed row in a list of their own.

        Raises:
            DataError: they are not those that were tokenized.
        """
        if self.images is None:
            return []
        loaded, images = [], self.sequences[sequence].images
        for source, end in zip(self.sources, accumulate(self.segments or [len(self)]), strict=True):
            expected = [each for each in images if each.start < end]
            loaded.append(self.images.load(source, sequence, expected))
            images = images[len(expected) :]
        return loaded

    def __len__(self) -> int:
        """Return the number of tokens in the longest sequence."""
        return max(len(sequence.ids) for sequence in self.sequences)


class TokenTable(Sequence[Row]):
    """A sequence of rows that are read from disk on access.

    Attributes:
        lengths: tokens in the longest sequence of each row, int (n,).
        num_tokens: tokens in all sequences of each row, int (n,).
        num_targets: targets in each row, int (n,).
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
        first = self._ends[number] - len(part.indices)  # index of the part's first row
        return part.row(int(part.indices[index - first]))

    @property
    def parts(self) -> Sequence["Part"]:
        """The parts of the table, one for each dataset."""
        return self._parts

    @property
    def needs_mask(self) -> bool:
        """True if rows are packed or differ in length, so that batches have several segments or padding."""
        if any("seq_lengths" in part.table.column_names for part in self._parts):
            return True
        if not len(self):
            return False
        num_sequences = max(part.num_sequences for part in self._parts)  # of a row; the same in all parts
        return int(self.num_tokens.min()) < num_sequences * int(self.lengths.max())

    @cached_property
    def has_images(self) -> bool:
        """True if a row in use has an image."""
        return any(part.with_images[part.indices].any() for part in self._parts)

    def part_sizes(self) -> list[int]:
        """Return the number of rows in each dataset."""
        return [len(part.indices) for part in self._parts]

    def weights(self) -> list[float]:
        """Return the number of times that the rows of each dataset are used in an epoch."""
        return [part.weight for part in self._parts]

    @property
    def fingerprint(self) -> str:
        """A hash of the rows and their order."""
        return digest(*(part.fingerprint for part in self._parts))

    @cached_property
    def content_hash(self) -> str:
        """A hash of the tokens, targets, segments and images of all rows in their order, whatever files they come from."""
        return digest(*(part.content_hash for part in self._parts))

    @property
    def token_hash(self) -> str:
        """The hash of the rows without their images."""
        return digest(*(part.token_digest.hexdigest() for part in self._parts))

    def token_ids(self) -> Iterator[np.ndarray]:
        """Yield the tokens of all tables in chunks, including rows that are not in use."""
        for part in self._parts:
            yield from part.token_ids()

    def end_tokens(self) -> list[int]:
        """Return the tokens that end the answers that are trained on, the most frequent one first.

        A token that also occurs inside of answers is left out, such as the token between the reasoning and the answer of gpt-oss, unless it
        occurs there so rarely that somebody may have typed it.
        """
        ends, inner = (Counter[int](), Counter[int]())
        for part in self._parts:
            for counts, name in ((ends, "ends"), (inner, "inner")):
                rows = part.table.data.column(name).take(part.indices)
                counts.update(rows.combine_chunks().flatten().to_pylist())
        return [token for token, count in ends.most_common() if inner[token] <= _MAX_TYPED * count]

    def split(self, held_out: np.ndarray) -> tuple["TokenTable", "TokenTable"]:
        """Return two tables: the rows that the mask ``held_out`` (n,) selects, and the remaining rows."""
        selected, others, start = [], [], 0
        for part in self._parts:
            mask = held_out[start : start + len(part.indices)]
            selected.append(part.select(part.indices[mask]))
            others.append(part.select(part.indices[~mask]))
            start += len(part.indices)
        return TokenTable(selected), TokenTable(others)


class Part:
    """The rows of one dataset that are in use.

    Args:
        table: a `datasets.Dataset` of tokens: ``input_ids``, ``trained``, ``num_targets``, and for preferences also
            ``rejected_ids`` and ``rejected_trained``, for packed rows also ``seq_lengths``.
        place: function from the index of a row to its origin.
        indices: indices of the rows in use.
        weight: number of times that each row is used in an epoch.
        images: the images of the rows; None if the model reads only text.
    """

    def __init__(
        self, table: Any, place: Callable[[int], str], indices: np.ndarray, weight: float = 1.0,
        images: ImagesOfRows | None = None,
    ) -> None:  # fmt: skip
        self.table, self._place, self.indices, self.weight, self.images = table, place, indices, weight, images
        self._hashes: dict[int | None, np.ndarray] = {}  # by the length that `row_hashes` was asked for
        # Lengths of sequences, (sequences of a row, rows); then of a row its longest sequence, and all of them.
        lengths = np.stack([_list_lengths(table.data.column(name)) for name in self._id_columns])
        self.lengths, self.num_tokens = lengths.max(0), lengths.sum(0)
        self.num_targets = table.data.column("num_targets").to_numpy().astype(np.int64)

    def __len__(self) -> int:
        """Return the number of rows in use."""
        return len(self.indices)

    @property
    def num_sequences(self) -> int:
        """The number of sequences in a row: two for preferences, otherwise one."""
        return len(self._id_columns)

    @property
    def _id_columns(self) -> list[str]:
        """The columns with the token ids of the sequences of a row."""
        return [name for name in ("input_ids", "rejected_ids") if name in self.table.column_names]

    @property
    def fingerprint(self) -> str:
        """A hash of the rows in use and their order."""
        return digest(self.table._fingerprint, hashlib.sha256(self.indices.tobytes()).hexdigest())

    @property
    def content_hash(self) -> str:
        """A hash of the tokens, targets, segments and images of the table, and of the indices of the rows in use."""
        content = self.token_digest.copy()
        if self.with_images.any():
            content.update("".join(self._image_hashes).encode())
        return content.hexdigest()

    @cached_property
    def token_digest(self) -> xxhash.xxh3_128:
        """The hash of the table and of the indices, without images."""
        content = xxhash.xxh3_128(self.indices.astype(np.int64).data)
        for name in (*self._id_columns, "trained", "rejected_trained", "seq_lengths"):
            if name not in self.table.column_names:
                continue
            content.update(name.encode())
            chunks = self.table.data.column(name).chunks
            for chunk in chunks:  # all lengths before all values, so that chunks do not matter
                lengths = chunk.value_lengths().to_numpy(zero_copy_only=False)
                content.update(np.ascontiguousarray(lengths, np.int64).data)
            for chunk in chunks:
                content.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)).data)
        return content

    @cached_property
    def _image_hashes(self) -> list[str]:
        """The hashes of the images of each row of the table, joined."""
        joined = [""] * len(self.lengths)
        for name in IMAGE_COLUMNS if self.with_images.any() else ():
            if name in self.table.column_names:
                hashes = (values for chunk in self.table.data.column(name).chunks for values in _hashes_of_rows(chunk))
                joined = [f"{before}{' '.join(values)};" for before, values in zip(joined, hashes, strict=True)]
        return joined

    @cached_property
    def with_images(self) -> np.ndarray:
        """The mask (n,) of the rows of the table that have images."""
        names = [name for name in IMAGE_COLUMNS if name in self.table.column_names]
        counts = [_list_lengths(self.table.data.column(name)) for name in names]
        return np.sum(counts, axis=0) > 0 if counts else np.zeros(len(self.lengths), dtype=bool)

    def image_sizes(self) -> np.ndarray:
        """Return the number of tokens of each image in the rows in use, int (n,)."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(sizes for _, _, sizes in self._sizes())])

    def most_images(self) -> tuple[int, int, int]:
        """Return the largest number of tokens of images in a sequence of the rows in use, the index of its row, and its own in the row."""
        largest = 0, 0, 0
        for number, rows, sizes in self._sizes():
            if len(rows):
                of_rows = np.bincount(rows, sizes)
                largest = max(largest, (int(of_rows.max()), int(of_rows.argmax()), number))
        return largest

    def _sizes(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the images of the rows in use, a chunk of the table at a time: the number of their sequence in the row, and for each image the
        index of its row and its tokens, int (n,).
        """
        used = np.zeros(len(self.lengths), dtype=bool)
        used[self.indices] = True
        for number, name in enumerate(name for name in IMAGE_COLUMNS if name in self.table.column_names):
            start = 0  # of the chunk, in the table
            for chunk in self.table.data.column(name).chunks:
                rows, images = (
                    start + np.repeat(np.arange(len(chunk)), chunk.value_lengths().to_numpy()),
                    chunk.flatten(),
                )
                of_image = images.field("end").to_numpy() - images.field("start").to_numpy()
                yield number, rows[used[rows]], of_image[used[rows]]
                start += len(chunk)

    @property
    def longest(self) -> np.ndarray:
        """The number of tokens in the longest sequence of each row of the table, or in the longest row of each packed row, int (n,)."""
        if "seq_lengths" not in self.table.column_names:
            return self.lengths
        longest = [np.zeros(0, dtype=np.int64)]
        for chunk in self.table.data.column("seq_lengths").chunks:
            if len(chunk):
                counts = chunk.value_lengths().to_numpy()  # rows in each packed row, at least one
                longest.append(np.maximum.reduceat(chunk.flatten().to_numpy(), np.cumsum(counts) - counts))
        return np.concatenate(longest)

    def select(self, indices: np.ndarray) -> "Part":
        """Return a part with a different set of rows in use."""
        return Part(self.table, self._place, indices, self.weight, self.images)

    def row(self, index: int) -> Row:
        """Return the row at an index of the table."""
        entry = self.table.data.fast_slice(index, 1)

        def values(name: str) -> np.ndarray:
            return np.array(entry.column(name)[0].values.to_numpy(zero_copy_only=False))

        masks = ("trained", "rejected_trained")

        def images(name: str) -> list[TokenImage]:
            return (
                [TokenImage(**image) for image in entry.column(name)[0].as_py()] if name in entry.column_names else []
            )

        sequences = [
            Tokens(values(ids), values(mask), images=images(column))
            for ids, mask, column in zip(self._id_columns, masks, IMAGE_COLUMNS, strict=False)
        ]
        segments, sources = None, [index]
        if "seq_lengths" in entry.column_names:
            segments = values("seq_lengths").tolist()
            sources = values(ROW_OF_TOKEN)[np.cumsum([0, *segments[:-1]])].tolist()
        return Row(sequences, segments, self._place(index), sources, self.images)

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the rows in use, a chunk of the table at a time: their indices (n,), ends (n,), tokens (t,) and target masks (t,).

        The rows' tokens are concatenated, and row i ends before ``ends[i]``. Preferences contribute their chosen answers
        only.
        """
        used = np.zeros(len(self.lengths), dtype=bool)
        used[self.indices] = True
        start, columns = 0, (self.table.data.column(name).chunks for name in ("input_ids", "trained"))
        for ids, trained in zip(*columns, strict=True):
            lengths = ids.value_lengths().to_numpy()
            is_used = used[start : start + len(lengths)]
            if is_used.any():
                keep = np.repeat(is_used, lengths)  # by token
                tokens, targets = (each.flatten().to_numpy(zero_copy_only=False)[keep] for each in (ids, trained))
                yield start + np.flatnonzero(is_used), np.cumsum(lengths[is_used]), tokens, targets
            start += len(lengths)

    def row_hashes(self, length: int | None = None) -> np.ndarray:
        """Return a hash of the tokens of each row in use, or of the first ``length`` of each sequence, uint64 (n,)."""
        # Lengths that cut no row share one entry.
        key = None if length is None or length >= self.lengths.max(initial=0) else length
        if key not in self._hashes:
            self._hashes[key] = self._hash_rows(key)
        return self._hashes[key]

    def _hash_rows(self, length: int | None) -> np.ndarray:
        """Compute the hashes of `row_hashes`; None hashes whole sequences. The hash of a preference chains its two sequences."""
        hashes = np.zeros(len(self.lengths), dtype=np.uint64)
        used = np.zeros(len(self.lengths), dtype=bool)
        used[self.indices] = True
        for name in self._id_columns:
            start = 0  # of the chunk, in the table
            for chunk in self.table.data.column(name).chunks:
                ids, bounds = chunk.flatten().to_numpy(), np.concatenate([[0], np.cumsum(chunk.value_lengths())])
                for row in np.flatnonzero(used[start : start + len(chunk)]):
                    tokens = ids[bounds[row] : bounds[row + 1]][:length]
                    content = hashes[start + row].tobytes() + tokens.tobytes()  # with the hash of the row so far
                    content += self._image_hashes[start + row].encode()  # whose tokens are the same for all images
                    hashes[start + row] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
                start += len(chunk)
        return hashes[self.indices]

    def place(self, index: int) -> str:
        """Return the origin of a row."""
        return self._place(index)

    def token_ids(self) -> Iterator[np.ndarray]:
        """Yield all tokens of the table in chunks, including rows that are not in use."""
        for name in self._id_columns:
            for chunk in self.table.data.column(name).chunks:
                yield chunk.flatten().to_numpy(zero_copy_only=False)


def _hashes_of_rows(images: Any) -> Iterator[list[str]]:
    """Yield the hashes of the images of each row, given a chunk of a column of images."""
    hashes, start = images.flatten().field("hash").to_pylist(), 0
    for length in images.value_lengths().to_pylist():
        yield hashes[start : start + length]
        start += length


def _list_lengths(column: Any) -> np.ndarray:
    """Return the lengths of the lists in a column without reading the lists."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)
