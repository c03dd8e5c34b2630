"""Check the header of a GGUF file, so that a damaged one neither allocates nor loops without end.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.config_limits import require_sane_sizes

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 100_000  # of metadata, and of tensors
_MAX_NAME_BYTES = 65_535
# Elements and bytes of a block, by type. The sizes of other types are not known, so these are not checked.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1), 25: (1, 2), 26: (1, 4),
    27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip


class _Tensor(NamedTuple):
    """A tensor of a file. ``start``: its first byte, counted from `_Header.data_start`."""

    name: str
    start: int
    num_bytes: int


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Return the scalar metadata of a GGUF file.

    Raises:
        ConfigError: the header is damaged, a size in it is absurd, or tensors overlap or go beyond the end of the file.
    """
    try:
        with path.open("rb") as stream:
            header = _Header(stream)
            scalars = header.metadata()
            _require_layout(header.tensors(), header.data_start(scalars), header.num_bytes)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"gguf_file: {path} cannot be read ({first_line(error)}); download it again") from error
    require_sane_sizes({name.rpartition(".")[2]: value for name, value in scalars.items()}, path)
    return scalars


class _Header:
    """The header of an opened GGUF file, of version 2 or 3 in little-endian order: metadata, then tensors, to be read in this order.
    Raise ValueError if it is damaged.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.num_bytes = stream, os.fstat(stream.fileno()).st_size
        if stream.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version} of GGUF is not supported")
        self._num_tensors, self._num_entries = self._number("Q"), self._number("Q")
        if max(self._num_tensors, self._num_entries) > _MAX_ENTRIES:
            raise ValueError(f"its header has more than {_MAX_ENTRIES:,} entries")

    def metadata(self) -> dict[str, Any]:
        """Read all metadata, and return the numbers in it."""
        found: dict[str, Any] = {}
        for _ in range(self._num_entries):
            name = self._string(_MAX_NAME_BYTES).decode("utf-8")
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = self._value(self._number("I"))
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def tensors(self) -> list[_Tensor]:
        """Read the names, places and bytes of all tensors."""
        tensors: dict[str, _Tensor] = {}
        for _ in range(self._num_tensors):
            name = self._string(_MAX_NAME_BYTES).decode("utf-8")
            num_axes = self._number("I")
            if num_axes > 8 or name in tensors:
                raise ValueError(f"tensor {name} " + ("is there twice" if name in tensors else f"has {num_axes} axes"))
            shape = [self._number("Q") for _ in range(num_axes)]
            kind, start = self._number("I"), self._number("Q")
            block, block_bytes = _BLOCKS.get(kind, (1, 0))
            num_blocks = -(-math.prod(shape) // block)
            tensors[name] = _Tensor(name, start, num_blocks * block_bytes)
        return list(tensors.values())

    def data_start(self, scalars: dict[str, Any]) -> int:
        """Return the position in the file at which the data begin: the next multiple of the alignment after the header."""
        alignment = scalars.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise ValueError(f"its alignment is {alignment}")
        return -(-self._stream.tell() // alignment) * alignment

    def _value(self, kind: int, depth: int = 0) -> Any:
        """Read a value, which may be an array inside of ``depth`` others; return it if it is a number, otherwise None."""
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY and depth <= 4:
            self._skip_array(depth)
        else:
            raise ValueError(f"it has a value of unknown type {kind}")
        return None

    def _skip_array(self, depth: int) -> None:
        """Skip an array, which may hold strings or arrays."""
        element, length = self._number("I"), self._number("Q")
        if element in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[element]))
            return
        self._require(length)  # each element takes at least a byte, so the loop ends
        for _ in range(length):
            self._value(element, depth + 1)

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._stream.read(struct.calcsize(kind)))[0]

    def _string(self, longest: int) -> bytes:
        """Read a string of at most ``longest`` bytes."""
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"a name has {length:,} bytes")
        self._require(length)
        return self._stream.read(length)

    def _skip(self, length: int) -> None:
        self._require(length)
        self._stream.seek(length, os.SEEK_CUR)

    def _require(self, length: int) -> None:
        """Raise ValueError if fewer bytes than these follow."""
        if length > self.num_bytes - self._stream.tell():
            raise ValueError(f"it ends within its header: {length:,} more bytes are expected")


def _require_layout(tensors: list[_Tensor], data_start: int, num_bytes: int) -> None:
    """Raise ValueError if tensors overlap or go beyond the end of the file."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda each: each.start):
        if tensor.start < end:
            raise ValueError(f"tensors {before} and {tensor.name} overlap")
        end, before = tensor.start + tensor.num_bytes, tensor.name
        if data_start + end > num_bytes:
            raise ValueError(f"tensor {tensor.name} ends after the file, at byte {data_start + end:,} of {num_bytes:,}")
