"""Read the parts of tensors that a rank owns from a checkpoint that any number of ranks has written."""

import re
from pathlib import Path

import torch

from horizon_lm.common.ranges import length, overlap
from horizon_lm.common.run_folders import UNITS
from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import DTYPES
from horizon_lm.runs.checkpoints.manifest import Manifest, TensorEntry
from horizon_lm.runs.checkpoints.unit_file import Part, UnitFile

_NAME = re.compile(rf"{UNITS}/(.*?)(?:\.rank\d+)?\.safetensors")


def slab_of(file: str) -> str:
    """Return the name of the slab in a file of a checkpoint. Raise ConfigError if it is no unit's file."""
    match = _NAME.fullmatch(file)
    if match is None:
        raise ConfigError(f"{file} is not the file of a unit; the checkpoint is damaged")
    return match[1]


class PartReader:
    """Reads parts of tensors, wherever they lie in the files of a checkpoint, which must have been verified.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._entries: dict[str, list[TensorEntry]] = {}  # by tensor; each rank that wrote a part of it has an entry
        for each in manifest.tensors:
            self._entries.setdefault(each.tensor, []).append(each)

    def require(self, file: UnitFile) -> None:
        """Raise ConfigError if the checkpoint lacks a part of a tensor, or has one of another shape or dtype."""
        for name, wanted in file.entries.items():
            part, dtype, entries = wanted.part, wanted.dtype, self._entries.get(name, [])
            shape = part.whole or part.shape
            if any((each.dtype, each.shape) != (dtype, shape) for each in entries):
                raise ConfigError(
                    f"{self._folder} has {name} of another shape or dtype than the model, {shape} in {dtype}"
                )
            self._require_complete(name, part)

    def read(self, file: UnitFile) -> None:
        """Read into memory the parts of tensors that a unit's file of this rank would have, wherever they are saved."""
        for name, wanted in file.entries.items():
            self._fill(name, wanted.part, wanted.memory)

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a tensor, joined from the parts that several ranks have written; raise ConfigError if one is missing."""
        first = self._entries[name][0]
        part = Part(0, first.shape)
        self._require_complete(name, part)
        tensor = torch.empty(first.shape, dtype=DTYPES[first.dtype])
        self._fill(name, part, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def _require_complete(self, name: str, part: Part) -> None:
        """Raise ConfigError if the checkpoint lacks elements of a part of a tensor."""
        if sum(length(shared) for _, shared in self._overlaps(name, part)) != part.numel:
            raise ConfigError(f"{self._folder} lacks a part of {name}; the checkpoint is damaged")

    def _fill(self, name: str, part: Part, memory: memoryview) -> None:
        """Read the bytes of a part of a tensor into memory, from all files that have some of them."""
        itemsize = len(memory) // max(1, part.numel)
        for entry, shared in self._overlaps(name, part):
            unread = memory[(shared.start - part.first) * itemsize : (shared.stop - part.first) * itemsize]
            with (self._folder / entry.file).open("rb", buffering=0) as stream:
                stream.seek(entry.offset + (shared.start - entry.start) * itemsize)
                while unread:
                    count = stream.readinto(unread)
                    if not count:
                        raise ConfigError(f"{stream.name} became shorter while it was read")
                    unread = unread[count:]

    def _overlaps(self, name: str, part: Part) -> list[tuple[TensorEntry, slice]]:
        """Return the entries that have elements of a part, with the range of these elements in the whole tensor."""
        wanted = slice(part.first, part.first + part.numel)
        entries = self._entries.get(name, [])
        overlaps = [(each, overlap(slice(each.start, each.start + each.length), wanted)) for each in entries]
        return [(entry, shared) for entry, shared in overlaps if length(shared)]
