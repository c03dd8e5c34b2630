"""Read the headers and tensors of a folder of safetensors files."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from horizon_lm.errors import ConfigError, first_line

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LONGEST = 100_000_000  # maximum bytes of a header, as in the safetensors library


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor as described in its file's header. ``dtype``: the name in safetensors, such as BF16."""

    dtype: str
    shape: torch.Size


class Checkpoint:
    """The tensors in a folder of safetensors files, by name.

    Raises:
        ConfigError: there are no such files, or the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str]
        if (folder / _INDEX).is_file():
            try:
                self._file_of = json.loads((folder / _INDEX).read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{folder / _INDEX} is not an index of weights; download it again") from error
        elif (folder / _SINGLE).is_file():
            self._file_of = dict.fromkeys(read_headers(folder / _SINGLE), _SINGLE)
        else:
            raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors first")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a folder has weights."""
        return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self.folder / self._file_of[name]

    def headers(self) -> dict[str, Header]:
        """Return the headers of all tensors, without reading weights.

        Raises:
            ConfigError: a file is missing or truncated, or lacks a tensor of the index.
        """
        found = {}
        for file_name, names in self._by_file(self._file_of).items():
            present = read_headers(self._path(file_name))
            if lost := [name for name in names if name not in present]:
                raise ConfigError(
                    f"{self.folder / _INDEX} names {lost[0]} in {file_name}, which does not have it; download both again"
                )
            found.update({name: present[name] for name in names})
        return found

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return these tensors. Close the files, so that their mapped pages do not count toward this
        process's memory.
        """
        tensors = {}
        for file_name, wanted in self._by_file(names).items():
            with _opened(self._path(file_name)) as file:
                tensors.update({name: file.get_tensor(name) for name in wanted})
        return tensors

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._file_of[name]].append(name)
        return by_file

    def _path(self, file_name: str) -> Path:
        path = self.folder / file_name
        if not path.is_file():
            raise ConfigError(f"{self.folder / _INDEX} names {file_name}, which is missing; download it again")
        return path


def read_headers(path: Path) -> dict[str, Header]:
    """Return the tensors in a file's header (https://github.com/huggingface/safetensors, "Format").

    The library is not used, because it maps the whole file, and a planning process may not have enough memory for that.

    Raises:
        ConfigError: the file has no header, or its size differs from that in the header.
    """
    try:
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(num_bytes, _LONGEST):
                raise ValueError("it has no safetensors header")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        headers = {name: Header(entry["dtype"], torch.Size(entry["shape"])) for name, entry in entries.items()}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if num_bytes != expected:
            raise ValueError(f"it has {num_bytes:,} bytes instead of {expected:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); download it again") from error
    return headers


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error
