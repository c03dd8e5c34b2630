"""GGUF headers that lie: rejected before a library allocates, loops or reads beyond the file."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.common.gguf_header import read_gguf_header
from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.model.hf_config import load_config

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", U32, value)


def tensor(name: str, shape: Sequence[int], start: int, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def gguf(metadata: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: int = 0, **changes: Any) -> bytes:
    """Return a file; ``changes``: another magic, version, or number of tensors or entries."""
    counts = (
        changes.get("version", 3),
        changes.get("num_tensors", len(tensors)),
        changes.get("num_entries", len(metadata)),
    )
    header = changes.get("magic", b"GGUF") + struct.pack("<IQQ", *counts) + b"".join(metadata) + b"".join(tensors)
    return header + bytes(-len(header) % 32 + data)


A, B = tensor("a", [8, 4], 0), tensor("b", [8], 128)
BAD = {
    "no GGUF": (gguf(magic=b"GGML"), "no GGUF file"),
    "empty": (b"", "it is empty"),
    "another version": (gguf(version=99), "version 99"),
    "big-endian": (gguf(version=3 << 24), "version"),
    "number of tensors": (gguf(num_tensors=2**60), "more than 100,000 entries"),
    "number of entries": (gguf(num_entries=2**60), "more than 100,000 entries"),
    "missing entries": (gguf(num_entries=5), "cannot be read"),
    "long name": (gguf([struct.pack("<Q", 2**40)]), "a text has"),
    "long text": (gguf([text("a") + struct.pack("<IQ", STRING, 2**40)]), "a text has 1,099,511,627,776 bytes"),
    "text beyond the end": (gguf([text("a") + struct.pack("<IQ", STRING, 2**20)]), "ends within its header"),
    "long list": (gguf([text("a") + struct.pack("<IIQ", ARRAY, U32, 2**60)]), "a list of 1,152,921,504,606,846,976"),
    "list beyond the end": (gguf([text("a") + struct.pack("<IIQ", ARRAY, U32, 2**20)]), "ends within its header"),
    "long list of texts": (gguf([text("a") + struct.pack("<IIQ", ARRAY, STRING, 2**60)]), "a list of 1,152,921"),
    "texts beyond the end": (gguf([text("a") + struct.pack("<IIQ", ARRAY, STRING, 2**20)]), "ends within its header|cannot be read"),
    "no text": (gguf([text("a") + struct.pack("<IQ", STRING, 2) + b"\xff\xff"]), "cannot be read"),
    "nested lists": (gguf([text("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9]), "unknown type 9"),
    "unknown type": (gguf([text("a") + struct.pack("<I", 77)]), "unknown type 77"),
    "entry twice": (gguf([number("a", 1), number("a", 2)]), "a is there twice"),
    "tensor twice": (gguf((), [A, A], 256), "a is there twice"),
    "many axes": (gguf((), [tensor("a", [1] * 9, 0)], 256), "9 axes"),
    "overlap": (gguf((), [A, tensor("b", [8], 64)], 256), "tensors a and b overlap"),
    "beyond the end": (gguf((), [A, B], 128), "tensor b ends after the file"),
    "huge shape": (gguf((), [tensor("a", [2**40, 2**40], 0)], 128), "tensor a ends after the file"),
    "alignment": (gguf([number("general.alignment", 0)]), "alignment is 0"),
    "ten million layers": (gguf([number("llama.block_count", 10**7)]), "block_count is 10,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_headers(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / "model.gguf").write_bytes(content)
    for read in (
        lambda: load_config(tmp_path, False, "model.gguf"),
        lambda: load_gguf(tmp_path, "model.gguf", torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match=f"model.gguf.*{message}"):
            read()


def test_a_valid_header(tmp_path: Path) -> None:
    entries = [
        number("llama.block_count", 2),
        text("tags") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("a") + text("b"),
    ]
    (tmp_path / "model.gguf").write_bytes(gguf(entries, [A, B], 160))
    header = read_gguf_header(tmp_path / "model.gguf")
    assert header.metadata == {"llama.block_count": 2, "tags": ["a", "b"]}
    assert {name: (tensor.shape, tensor.num_bytes) for name, tensor in header.tensors.items()} == {
        "a": ((4, 8), 128),
        "b": ((8,), 32),
    }
    assert header.floats("b") == [0.0] * 8


def test_a_file_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.gguf").write_bytes(gguf())
    with pytest.raises(ConfigError, match="outside of"):
        load_config(tmp_path / "model", False, "../secret.gguf")
