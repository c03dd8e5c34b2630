"""A folder of safetensors files: what its headers say, and its tensors by name."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from horizon_lm.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor as its file describes it. ``dtype``: in safetensors' own words, such as BF16."""

    dtype: str
    shape: torch.Size


class Checkpoint:
    """Tensors of a folder of safetensors files, by name.

    Raises:
        ConfigError: no such files, or an index that cannot be read.
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
            with _opened(folder / _SINGLE) as file:
                self._file_of = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ConfigError(f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors first")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a folder has weights at all."""
        return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor."""
        return self.folder / self._file_of[name]

    def headers(self) -> dict[str, Header]:
        """Return all tensors as the headers of their files describe them; no weight is read.

        Raises:
            ConfigError: a file is missing or cut off, or lacks a tensor that the index names.
        """
        found = {}
        for file_name, names in self._by_file(self._file_of).items():
            with self._file(file_name) as file:
                there = set(file.keys())
                if lost := [name for name in names if name not in there]:
                    raise ConfigError(
                        f"{self.folder / _INDEX} names {lost[0]} in {file_name}, which does not have it; download both again"
                    )
                for name in names:
                    part = file.get_slice(name)
                    found[name] = Header(part.get_dtype(), torch.Size(part.get_shape()))
        return found

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return these tensors. Files are closed again, so that their pages do not count as ours."""
        tensors = {}
        for file_name, wanted in self._by_file(names).items():
            with self._file(file_name) as file:
                tensors.update({name: file.get_tensor(name) for name in wanted})
        return tensors

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._file_of[name]].append(name)
        return by_file

    @contextmanager
    def _file(self, file_name: str) -> Iterator[Any]:
        path = self.folder / file_name
        if not path.is_file():
            raise ConfigError(f"{self.folder / _INDEX} names {file_name}, which is missing; download it again")
        with _opened(path) as file:
            yield file


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error
