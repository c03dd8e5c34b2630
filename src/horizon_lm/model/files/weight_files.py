"""Read the headers of a folder of safetensors files. Nothing here needs torch."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.common.paths import require_inside, require_regular
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.folder import WEIGHTS

_INDEX = "model.safetensors.index.json"
_START_OF_POINTER = b"version "  # of Git LFS, in place of a file that was not fetched
_LONGEST = 32 * 2**20  # bytes of a header; published files have up to 2 MB
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")  # weights that torch.load reads, which may run code
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64,
    "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor as described in its file's header. ``dtype``: the name in safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class WeightFiles:
    """The names, files and headers of the tensors in a folder of safetensors files.

    Raises:
        ConfigError: there are no such files, or the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str]
        # A single file first, as in transformers: an index beside it is left of an earlier save.
        if (folder / WEIGHTS).is_file():
            self._file_of = dict.fromkeys(read_headers(folder / WEIGHTS), WEIGHTS)
        elif (folder / _INDEX).is_file():
            self._file_of = _read_index(folder / _INDEX)
        else:
            require_model_folder(folder)
            pickle = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
            found = f", but {pickle}, which may run code when it is read" if pickle else ""
            remedy = "convert the weights to safetensors first" if pickle else "download the weights"
            raise ConfigError(f"{folder} has neither {WEIGHTS} nor {_INDEX}{found}; {remedy}")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a folder has weights."""
        return (folder / _INDEX).is_file() or (folder / WEIGHTS).is_file()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    @property
    def files(self) -> dict[str, str]:
        """The name of the file of each tensor, also of the components of quantized weights."""
        return self._file_of

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self.folder / self._file_of[name]

    def headers(self) -> dict[str, Header]:
        """Return the headers of all tensors, without reading weights.

        Raises:
            ConfigError: a file is missing or truncated, or lacks a tensor of the index.
        """
        found = {}
        for file_name, names in self.by_file(self._file_of).items():
            present = read_headers(self.path_of(file_name))
            if lost := [name for name in names if name not in present]:
                raise ConfigError(
                    f"{self.folder / _INDEX} names {lost[0]} in {file_name}, which does not have it; download both again"
                )
            found.update({name: present[name] for name in names})
        return found

    @property
    def in_bfloat16(self) -> bool:
        """True if all tensors are in bfloat16."""
        return all(each.dtype == "BF16" for each in self.headers().values())

    def description(self) -> Any:
        """Return the names, files, dtypes and shapes of all tensors as plain data."""
        return [[name, self._file_of[name], each.dtype, [*each.shape]] for name, each in self.headers().items()]

    def by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names by the file that has them."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._file_of[name]].append(name)
        return by_file

    def path_of(self, file_name: str) -> Path:
        """Return the path of a file that the index names; raise ConfigError if it is missing, or outside of the folder."""
        path = self.folder / file_name
        try:
            require_inside(path, self.folder)
            require_regular(path)
            is_file = path.is_file()
        except ConfigError:  # which is a ValueError, too
            raise
        except (OSError, ValueError):  # no name that a file can have
            is_file = False
        if not is_file:
            raise ConfigError(f"{self.folder / _INDEX} names {file_name}, which is missing; download it again")
        return path


def read_headers(path: Path) -> dict[str, Header]:
    """Return the tensors in a file's header (https://github.com/huggingface/safetensors, "Format").

    The library is not used, because it maps the whole file, and a planning process may not have enough memory for that.

    Raises:
        ConfigError: the file has no header, or its size differs from that in the header.
    """
    remedy = "download it again"
    try:
        with path.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if start == _START_OF_POINTER:
                remedy = "run git lfs pull in its folder"
                raise ValueError("it is a pointer of Git LFS")
            length = int.from_bytes(start, "little")
            if not 2 <= length <= min(num_bytes, _LONGEST):
                raise ValueError("it has no safetensors header")
            entries = json.loads(stream.read(length), object_pairs_hook=_without_duplicates)
        entries.pop("__metadata__", None)
        headers = {name: Header(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        expected = 8 + length + _checked_end({name: each["data_offsets"] for name, each in entries.items()}, headers)
        if num_bytes != expected:
            raise ValueError(f"it has {num_bytes:,} bytes instead of {expected:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}); {remedy}") from error
    return headers


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor; raise ConfigError if an index is damaged, or names a file that is no safetensors file."""
    require_inside(path, path.parent)  # it may be a link: into the hub's cache, and nowhere else
    try:
        files = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("weight_map does not name a file for each tensor")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not an index of weights ({first_line(error)}); download it again") from error
    if foreign := next((file for file in files.values() if not file.endswith(".safetensors") or "\0" in file), None):
        raise ConfigError(f"{path} names {foreign!r}, but only safetensors files are read; convert the weights first")
    return files


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError if a name is there twice, of which readers take the first or the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _checked_end(offsets: Mapping[str, Any], headers: Mapping[str, Header]) -> int:
    """Return the end of the last tensor, in bytes behind the header; raise ValueError for overlaps, gaps and wrong sizes of tensors."""
    end, previous = 0, "the header"
    for name, (start, stop) in sorted(offsets.items(), key=lambda each: tuple(each[1])):
        header = headers[name]
        if header.dtype not in _BITS or any(type(size) is not int or size < 0 for size in header.shape):
            raise ValueError(f"{name} has the unknown dtype {header.dtype!r} or the shape {tuple(header.shape)}")
        num_bytes = -(-header.numel * _BITS[header.dtype] // 8)
        if start != end:
            raise ValueError(f"{name} {'overlaps' if start < end else 'does not follow'} {previous}")
        if stop - start != num_bytes:
            raise ValueError(
                f"{name} has {stop - start:,} bytes, but its shape {tuple(header.shape)} needs {num_bytes:,}"
            )
        end, previous = stop, name
    return end
