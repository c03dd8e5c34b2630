"""Pairs of numbers on disk, row by row, each under a checksum."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

_MAGIC = b"HLMPAIR1"
_RECORD = np.dtype([("pair", "<f4", 2), ("checksum", "<u8")])


class KeptPairs:
    """Pairs (n, 2) of fp32 numbers, kept in a file as they come. Several processes may write the same ones.

    The file is `_MAGIC` and a record for each row. A record of zeros was never written; one with another checksum than its
    own was altered or broken off, and is missing, too.

    Args:
        file: None to keep nothing.
        count: rows.
        key: what the numbers depend on; numbers under another key have other checksums.

    Attributes:
        values: (n, 2), zero where nothing is known.
        known: (n,), where something is.
        num_altered: rows of the file that are not as they were written.
    """

    def __init__(self, file: Path | None, count: int, key: str) -> None:
        self._file, self._key = file, np.frombuffer(bytes.fromhex(key)[:8], np.uint64)[0]
        self.values, self.known, self.num_altered = np.zeros((count, 2), np.float32), np.zeros(count, bool), 0
        with suppress(OSError):
            self._read(b"" if file is None else file.read_bytes())

    def _read(self, content: bytes) -> None:
        count = len(self.known)
        body = content[len(_MAGIC) :].ljust(count * _RECORD.itemsize, b"\0")
        records = np.frombuffer(body, _RECORD, count)
        self.known = records["checksum"] == self._checksums(records["pair"], 0)
        if not content.startswith(_MAGIC):
            self.known[:] = False
        self.values[self.known] = records["pair"][self.known]
        written = records["checksum"] != 0
        written |= records["pair"].any(1)
        self.num_altered = int((written & ~self.known).sum())

    def put(self, first: int, pairs: np.ndarray) -> None:
        """Keep the pairs of consecutive rows. A full disk is no error: then they are missing another time."""
        stop = first + len(pairs)
        self.values[first:stop], self.known[first:stop] = pairs, True
        if self._file is None:
            return
        records = np.zeros(len(pairs), _RECORD)
        records["pair"], records["checksum"] = pairs, self._checksums(self.values[first:stop], first)
        with suppress(OSError):
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, _MAGIC, 0)
                os.pwrite(descriptor, records.tobytes(), len(_MAGIC) + first * _RECORD.itemsize)
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _checksums(self, pairs: np.ndarray, first: int) -> np.ndarray:
        """Return checksums of rows of pairs: SplitMix64 (Steele et al., OOPSLA 2014), in which no two pairs of a row agree."""
        x = np.ascontiguousarray(pairs, "<f4").view(np.uint64).reshape(-1) ^ self._key
        x = x + np.arange(first + 1, first + len(pairs) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
