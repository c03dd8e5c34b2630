"""GGUF files with other headers: the same tensors with metadata that are changed, added or left out."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf

_TYPES = {bool: 7, int: 4, float: 6, str: 8}  # of GGUF: bool, uint32, float32 and text


class I32(int):
    """A number that is written in 32 bits with a sign."""


class F64(float):
    """A number that is written in double precision."""


_TYPES |= {I32: 5, F64: 12}
_LAYOUTS = {7: "?", 4: "I", 6: "f", 5: "i", 12: "d"}


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _scalar(value: Any) -> bytes:
    """Return the bytes of a value without its type."""
    return _text(value) if isinstance(value, str) else struct.pack(f"<{_LAYOUTS[_TYPES[type(value)]]}", value)


def _value(value: Any) -> bytes:
    """Return the bytes of a value, or of a list of values of one type, with its type."""
    if not isinstance(value, list):
        return struct.pack("<I", _TYPES[type(value)]) + _scalar(value)
    kind = _TYPES[type(value[0])] if value else _TYPES[int]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(_scalar, value))


class Header:
    """The header of a file, from which files with other headers are written."""

    def __init__(self, file: Path) -> None:
        reader = gguf.GGUFReader(file)
        content = file.read_bytes()
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        self.values: dict[str, Any] = {name: field.contents() for name, field in fields.items()}
        self._parts = {
            name: content[field.offset : field.offset + sum(part.nbytes for part in field.parts)]
            for name, field in fields.items()
        }
        # Their places are relative to the first byte after the header, so they stay as they are.
        self.tensors, infos = [tensor.name for tensor in reader.tensors], [tensor.field for tensor in reader.tensors]
        self._tensors = [content[info.offset : info.offset + sum(part.nbytes for part in info.parts)] for info in infos]
        self._data, self.architecture = content[reader.data_offset :], self.values["general.architecture"]

    def shorten(self) -> None:
        """Leave out what takes long to read, and changes nothing in the model: merges but the first, and types of tokens."""
        merges = "tokenizer.ggml.merges"
        self._parts.pop("tokenizer.ggml.token_type", None)
        if merges in self._parts:
            self._parts[merges] = _text(merges) + _value(self.values[merges][:1])

    def write(self, file: Path, keys: Mapping[str, Any]) -> Path:
        """Write a file with other metadata, and return it; None leaves a key out."""
        parts = self._parts | {key: _text(key) + _value(value) for key, value in keys.items() if value is not None}
        kept = [part for key, part in parts.items() if keys.get(key, 0) is not None]
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(self._tensors), len(kept)) + b"".join(kept + self._tensors)
        file.write_bytes(header.ljust(-(-len(header) // 32) * 32, b"\0") + self._data)
        return file


def others(value: Any, num_layers: int) -> Iterator[Any]:
    """Yield None, for no value at all, then other values in place of one, and values of other types."""
    yield None
    if isinstance(value, bool):
        yield from (not value, int(value), "yes")
    elif isinstance(value, int):
        yield from sorted({0, 1, value + 1, 2 * value} - {value})
        yield from (I32(value), float(value), str(value))
        yield from ([value] * num_layers, [value] * (num_layers - 1) + [value + 1], [value] * (num_layers + 1))
    elif isinstance(value, float):
        yield from (0.0, 1.0, 0.3 * value, 3.0 * value, -value)
        yield from (F64(value), round(value), str(value), [value] * num_layers)
    elif isinstance(value, str):
        yield from ("none", "linear", "yarn", "longrope", "other", "", 1, [value])
    elif isinstance(value, list):
        yield from (value[::-1], value[:-1], value[0], [])


def added(num_layers: int) -> Iterator[Any]:
    """Yield values of a key that a file does not have, of each type that llama.cpp reads; the first three of different types."""
    yield from (0, True, "yarn")
    yield from (3, False, 0.0, 0.5, 16.0, "none", "linear", [1] + [0] * (num_layers - 1), [1.0] * num_layers)
