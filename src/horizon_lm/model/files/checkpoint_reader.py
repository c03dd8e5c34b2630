"""Read the tensors of a folder of safetensors files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.model.files.tensors import Tensors
from horizon_lm.model.files.weight_files import Header, WeightFiles

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight of a folder.

    Attributes:
        shape: its shape when decoded.
        codec: its format.
        sources: the tensors of its components in the folder, by the names of the codec.
        dtype: the dtype of the weight that was quantized.
        offset: the mean of its scales, which double quantization keeps in its state; None without double quantization.
        shape_source: a tensor of the folder that has its shape, too; None if there is none.
    """

    shape: torch.Size
    codec: Codec
    sources: Mapping[str, str]
    dtype: torch.dtype = torch.bfloat16
    offset: float | None = None
    shape_source: str | None = None


class StoredTensors(Tensors, Protocol):
    """The tensors of a folder. A quantized weight is one of them, and its components are not."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors, in order."""
        ...

    @property
    def stored(self) -> "Checkpoint":
        """The tensors of the folder's files as they are, also the components of quantized weights."""
        ...

    @property
    def quantized(self) -> Mapping[str, QuantizedWeight]:
        """The quantized weights by name."""
        ...

    def read(self, names: Sequence[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return these tensors, or some of their rows, by name, in this order. They are in memory together."""
        ...


def file_of(checkpoint: StoredTensors, name: str) -> Path:
    """Return the file that contains a tensor, or the first component of a quantized weight."""
    weight = checkpoint.quantized.get(name)
    return checkpoint.stored.file_of(name if weight is None else next(iter(weight.sources.values())))


class Checkpoint(WeightFiles):
    """The tensors in a folder of safetensors files, by name. Implements `StoredTensors`.

    Attributes:
        when_read: called with the name, the rows and the value of each tensor that is read.

    Raises:
        ConfigError: there are no such files, or the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stored, self.quantized = self, dict[str, QuantizedWeight]()
        self.when_read: Callable[[str, slice | None, torch.Tensor], None] | None = None

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor; raise ConfigError if torch lacks the dtype."""
        header = self._headers[name]
        if header.dtype not in DTYPES:
            raise ConfigError(
                f"{name} is {header.dtype} in {self.file_of(name)}, which cannot be read; use a bf16 copy of the model"
            )
        return torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta")

    @cached_property
    def _headers(self) -> dict[str, Header]:
        return self.headers()

    def read(self, names: Sequence[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return these tensors, or some of their rows, by name and in this order.

        Files are closed, or their mapped pages would count as this process's memory.
        """
        tensors = {}
        for file_name, wanted in self.by_file(names).items():
            with _opened(self.path_of(file_name)) as file:
                for name in wanted:
                    tensors[name] = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
                    if self.when_read is not None:
                        self.when_read(name, rows, tensors[name])
        return {name: tensors[name] for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context manager: open a safetensors file; raise ConfigError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error
