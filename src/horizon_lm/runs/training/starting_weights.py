"""Identify the weights that a run starts from by a sample of their bytes, so that a resumed run need not read all of them again."""

import os
from pathlib import Path

import xxhash

from horizon_lm.model.folder import weight_files

_PIECES, _PIECE_BYTES = 256, 4096  # of each file


def sample_weights(folder: Path, gguf_file: str | None) -> str:
    """Return the xxh3-128 of the sizes of a model's weight files, and of pieces that are spread evenly over each.

    Weights of another model or training have another hash; the folder does not matter.
    """
    digest = xxhash.xxh3_128()
    for path in weight_files(folder) if gguf_file is None else [folder / gguf_file]:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            stride = max(_PIECE_BYTES, size // _PIECES)
            for start in range(0, size, stride):
                stream.seek(start)
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()
