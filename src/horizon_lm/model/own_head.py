"""Find a head of its own in a folder whose config says that the head is the embedding. transformers opens both, untied."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from horizon_lm.common.ranges import pieces
from horizon_lm.model.folder import weight_files

_ROWS = 4096  # that are compared at once


def has_own_head(folder: Path, config: Any, model_class: Any) -> bool:
    """Return whether a folder's files have a head with other values than the embedding, although its config says that they are one.

    Return False if the files cannot be read; the error is raised when the weights are loaded. ``model_class``: the class of
    transformers that builds the model, such as AutoModelForCausalLM.
    """
    if not getattr(config, "tie_word_embeddings", False) or type(config) not in model_class._model_mapping:
        return False
    tied = model_class._model_mapping[type(config)]._tied_weights_keys
    files = tuple((path, path.stat().st_mtime_ns) for path in weight_files(folder))
    return any(_have_other_values(files, *names) for names in (tied.items() if isinstance(tied, dict) else ()))


@lru_cache(maxsize=16)  # several parts of a run read the config
def _have_other_values(files: tuple[tuple[Path, int], ...], head: str, table: str) -> bool:
    """Return whether head and table are both in the files with different values.

    Args:
        files: the files with their times of writing, so that a changed file is not answered from the cache.
        head, table: names of the two tensors.
    """
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, framework="pt")) for path, _ in files]
            file_of = {name: file for file in opened for name in {head, table}.intersection(file.keys())}
            if len(file_of) < 2:
                return False
            one, other = (file.get_slice(name) for name, file in file_of.items())
            if one.get_shape() != other.get_shape():  # rejected when the weights are read
                return False
            return any(not torch.equal(*parts) for parts in zip(_parts(one), _parts(other), strict=True))
        except (OSError, SafetensorError):  # reported when the weights are read
            return False


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Read a slice of safetensors a few rows at a time."""
    for rows in pieces(tensor.get_shape()[0], _ROWS):
        yield tensor[rows]
