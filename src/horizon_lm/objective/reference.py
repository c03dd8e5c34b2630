"""Log-probabilities of answers under the model that a run starts from: computed once, kept on disk.

So there is no second model in memory, and none is streamed in the steps.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_lm.data.loader import Batch, in_order
from horizon_lm.data.table import TokenTable
from horizon_lm.device.cores import usable_cores
from horizon_lm.errors import NonFiniteError
from horizon_lm.objective.base import judging
from horizon_lm.objective.dpo import answer_logprobs
from horizon_lm.objective.kept import KeptPairs
from horizon_lm.store.arena import as_array

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
        with judging(self._model):
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
