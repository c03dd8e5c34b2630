"""Read the header of a GGUF file, and check it, so that a damaged one neither allocates nor loops without end.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from horizon_lm.errors import ConfigError, first_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 0
_MAX_ENTRIES = 100_000  # of metadata, and of tensors
_MAX_ELEMENTS = 2**22  # of a list
_MAX_TEXT_BYTES = 2**26
_MAX_NAME_BYTES = 65_535
# Elements and bytes of a block, by type. The sizes of other types are not known, so these are not checked.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98),
    19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        shape: its shape in torch, whose axes a file has in the opposite order.
        kind: number of its type, as in `_BLOCKS`.
        start: its first byte in the file.
        num_bytes: its size; 0 if the size of a block of its type is not known.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file: its metadata, and its tensors by their names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of a tensor."""
        with self.path.open("rb") as stream:
            stream.seek(self.tensors[name].start)
            return stream.read(self.tensors[name].num_bytes)

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a short tensor; raise ConfigError if it is not in float32."""
        if self.tensors[name].kind != _FLOAT32:
            raise ConfigError(f"gguf_file: {self.path}: tensor {name} is not in float32; make the file again")
        content = self.bytes_of(name)
        return list(struct.unpack(f"<{len(content) // 4}f", content))


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file.

    Raises:
        ConfigError: the header is damaged, or tensors overlap or go beyond the end of the file.
    """
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reader = _Reader(content)
            metadata = reader.metadata()
            tensors = reader.tensors(metadata)
    except (OSError, ValueError) as error:
        raise ConfigError(f"gguf_file: {path} cannot be read ({first_line(error)}); download it again") from error
    return GgufHeader(path, metadata, tensors)


class _Reader:
    """Reads the header of a GGUF file, of version 2 or 3 in little-endian order, from its start on.

    `metadata` must be called before `tensors`, because each method goes on reading where the last one has ended. All of them raise
    ValueError if the header is damaged.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._num_bytes, self._position = content, len(content), 4  # after the four bytes GGUF
        if content[:4] != b"GGUF":
            raise ValueError("it is no GGUF file")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} of GGUF is not supported")
        self._num_tensors, self._num_entries = self._number("Q"), self._number("Q")
        if max(self._num_tensors, self._num_entries) > _MAX_ENTRIES:
            raise ValueError(f"its header has more than {_MAX_ENTRIES:,} entries")

    def metadata(self) -> dict[str, Any]:
        """Read all metadata."""
        found: dict[str, Any] = {}
        for _ in range(self._num_entries):
            name = self._text(_MAX_NAME_BYTES)
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = self._value(self._number("I"))
        return found

    def tensors(self, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Read the names and places of all tensors; raise ValueError if they overlap or go beyond the end of the file."""
        relative: dict[str, GgufTensor] = {}  # with starts counted from the start of the data
        for _ in range(self._num_tensors):
            name = self._text(_MAX_NAME_BYTES)
            num_axes = self._number("I")
            if num_axes > 8 or name in relative:
                raise ValueError(f"tensor {name} " + ("is there twice" if name in relative else f"has {num_axes} axes"))
            shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
            kind, start = self._number("I"), self._number("Q")
            block_size, block_bytes = _BLOCKS.get(kind, (1, 0))
            num_blocks = -(-math.prod(shape) // block_size)
            relative[name] = GgufTensor(shape, kind, start, num_blocks * block_bytes)
        data_start = self._data_start(metadata.get("general.alignment", 32))
        placed = {
            name: GgufTensor(each.shape, each.kind, data_start + each.start, each.num_bytes)
            for name, each in relative.items()
        }
        _require_layout(placed, self._num_bytes)
        return placed

    def _data_start(self, alignment: Any) -> int:
        """Return the position in the file at which the data begin: the next multiple of the alignment after the header."""
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise ValueError(f"its alignment is {alignment}")
        return -(-self._position // alignment) * alignment

    def _value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of the type with the number ``kind``; a list may be inside of ``depth`` others."""
        if kind in _SCALARS:
            number = self._number(_SCALARS[kind])
            return _shortest_decimal(number) if _SCALARS[kind] == "f" else number  # as it was before it was float32
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES)
        if kind == _ARRAY and depth <= 4:
            return self._list(depth)
        raise ValueError(f"it has a value of unknown type {kind}")

    def _list(self, depth: int) -> list[Any]:
        """Read a list of numbers, texts or lists. ``depth``: the number of lists around it."""
        kind, length = self._number("I"), self._number("Q")
        if length > _MAX_ELEMENTS:
            raise ValueError(f"it has a list of {length:,} elements")
        if kind in _SCALARS:
            layout = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))
        if kind == _STRING:
            return [self._text(_MAX_TEXT_BYTES) for _ in range(length)]
        return [self._value(kind, depth + 1) for _ in range(length)]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(code)))[0]

    def _text(self, longest: int) -> str:
        """Read a text of at most ``longest`` bytes."""
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"a text has {length:,} bytes")
        return self._bytes(length).decode("utf-8")

    def _bytes(self, length: int) -> bytes:
        """Read the next bytes."""
        start, self._position = self._position, self._position + length
        if self._position > self._num_bytes:
            raise ValueError(f"it ends within its header, at byte {self._num_bytes:,}")
        return self._content[start : self._position]


def _shortest_decimal(value: float) -> float:
    """Return the number with the fewest digits that is the same in float32: 1e-05 for 9.999999747378752e-06."""
    texts = (f"{value:.{digits}g}" for digits in range(1, 9))
    return next((float(text) for text in texts if _in_float32(float(text)) == value), value)


def _in_float32(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def _require_layout(tensors: Mapping[str, GgufTensor], num_bytes: int) -> None:
    """Raise ValueError if tensors overlap or go beyond the end of the file."""
    end, previous = 0, ""  # of the tensor before, in the order of the file
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise ValueError(f"tensors {previous} and {name} overlap")
        end, previous = tensor.start + tensor.num_bytes, name
        if end > num_bytes:
            raise ValueError(f"tensor {name} ends after the file, at byte {end:,} of {num_bytes:,}")
