"""Compute the log-probabilities of answers under the initial model once, and cache them on disk with checksums."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_lm.common.resources import usable_cores
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import NonFiniteError
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.runs.data.ahead import BatchesAhead
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.loader import batch_from
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.objective.base import evaluation_mode, without_adapters
from horizon_lm.runs.objective.dpo import answer_logprobs

_MAGIC = b"HLMPAIR1"
_RECORD = np.dtype([("pair", "<f4", 2), ("checksum", "<u8")])


class PairFile:
    """A file of fp32 pairs (n, 2) that grows during their computation. Several processes may write the same pairs.

    The file consists of `_MAGIC` and one record per row. A record of zeros was never written. A record with a wrong
    checksum was altered or partly written, and also counts as missing.

    Args:
        file: path of the file, or None to keep the pairs in memory only.
        count: number of rows.
        key: hash of everything that the pairs depend on; it is part of the checksums.

    Attributes:
        values: the pairs, float32 (n, 2); zero if unknown.
        known: mask of the known pairs, bool (n,).
        num_altered: number of records with a wrong checksum.
    """

    def __init__(self, file: Path | None, count: int, key: str) -> None:
        self._file = file
        self._key = np.frombuffer(bytes.fromhex(key)[:8], np.uint64)[0]  # 8 bytes, as a pair has
        self.values, self.known, self.num_altered = np.zeros((count, 2), np.float32), np.zeros(count, bool), 0
        with suppress(OSError):  # no file yet, or none that can be read: all pairs are computed
            self._read(b"" if file is None else file.read_bytes())

    def _read(self, content: bytes) -> None:
        """Take the pairs with correct checksums from the contents of a file: set ``values``, ``known`` and ``num_altered``."""
        count = len(self.known)
        # Records after the end of a short file become zeros, which stand for records that were never written.
        body = content[len(_MAGIC) :].ljust(count * _RECORD.itemsize, b"\0")
        records = np.frombuffer(body, _RECORD, count)
        self.known = records["checksum"] == self._checksums(records["pair"], 0)
        if not content.startswith(_MAGIC):
            self.known[:] = False
        self.values[self.known] = records["pair"][self.known]
        written = (records["checksum"] != 0) | records["pair"].any(1)
        self.num_altered = int((written & ~self.known).sum())

    def put(self, first: int, pairs: np.ndarray) -> None:
        """Store the pairs of consecutive rows from ``first`` on, in memory and in the file. What cannot be written is recomputed later."""
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

    def delete(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _checksums(self, pairs: np.ndarray, first: int) -> np.ndarray:
        """Return the checksums (n,) of the pairs of rows from ``first`` on, by SplitMix64 (Steele et al., OOPSLA 2014).

        For one row and key, the mapping is a bijection, so any altered pair changes the checksum.
        """
        x = np.ascontiguousarray(pairs, "<f4").view(np.uint64).reshape(-1) ^ self._key
        x = x + np.arange(first + 1, first + len(pairs) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


VERSION = 3  # version of the cached values; increase it when their computation changes


class ReferenceCache:
    """A cache of reference log-probabilities by dataset and model. An interrupted computation resumes where it stopped.

    Args:
        model: the streamed model with its initial weights.
        say: function that prints a line about cached values that cannot be used.
        with_adapters: the reference has the model's adapters, as they are now; otherwise it is the base alone.

    Attributes:
        problem: the reason why values cannot be cached; empty if they can.
    """

    def __init__(self, model: Any, say: Callable[[str], None] = lambda line: None, with_adapters: bool = False) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._folder = Path(base).expanduser() / "horizon-lm" / "reference"
        self._model, self._key, self._say, self.problem = model, model_key(model, with_adapters), say, ""
        self._with_adapters = with_adapters
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError(f"{self._folder} is not writable")
        except OSError as error:
            self.problem = f"it cannot be cached ({error})"

    def logprobs(
        self, rows: TokenTable, batch_size: int, advance: Callable[[int, int], None] = lambda done, of: None
    ) -> np.ndarray:
        """Return the log-probabilities, float32 (n, 2), of the chosen and rejected answers of all rows.

        Args:
            rows: preferences.
            batch_size: number of rows in one forward pass.
            advance: called with the number of finished rows and the number of all rows.

        Raises:
            NonFiniteError: some log-probabilities are NaN or infinite.
        """
        cache_key = hashlib.sha256(f"{VERSION} {self._key} {rows.fingerprint}".encode()).hexdigest()
        file = None if self.problem else self._folder / f"{cache_key[:32]}.pairs"
        pairs = PairFile(file, len(rows), cache_key)
        if pairs.num_altered:
            self._say(
                f"reference: corrupted rows in {file}, which will be computed again: {pairs.num_altered:,} of {len(rows):,}"
            )
        self._compute(pairs, rows, batch_size, advance)
        are_finite = np.isfinite(pairs.values).all(1)
        if not are_finite.all():
            place = rows[int(np.argmin(are_finite))].place  # of the first row that is not
            pairs.delete()
            raise NonFiniteError(f"the reference log-probability of {place} is not finite; check the model's weights")
        return pairs.values

    def _compute(self, file: PairFile, rows: TokenTable, batch_size: int, advance: Callable[[int, int], None]) -> None:
        """Compute and store the pairs that are missing; pairs that not all ranks know count as missing.

        In each turn, every rank computes another batch, and all ranks store the pairs of all. Ranks without a batch in the last turn
        compute its last batch again, because all ranks take part in every pass.
        """
        mesh = engine_of(self._model).mesh
        # Each machine has a file of its own, so a pair counts as known only if all ranks know it.
        masks = mesh.exchange("the known reference", np.packbits(file.known).tobytes().hex())
        known = np.bitwise_and.reduce([np.frombuffer(bytes.fromhex(mask), np.uint8) for mask in masks])
        file.known = np.unpackbits(known, count=len(rows)).astype(bool)
        missing = [
            first for first in range(0, len(rows), batch_size) if not file.known[first : first + batch_size].all()
        ]
        # The first row of each rank's batch, by turn.
        turns = [missing[first : first + mesh.size] for first in range(0, len(missing), mesh.size)]

        def build(turn: int) -> Batch:
            starts = turns[turn]
            return batch_from(rows, starts[min(mesh.rank, len(starts) - 1)], batch_size)

        adapters = nullcontext() if self._with_adapters else without_adapters(self._model)
        with evaluation_mode(self._model), adapters, BatchesAhead(build, len(turns), rows) as batches:
            for turn, starts in enumerate(turns):
                logprobs, _ = answer_logprobs(self._model, batches.batch(turn))
                pairs = logprobs.T.cpu().numpy()
                everyone = mesh.exchange("the reference", pairs.tolist())
                # Ranks beyond the starts have repeated the last batch.
                for start, pairs_of_rank in zip(starts, everyone, strict=False):
                    file.put(start, np.asarray(pairs_of_rank, np.float32))
                advance(min(starts[-1] + batch_size, len(rows)), len(rows))


def lookup(values: np.ndarray) -> Callable[[Batch], np.ndarray]:
    """Return a function from a batch to the values (2, B) of its rows."""
    return lambda batch: np.ascontiguousarray(values[list(batch.rows)].T)


def model_key(model: Any, with_adapters: bool = False) -> str:
    """Return a hash of all that a streamed model's outputs depend on: its config, the way in which it is computed, and its weights.

    It is the same on all ranks, which exchange hashes if each has a part of the weights.

    Args:
        model: the streamed model.
        with_adapters: also hash the configs and weights of its adapters; otherwise the base alone.
    """
    import transformers

    engine = engine_of(model)
    computation = [
        transformers.__version__, torch.__version__, model.config.to_json_string(use_diff=False),
        model.config.get_text_config()._attn_implementation, engine.options.compute_dtype, engine.device.torch_device.type,
    ]  # fmt: skip
    left_out = engine.parts.adapter_names
    if with_adapters:
        for each in model.peft_config.values():  # plain data, and sets, which `sorted` makes lists of
            computation.append(json.dumps(each.to_dict(), sort_keys=True, default=sorted))
        left_out = frozenset()
    digest = hashlib.sha256(repr(computation).encode())
    hashed = [slabs for unit in engine.store.units.values() for slabs in unit.hashed]
    with ThreadPoolExecutor(usable_cores()) as threads:
        for each in threads.map(lambda slabs: _hash_of_weights(slabs, left_out), hashed):
            digest.update(each)
    if not engine.access.has_parts:
        return digest.hexdigest()
    everyone = engine.mesh.exchange("the hash of the weights", digest.hexdigest())
    return hashlib.sha256("".join(everyone).encode()).hexdigest()


def _hash_of_weights(slabs: Sequence[Slab], left_out: frozenset[str]) -> bytes:
    """Return a hash of the names and own weights of slabs but those in ``left_out``, without the alignment gaps between the weights."""
    digest = hashlib.sha256(slabs[0].name.encode())
    for slab in slabs:
        for values in slab.tensors():
            for name in slab.layout:
                if name not in left_out:
                    digest.update(name.encode())
                    digest.update(as_array(values[slab.layout.part_of(name, slab.own)]))
    return digest.digest()
