"""Benchmark the host: memory bandwidth, optimizer updates, and the disk of a folder."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from horizon_lm.device.base import Device
from horizon_lm.doctor.timing import Rounds
from horizon_lm.errors import ConfigError
from horizon_lm.store.store import Arena, as_array

_MOST_HOST_BYTES = 2**30  # several times the largest caches
_PIECE = 1 << 22  # elements of 4 bytes; about as many bytes as in a piece of an update
_BLOCK, _VOCABULARY, _HIDDEN = 3_540_096, 8192, 576  # parameters of a block of SmolLM2-135M; a smaller table
_BYTES_PER_PARAMETER = 18  # with what drawing the weights takes


@cache
def _scale() -> Any:
    """A compiled ``x *= factor``, as the optimizer's kernels are compiled."""
    from horizon_lm.kernels.bits import kernel

    @kernel
    def scale(values: Any, factor: Any) -> None:
        for i in range(len(values)):
            values[i] *= factor

    return scale


def host_bandwidth(cores: int, available: int, rounds: Rounds) -> dict[str, float]:
    """Bytes per second that threads read and write in place, by number of threads: 1, 2, 4, and up to all cores.

    Args:
        cores: the most threads.
        available: bytes of host memory that are free; an eighth of them is used at most.
    """
    num_bytes = 16 * 2**20 if rounds.quick else min(_MOST_HOST_BYTES, available // 8)
    size = max(1, num_bytes // 4)
    values = as_array(Arena(4 * size).take(size, torch.float32).fill_(1.0))
    pieces = [values[start : start + _PIECE] for start in range(0, size, _PIECE)]
    kernel, factor = _scale(), np.float32(1.0)
    rates = {}
    for threads in sorted({cores, *(2**k for k in range(cores.bit_length()))}):
        with ThreadPoolExecutor(threads) as pool:
            seconds = rounds.median(lambda pool=pool: list(pool.map(lambda piece: kernel(piece, factor), pieces)))  # type: ignore[misc]
        rates[str(threads)] = 8.0 * size / seconds
    return rates


def update_seconds(precision: str, device: Device, cores: int, available: int, rounds: Rounds) -> float:
    """Seconds per parameter of an optimizer step, from `step` to the last weight written.

    On a model with blocks of SmolLM2-135M and random weights, after a backward. A device that is a GPU leaves some cores to
    its own threads, here as in training.

    Args:
        precision: of the weights.
        device: that is open.
        cores: many of them need many pieces, so more parameters.
        available: bytes of host memory that are free; a quarter of them is used at most, and no more than 2 GiB.
    """
    import horizon_lm

    gc.collect()  # a streamed model refers to itself; the last one's memory is needed now
    blocks = 1 if rounds.quick else _num_blocks(cores, available)
    with _one_thread():
        model = horizon_lm.from_config(_config(blocks), device=device, precision=precision, compile=False)
        optimizer = horizon_lm.AdamW(model, lr=1e-5, weight_decay=0.01)
        ids = torch.arange(16)[None]
        model(input_ids=ids, labels=ids).loss.backward()

    def step() -> None:
        optimizer.step()
        horizon_lm.synchronize(model)

    return rounds.median(step) / sum(param.numel() for param in model.parameters())


@contextmanager
def _one_thread() -> Iterator[None]:
    """For what only prepares: torch's threads wait for each other after every small operation, long if others run, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_blocks(cores: int, available: int) -> int:
    """As many blocks as give all cores pieces, and fit into some of the memory."""
    affordable = min(2 * 2**30, available // 4) // _BYTES_PER_PARAMETER
    return max(1, min(max(12, cores // 2), (affordable - _VOCABULARY * _HIDDEN) // _BLOCK))


def _config(blocks: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=_HIDDEN, intermediate_size=1536, num_hidden_layers=blocks, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=_VOCABULARY, tie_word_embeddings=True,
    )  # fmt: skip


_CHUNK = 16 * 2**20
_MOST_DISK_BYTES = 512 * 2**20


def disk_rates(folder: Path, rounds: Rounds) -> tuple[float, float]:
    """Bytes per second written, until the disk has them, and read, after the system has forgotten them.

    The file has no name, so nothing can be left of it; it takes a tenth of what is free at most. 0 stands for what cannot
    be measured: both on a disk that is almost full, reading where a system cannot be made to forget (macOS).

    Raises:
        ConfigError: no file can be written there.
    """
    try:
        chunks = min(_CHUNK if rounds.quick else _MOST_DISK_BYTES, shutil.disk_usage(folder).free // 10) // _CHUNK
        if not chunks:
            return 0.0, 0.0
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measure(file, chunks, rounds)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(
            f"--folder: {folder}: {error.strerror or error}; name a folder that can be written to"
        ) from error


def _measure(file: BinaryIO, chunks: int, rounds: Rounds) -> tuple[float, float]:
    content = os.urandom(_CHUNK)  # nothing that a file system could compress
    buffer = bytearray(_CHUNK)

    def empty() -> None:
        file.seek(0)
        file.truncate()

    def write() -> None:
        for _ in range(chunks):
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())

    def forget() -> None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)

    def read() -> None:
        while file.readinto(buffer):  # type: ignore[attr-defined]
            pass

    num_bytes = float(chunks * _CHUNK)
    written = num_bytes / rounds.median(write, prepare=empty)
    if not hasattr(os, "posix_fadvise"):
        return written, 0.0
    return written, num_bytes / rounds.median(read, prepare=forget)
