"""Read the tensors of a folder of safetensors files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from horizon_lm.errors import ConfigError
from horizon_lm.model.files.weight_files import WeightFiles

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Checkpoint(WeightFiles):
    """The tensors in a folder of safetensors files, by name.

    Attributes:
        when_read: called with the name, the rows and the value of each tensor that is read.

    Raises:
        ConfigError: there are no such files, or the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.when_read: Callable[[str, slice | None, torch.Tensor], None] | None = None

    def read(self, names: list[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
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
