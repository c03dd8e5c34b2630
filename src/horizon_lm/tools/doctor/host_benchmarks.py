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
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from horizon_lm.common.ranges import pieces
from horizon_lm.device.base import Device
from horizon_lm.errors import ConfigError
from horizon_lm.memory.arena import Arena, as_array
from horizon_lm.tools.doctor.timing import Rounds

_MOST_HOST_BYTES = 2**30  # several times the largest caches
_PIECE = 1 << 22  # elements of 4 bytes, about the size of an update task
_VOCABULARY, _HIDDEN, _WIDTH, _WIDER = 8192, 576, 1536, 3  # blocks of SmolLM2-135M; a smaller table
_WIDE_BLOCK = 3_540_096 + 3 * _HIDDEN * (_WIDER - 1) * _WIDTH  # parameters
_BYTES_PER_PARAMETER = 18  # including temporary memory for random weights
_OTHER_UNITS, _LEAST_OF_UNIT = 2, 1e-7  # units beside the blocks; the least seconds of a unit's update


@cache
def _scale_kernel() -> Any:
    """Return ``x *= factor`` compiled like the optimizer's kernels."""
    from horizon_lm.memory.kernels.bits import kernel

    @kernel
    def scale(values: Any, factor: Any) -> None:
        for i in range(len(values)):
            values[i] *= factor

    return scale


def host_bandwidth(cores: int, available: int, rounds: Rounds) -> dict[str, float]:
    """Return the bytes per second that threads read and write in place, by number of threads: 1, 2, 4, up to all cores.

    Args:
        cores: maximum number of threads.
        available: bytes of free host memory, of which at most an eighth is used.
        rounds: time budget.
    """
    num_bytes = 16 * 2**20 if rounds.quick else min(_MOST_HOST_BYTES, available // 8)
    size = max(1, num_bytes // 4)
    values = as_array(Arena(4 * size).take(size, torch.float32).fill_(1.0))
    parts = [values[part] for part in pieces(size, _PIECE)]
    kernel, factor = _scale_kernel(), np.float32(1.0)
    rates = {}
    for threads in sorted({cores, *(2**k for k in range(cores.bit_length()))}):
        with ThreadPoolExecutor(threads) as pool:
            seconds = rounds.median(lambda pool=pool: list(pool.map(lambda part: kernel(part, factor), parts)))  # type: ignore[misc]
        rates[str(threads)] = 8.0 * size / seconds  # 4 bytes of each element are read, and 4 are written
    return rates


class UpdateTime(NamedTuple):
    """The seconds of an optimizer step: for each parameter, and for each unit in addition to its parameters."""

    parameter: float
    unit: float


def update_time(precision: str, device: Device, cores: int, available: int, rounds: Rounds) -> UpdateTime:
    """Measure an optimizer step, from `step` until the last weight is written.

    Two models with the same number of units are timed, so the difference of their times is due to their parameters alone; starting the
    update of a unit takes a third of the time of small blocks. One has blocks of SmolLM2-135M, the other one blocks with a wider feed-forward
    layer; weights and gradients are random. As in training, a GPU reserves some cores for its threads.

    Args:
        precision: precision of the weights.
        device: an open device.
        cores: number of cores; more cores need a larger model to stay busy.
        available: bytes of free host memory, of which at most a quarter is used, but no more than 2 GiB.
        rounds: time budget.
    """
    blocks = 1 if rounds.quick else _num_blocks(cores, available)
    # Numbers of parameters, and seconds of a step of each model.
    few, seconds_of_few = _measure_step(_config(blocks), precision, device, rounds)
    many, seconds_of_many = _measure_step(_config(blocks, times_as_wide=_WIDER), precision, device, rounds)
    if seconds_of_many <= seconds_of_few:  # the machine was busy
        return UpdateTime(seconds_of_many / many, _LEAST_OF_UNIT)
    parameter = (seconds_of_many - seconds_of_few) / (many - few)
    return UpdateTime(parameter, max(_LEAST_OF_UNIT, (seconds_of_few - parameter * few) / (blocks + _OTHER_UNITS)))


def _measure_step(config: Any, precision: str, device: Device, rounds: Rounds) -> tuple[int, float]:
    """Return the number of parameters of a model, and the seconds of its optimizer step."""
    import horizon_lm

    gc.collect()  # free the previous streamed model, which has reference cycles
    with _one_thread():
        model = horizon_lm.from_config(config, device=device, precision=precision, compile=False)
        optimizer = horizon_lm.AdamW(model, lr=1e-5, weight_decay=0.01)
        ids = torch.arange(16)[None]
        model(input_ids=ids, labels=ids).loss.backward()

    def step() -> None:
        optimizer.step()
        horizon_lm.synchronize(model)

    return sum(param.numel() for param in model.parameters()), rounds.median(step)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager: run torch on one thread, because its threads wait long for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_blocks(cores: int, available: int) -> int:
    """Return a number of blocks that keeps all cores busy, and that fits into memory with the wider ones."""
    most_parameters = min(2 * 2**30, available // 4) // _BYTES_PER_PARAMETER
    return max(1, min(max(12, cores // 2), (most_parameters - _VOCABULARY * _HIDDEN) // _WIDE_BLOCK))


def _config(blocks: int, times_as_wide: int = 1) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=_HIDDEN, intermediate_size=times_as_wide * _WIDTH, num_hidden_layers=blocks, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=_VOCABULARY, tie_word_embeddings=True,
    )  # fmt: skip


_CHUNK = 16 * 2**20
_MOST_DISK_BYTES = 512 * 2**20


def disk_rates(folder: Path, rounds: Rounds) -> tuple[float, float]:
    """Return the bytes per second of writing with fsync, and of reading without the page cache.

    The file has no name, so it cannot be left behind, and takes at most a tenth of the free space. A rate that cannot
    be measured is 0: both rates on an almost full disk, the read rate if the system cannot drop its page cache (macOS).

    Raises:
        ConfigError: no file can be written in the folder.
    """
    try:
        chunks = min(_CHUNK if rounds.quick else _MOST_DISK_BYTES, shutil.disk_usage(folder).free // 10) // _CHUNK
        if not chunks:
            return 0.0, 0.0
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measure_file(file, chunks, rounds)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"--folder: {folder}: {error.strerror or error}; name a folder that is writable") from error


def _measure_file(file: BinaryIO, chunks: int, rounds: Rounds) -> tuple[float, float]:
    """Return the bytes per second of writing to the disk, and of reading past the page cache; 0 where it cannot be emptied."""
    content = os.urandom(_CHUNK)  # incompressible, for file systems that compress
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

    def drop_page_cache() -> None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)

    def read() -> None:
        while file.readinto(buffer):  # type: ignore[attr-defined]
            pass

    num_bytes = float(chunks * _CHUNK)
    written = num_bytes / rounds.median(write, prepare=empty)
    if not hasattr(os, "posix_fadvise"):
        return written, 0.0
    return written, num_bytes / rounds.median(read, prepare=drop_page_cache)
