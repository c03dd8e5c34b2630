"""Compute the log-probabilities of answers under the initial model once, and keep them on disk under checksums."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_lm.data.loader import Batch, in_order
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.errors import NonFiniteError
from horizon_lm.objective.base import evaluation_mode
from horizon_lm.objective.dpo import answer_logprobs
from horizon_lm.resources import usable_cores
from horizon_lm.store.store import as_array

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


VERSION = 3  # of what is kept


class ReferenceCache:
    """Reference log-probabilities of data sets, by what they depend on. One that was interrupted goes on where it was.

    Args:
        model: streamed, with the weights that the run starts from.
        say: prints a line about what was kept and cannot be used.

    Attributes:
        problem: why nothing can be kept, as a sentence; empty if it can.
    """

    def __init__(self, model: Any, say: Callable[[str], None] = lambda line: None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._folder = Path(base).expanduser() / "horizon-lm" / "reference"
        self._model, self._key, self._say, self.problem = model, model_key(model), say, ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError(f"{self._folder} is not writable")
        except OSError as error:
            self.problem = f"it cannot be kept ({error})"

    def logprobs(
        self, rows: TokenTable, batch_size: int, advance: Callable[[int, int], None] = lambda done, of: None
    ) -> np.ndarray:
        """Log-probabilities (n, 2), float32, of the chosen and the rejected answers of all rows.

        Args:
            batch_size: rows in one forward.
            advance: told how many rows are done, of how many.

        Raises:
            NonFiniteError: some are NaN or infinite.
        """
        key = hashlib.sha256(f"{VERSION} {self._key} {rows.fingerprint}".encode()).hexdigest()
        file = None if self.problem else self._folder / f"{key[:32]}.pairs"
        kept = KeptPairs(file, len(rows), key)
        if kept.num_altered:
            self._say(
                f"reference: {kept.num_altered:,} of {len(rows):,} rows in {file} are not as they were written; they are "
                "computed again"
            )
        self._compute(kept, rows, batch_size, advance)
        if not np.isfinite(kept.values).all():
            place = rows[int(np.flatnonzero(~np.isfinite(kept.values).all(1))[0])].place
            kept.forget()
            raise NonFiniteError(f"the reference gives no finite log-probability to {place}: check the model's weights")
        return kept.values

    def _compute(self, kept: KeptPairs, rows: TokenTable, batch_size: int, advance: Callable[[int, int], None]) -> None:
        """Those that are not there yet; kept as they come, where other runs may keep the same."""
        if kept.known.all():
            return
        with evaluation_mode(self._model):
            for batch in in_order(rows, batch_size):
                first, stop = batch.rows[0], batch.rows[-1] + 1
                if not kept.known[first:stop].all():
                    kept.put(first, answer_logprobs(self._model, batch)[0].T.cpu().numpy())
                advance(stop, len(rows))


def lookup(values: np.ndarray) -> Callable[[Batch], np.ndarray]:
    """From a batch to the values (2, B) of its rows."""
    return lambda batch: np.ascontiguousarray(values[list(batch.rows)].T)


def model_key(model: Any) -> str:
    """A name for a streamed model as it is: its config, how it computes, and every byte of its weights."""
    import transformers

    engine = model._horizon.engine
    how = [
        transformers.__version__, torch.__version__, model.config.to_json_string(use_diff=False),
        model.config.get_text_config()._attn_implementation, engine.options.compute_dtype, engine.device.torch_device.type,
    ]  # fmt: skip
    digest = hashlib.sha256(repr(how).encode())
    with ThreadPoolExecutor(usable_cores()) as threads:
        for each in threads.map(_digest, engine.store.units.items()):
            digest.update(each)
    return digest.hexdigest()


def _digest(unit: tuple[str, Any]) -> bytes:
    """Of the weights of a unit, with their names; what is between them does not count."""
    name, slabs = unit
    digest = hashlib.sha256(name.encode())
    for slab in (slabs.weights, slabs.low):
        for tensor in slabs.layout if slab is not None else ():
            digest.update(tensor.encode())
            digest.update(as_array(slabs.layout.view(slab, tensor)))
    return digest.digest()
