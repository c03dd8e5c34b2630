"""The file of one unit: its slabs as they lie in host memory, as a safetensors file.

The file is a header of whole pages, then each slab in whole pages: weights, low halves, both moments, and the scales of
8-bit moments. So a slab is written from where it lies and read back to where it belongs, with no copy and without the page
cache. Tensors have the names of their parameters, with a suffix for everything but the weight. Bytes between tensors belong
to tensors named ``.padding``, because the format allows no gaps (https://github.com/huggingface/safetensors, "Format").
"""

import ctypes
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from horizon_lm.constants import PAGE
from horizon_lm.errors import ConfigError
from horizon_lm.quantities import page_aligned
from horizon_lm.store.checkpoint_reader import DTYPE_NAMES

UNITS = "units"  # the folder of these files
WEIGHT, LOW = "", ".low"
_CHUNK_BYTES = 8 << 20  # of one write or read: large enough for any disk, small enough to limit its rate
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
_PADDING = ".padding"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor inside a slab, or the part of one that a rank owns.

    Attributes:
        start: its first element in the slab.
        shape: its shape; a part is flat.
        first: its first element in the whole tensor.
        whole: the shape of the whole tensor; None for a whole one.
    """

    start: int
    shape: tuple[int, ...]
    first: int = 0
    whole: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Section:
    """A slab of a unit and the tensors in it.

    Attributes:
        suffix: added to the names of parameters, for example ``.exp_avg``.
        slab: the slab, 1-D, at the start of a page; the rest of its last page belongs to it.
        parts: the tensors by the names of their parameters, in the order in which they lie in the slab.
        used: the elements of the slab that this rank owns; None for all.
    """

    suffix: str
    slab: torch.Tensor
    parts: Mapping[str, Part]
    used: slice | None = None

    @property
    def first_byte(self) -> int:
        """The byte of the slab at which the section begins: that of a page."""
        start = 0 if self.used is None else self.used.start
        return start * self.slab.element_size() // PAGE * PAGE

    @property
    def num_bytes(self) -> int:
        """The bytes in a file: whole pages."""
        if self.used is not None and self.used.start >= self.used.stop:
            return 0  # this rank owns nothing; the page of the first byte belongs to another rank
        stop = self.slab.numel() if self.used is None else self.used.stop
        return page_aligned(stop * self.slab.element_size()) - self.first_byte

    def memory(self) -> memoryview:
        """Return the pages of the slab as bytes."""
        address = self.slab.data_ptr() + self.first_byte
        return memoryview((ctypes.c_uint8 * self.num_bytes).from_address(address)).cast("B")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its dtype in safetensors' terms, its shape, and its bytes from ``start`` on."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class UnitFile:
    """The layout of a unit's file.

    Args:
        sections: the slabs of the unit.

    Attributes:
        header: the first pages of the file.
        entries: every tensor by its name in the file, without padding; offsets count from the start of the file.
    """

    def __init__(self, sections: list[Section]) -> None:
        self.sections = [section for section in sections if section.num_bytes]
        entries = dict(self._place(0))
        # These offsets count from the end of the header, as safetensors has them, and so do not depend on its length.
        self.header = _header(entries)
        self.entries = {
            name: Entry(e.dtype, e.shape, len(self.header) + e.start, e.num_bytes)
            for name, e in entries.items()
            if not name.startswith(_PADDING)
        }

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(section.num_bytes for section in self.sections)

    def parts(self) -> dict[str, Part]:
        """Return the part of each tensor by its name in the file."""
        return {name + section.suffix: part for section in self.sections for name, part in section.parts.items()}

    def chunks(self) -> Iterator[memoryview]:
        """Yield the contents of the file in order: whole pages at page-aligned addresses."""
        header = mmap.mmap(-1, len(self.header))
        header.write(self.header)
        yield memoryview(header)
        for section in self.sections:
            memory = section.memory()
            for start in range(0, len(memory), _CHUNK_BYTES):
                yield memory[start : start + _CHUNK_BYTES]

    def memory_of_tensors(self) -> dict[str, memoryview]:
        """Return the memory of each tensor by its name in the file."""
        found = {}
        for section in self.sections:
            memory, size = section.memory(), section.slab.element_size()
            for name, part in section.parts.items():
                start = part.start * size - section.first_byte
                found[name + section.suffix] = memory[start : start + part.numel * size]
        return found

    def hashes(self) -> dict[str, str]:
        """Return the xxh3-64 of each tensor in memory, by its name in the file."""
        return {name: xxhash.xxh3_64_hexdigest(memory) for name, memory in self.memory_of_tensors().items()}

    def _place(self, position: int) -> Iterator[tuple[str, Entry]]:
        """Yield the tensors of all sections with their bytes from a position of the file on, and padding for the gaps."""
        for number, section in enumerate(self.sections):
            size, end = section.slab.element_size(), position + section.num_bytes
            first = position
            for name, part in section.parts.items():
                start = first + part.start * size - section.first_byte
                if start > position:
                    yield f"{_PADDING}.{number}.{name}", Entry("U8", (start - position,), position, start - position)
                num_bytes = part.numel * size
                yield name + section.suffix, Entry(DTYPE_NAMES[section.slab.dtype], part.shape, start, num_bytes)
                position = start + num_bytes
            if end > position:
                yield f"{_PADDING}.{number}", Entry("U8", (end - position,), position, end - position)
            position = end


def _header(entries: Mapping[str, Entry]) -> bytes:
    """Return the header of a safetensors file: the length of its JSON, and the JSON, padded with spaces to whole pages."""
    content: dict[str, Any] = {
        name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.start + e.num_bytes]}
        for name, e in entries.items()
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    text = text.ljust(page_aligned(8 + len(text)) - 8)
    return struct.pack("<Q", len(text)) + text


def read_entries(path: Path) -> tuple[bytes, dict[str, Entry]]:
    """Return the header of a safetensors file, and its tensors in the order of their bytes, with padding.

    Raises:
        ConfigError: the file is damaged.
    """
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        fits = 0 < size <= min(_MAX_HEADER_BYTES, path.stat().st_size)
        header = file.read(size) if fits else b""
    try:
        content = json.loads(header)
        content.pop("__metadata__", None)
        found = {name: _entry(e, 8 + size) for name, e in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a file of a checkpoint, or its header is damaged") from error
    entries = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    position = 8 + size
    for name, entry in entries.items():
        if entry.start != position or entry.num_bytes < 0:
            raise ConfigError(f"{path}: {name} overlaps another tensor or leaves a gap; the file is damaged")
        position += entry.num_bytes
    if path.stat().st_size != position:
        raise ConfigError(f"{path} has {path.stat().st_size:,} bytes instead of {position:,}; the file is damaged")
    return length + header, entries


def _entry(content: Any, end_of_header: int) -> Entry:
    """Return a tensor of a header. Raise ValueError, KeyError or TypeError if it is not as the format says."""
    dtype, shape, (start, end) = content["dtype"], content["shape"], content["data_offsets"]
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"{content} does not describe a tensor")
    return Entry(dtype, tuple(shape), end_of_header + start, end - start)


def require_tensors(path: Path, file: UnitFile) -> tuple[bytes, dict[str, Entry]]:
    """Return what `read_entries` returns. Raise ConfigError if a tensor of the unit is missing or different in the file."""
    header, entries = read_entries(path)
    for name, own in file.entries.items():
        found = entries.get(name)
        if found is None or (found.dtype, found.shape, found.num_bytes) != (own.dtype, own.shape, own.num_bytes):
            there = "missing" if found is None else f"{found.dtype} of shape {found.shape}"
            raise ConfigError(f"{path}: {name} is {there} there, and {own.dtype} of shape {own.shape} in the model")
    return header, entries


def read_into(path: Path, file: UnitFile) -> str:
    """Read a file into the slabs of a unit, and return the xxh3-128 of the whole file.

    Tensors that the unit does not have, such as moments of a model without optimizer, are only hashed.

    Raises:
        ConfigError: the file is damaged, or lacks a tensor of the unit.
    """
    header, entries = require_tensors(path, file)
    targets = file.memory_of_tensors()
    digest = xxhash.xxh3_128(header)
    with path.open("rb", buffering=0) as stream:
        stream.seek(len(header))
        for name, entry in entries.items():
            if name in targets:
                _read(stream, targets[name], digest)
            else:
                _hash(stream, entry.num_bytes, digest)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _hash(stream: Any, num_bytes: int, digest: Any) -> None:
    """Add bytes of a file to a hash."""
    buffer = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
    for start in range(0, num_bytes, _CHUNK_BYTES):
        _read(stream, buffer[: num_bytes - start], digest)


def _read(stream: Any, target: memoryview, digest: Any) -> None:
    """Fill memory from a file, and add it to a hash."""
    for start in range(0, len(target), _CHUNK_BYTES):
        chunk = target[start : start + _CHUNK_BYTES]
        done = 0
        while done < len(chunk):
            count = stream.readinto(chunk[done:])
            if not count:
                raise ConfigError(f"{stream.name} became shorter while it was read")
            done += count
        digest.update(chunk)
