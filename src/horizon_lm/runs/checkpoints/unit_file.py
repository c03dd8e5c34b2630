"""The file of one unit: its slabs as they lie in host memory, as a safetensors file.

The file is a header of whole pages, then each slab in whole pages: weights, low halves, both moments, and the scales of
8-bit moments. So a slab is written from where it lies and read back to where it belongs, with no copy and without the page
cache. Tensors have the names of their parameters, with a suffix for everything but the weight. Bytes between tensors belong
to tensors named ``.padding``, because the format allows no gaps (https://github.com/huggingface/safetensors, "Format").
"""

import ctypes
import hashlib
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from horizon_lm.common.constants import PAGE
from horizon_lm.common.quantities import page_aligned
from horizon_lm.common.ranges import length, overlap, pieces
from horizon_lm.memory.layout.moments import MomentLayout, num_scales
from horizon_lm.memory.layout.slabs import SlabLayout
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES
from horizon_lm.optim.moments import Moments, scale_name

WEIGHT, LOW = "", ".low"
_CHUNK_BYTES = 8 << 20  # of one write: large enough for any disk, small enough to limit its rate


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
        """The byte of the slab at which the section begins: the first one of a page."""
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
    """A tensor in a file.

    Attributes:
        part: its place in the slab, and in the whole tensor.
        dtype: in safetensors' terms.
        start: its first byte in the file.
        memory: its bytes in the slab.
    """

    part: Part
    dtype: str
    start: int
    memory: memoryview


class UnitFile:
    """The layout of a unit's file.

    Args:
        sections: the slabs of the unit.

    Attributes:
        header: the first pages of the file.
        entries: every tensor by its name in the file, without padding.
    """

    def __init__(self, sections: list[Section]) -> None:
        self.sections = [section for section in sections if section.num_bytes]
        placed, position = dict[str, Entry](), 0  # positions count from the end of the header
        for section in self.sections:
            memory, itemsize, dtype = section.memory(), section.slab.element_size(), DTYPE_NAMES[section.slab.dtype]
            for name, part in section.parts.items():
                start = part.start * itemsize - section.first_byte  # in the section
                tensor_memory = memory[start : start + part.numel * itemsize]
                placed[name + section.suffix] = Entry(part, dtype, position + start, tensor_memory)
            position += section.num_bytes
        self.header = _header(placed, position)
        self.entries = {name: replace(each, start=len(self.header) + each.start) for name, each in placed.items()}

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(section.num_bytes for section in self.sections)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the contents of the file in order: whole pages at page-aligned addresses."""
        header = mmap.mmap(-1, len(self.header))  # anonymous memory, at a page-aligned address
        header.write(self.header)
        yield memoryview(header)
        for section in self.sections:
            memory = section.memory()
            for chunk in pieces(len(memory), _CHUNK_BYTES):
                yield memory[chunk]


def _header(placed: Mapping[str, Entry], end: int) -> bytes:
    """Return the header of a safetensors file: the length of its JSON, and the JSON, padded with spaces to whole pages.

    Args:
        placed: the tensors in their order. Their places count from the end of the header, and so do not depend on its length.
        end: the end of the last slab, in the same count. Gaps become tensors, too.
    """
    content, position = dict[str, Any](), 0

    def add(name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}

    for name, entry in placed.items():
        if entry.start > position:
            add(f".padding.{name}", "U8", (entry.start - position,), position, entry.start)
        position = entry.start + len(entry.memory)
        add(name, entry.dtype, entry.part.shape, entry.start, position)
    if end > position:
        add(".padding", "U8", (end - position,), position, end)
    text = json.dumps(content, separators=(",", ":")).encode()
    text = text.ljust(page_aligned(8 + len(text)) - 8)
    return struct.pack("<Q", len(text)) + text


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def unit_file(slab: Slab, moments: Moments | None) -> UnitFile:
    """Return the layout of a slab's file: its weights, then its low halves, its moments and their scales, if there are any."""

    def section(suffix: str, values: torch.Tensor, parts: Mapping[str, Part], own: slice) -> Section:
        """Return the section for values of the slab's tensors. With several ranks, it is cut to ``own``, the range of this rank."""
        return Section(suffix, values, parts) if slab.shard.is_whole else Section(suffix, values, _cut(parts, own), own)

    sections = [section(WEIGHT, slab.weights, _parts(slab.layout), slab.own)]
    if slab.low is not None:
        sections.append(section(LOW, slab.low, _parts(slab.layout), slab.own))
    if moments is not None:
        of_slab = moments.slabs[slab]
        sections += [
            section(f".{name}", each.values, _parts(each.place.layout), each.place.own)
            for name, each in of_slab.items()
        ]
        sections += [
            section(f".{scale_name(name)}", each.scales, _scale_parts(each.place, slab), each.place.own_scales)
            for name, each in of_slab.items()
        ]
    return UnitFile(sections)


def _parts(layout: SlabLayout) -> dict[str, Part]:
    """Return the tensors of a slab by their names."""
    return {name: Part(entry.offset, tuple(entry.shape)) for name, entry in layout.entries.items()}


def _scale_parts(moment: MomentLayout, slab: Slab) -> dict[str, Part]:
    """Return the scales of an 8-bit moment by the names of their tensors."""
    numels = {name: moment.layout.entries[name].numel for name in moment.scale_starts}
    return {name: Part(moment.scale_starts[name], (num_scales(numel, slab.row),)) for name, numel in numels.items()}


def _cut(parts: Mapping[str, Part], own: slice) -> dict[str, Part]:
    """Return the tensors, or the flat parts of tensors, that lie in the range ``own`` of their slab."""
    cut = {}
    for name, part in parts.items():
        shared = overlap(slice(part.start, part.start + part.numel), own)
        if numel := length(shared):
            is_whole = numel == part.numel
            cut[name] = (
                part if is_whole else Part(shared.start, (numel,), first=shared.start - part.start, whole=part.shape)
            )
    return cut
