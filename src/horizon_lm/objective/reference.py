"""Log-probabilities of answers under the model that a run starts from: computed once, kept on disk.

So there is no second model in memory, and none is streamed in the steps.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizon_lm.data.loader import Batch, in_order
from horizon_lm.data.table import TokenTable
from horizon_lm.objective.dpo import answer_logprobs

_SAMPLES, _SAMPLE_BYTES = 64, 2**20  # of each file of weights


def reference_logprobs(
    model: Any, rows: TokenTable, batch_size: int, key: str, advance: Callable[[int, int], None] = lambda done, of: None
) -> np.ndarray:
    """Log-probabilities (n, 2), float32, of the chosen and the rejected answers of all rows.

    Args:
        model: streamed, with the weights that the run starts from.
        batch_size: rows in one forward.
        key: of the model and how it computes, as `model_key` makes it.
        advance: told how many rows are done, of how many.
    """
    file = _folder() / f"{hashlib.sha256(f'{key} {rows.fingerprint}'.encode()).hexdigest()[:32]}.npy"
    if file.is_file():
        return np.asarray(np.load(file))
    values = np.concatenate(list(_compute(model, rows, batch_size, advance)))
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as stream:
        np.save(stream, values)
    part.replace(file)
    return values


def _compute(
    model: Any, rows: TokenTable, batch_size: int, advance: Callable[[int, int], None]
) -> Iterator[np.ndarray]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for batch in in_order(rows, batch_size):
            yield answer_logprobs(model, batch)[0].T.cpu().numpy()
            advance(batch.rows[-1] + 1, len(rows))
    model.train(was_training)


def lookup(values: np.ndarray) -> Callable[[Batch], np.ndarray]:
    """From a batch to the values (2, B) of its rows."""
    return lambda batch: np.ascontiguousarray(values[list(batch.rows)].T)


def model_key(folder: Path, *settings: Any) -> str:
    """A name for a model in a folder and the settings that its numbers depend on.

    Of each file of weights its name, its size and samples from all over it are looked at: 64 MiB at most.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".safetensors", ".gguf", ".json", ".bin"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for index in range(min(_SAMPLES, -(-size // _SAMPLE_BYTES))):
                stream.seek(index * max(_SAMPLE_BYTES, size // _SAMPLES))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "horizon-lm" / "reference"
