"""Read the parts of tensors that a rank owns from a checkpoint that any number of ranks has written."""

import re
from pathlib import Path

from horizon_lm.common.ranges import length, overlap
from horizon_lm.common.run_folders import UNITS
from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints.manifest import Manifest, TensorEntry
from horizon_lm.runs.checkpoints.unit_file import Part, UnitFile

_NAME = re.compile(rf"{UNITS}/(.*?)(?:\.rank\d+)?\.safetensors")


def slab_of(file: str) -> str:
    """Return the name of the slab that a file of a checkpoint has."""
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
        self._found: dict[str, list[TensorEntry]] = {}  # by tensor; each rank that wrote a part of it has an entry
        for each in manifest.tensors:
            self._found.setdefault(each.tensor, []).append(each)

    def require(self, file: UnitFile) -> None:
        """Raise ConfigError if the checkpoint lacks a part of a tensor, or has one of another shape or dtype."""
        for name, own in file.entries.items():
            part, dtype, entries = own.part, own.dtype, self._found.get(name, [])
            shape = part.whole or part.shape
            if any((each.dtype, each.shape) != (dtype, shape) for each in entries):
                raise ConfigError(
                    f"{self._folder} has {name} of another shape or dtype than the model, {shape} in {dtype}"
                )
            if sum(length(kept) for _, kept in self._overlaps(name, part)) != part.numel:
                raise ConfigError(f"{self._folder} lacks a part of {name}; the checkpoint is damaged")

    def read(self, file: UnitFile) -> None:
        """Read the parts that a unit's file would have into memory."""
        for name, own in file.entries.items():
            part, itemsize = own.part, len(own.memory) // max(1, own.part.numel)
            for entry, kept in self._overlaps(name, part):
                unread = own.memory[(kept.start - part.first) * itemsize : (kept.stop - part.first) * itemsize]
                with (self._folder / entry.file).open("rb", buffering=0) as stream:
                    stream.seek(entry.offset + (kept.start - entry.start) * itemsize)
                    while unread:
                        count = stream.readinto(unread)
                        if not count:
                            raise ConfigError(f"{stream.name} became shorter while it was read")
                        unread = unread[count:]

    def _overlaps(self, name: str, part: Part) -> list[tuple[TensorEntry, slice]]:
        """Return the entries that have elements of a part, with the range of these elements in the whole tensor."""
        own = slice(part.first, part.first + part.numel)
        kept = [(each, overlap(slice(each.start, each.start + each.length), own)) for each in self._found.get(name, [])]
        return [(entry, both) for entry, both in kept if length(both)]
