"""Make sure that all ranks of a training have read the same model, byte for byte."""

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horizon_lm.common.quantities import format_bytes
from horizon_lm.distributed.alike import hash_tensor
from horizon_lm.distributed.mesh import Mesh, fail_together
from horizon_lm.distributed.same_files import SeenFiles
from horizon_lm.errors import ConfigError, warn
from horizon_lm.model.files.checkpoint_reader import StoredTensors

_OF_MACHINE = ("_name_or_path", "transformers_version")  # settings of a config that may differ


class _Range(NamedTuple):
    """Rows of a tensor, or all of it, in plain numbers, which ranks can exchange."""

    tensor: int  # the index of the tensor among the sorted names
    start: int
    stop: int  # -1 for all rows


class SameWeights:
    """A comparison of all bytes that the ranks read while they load a model with the bytes of another copy of it.

    Ranks of one machine that read the same files read the same bytes. Otherwise each rank hashes the ranges that it reads, and the hashes
    of a range are compared. A range that was read from only one copy of the files is read once more from another copy: that of the first
    rank's machine, or if it was read from this one, some other copy. The files of a shared file system are one copy, and are read once.

    Args:
        mesh: the ranks.
        checkpoint: the weights, of which nothing is read yet.
        config: the config of the model.

    Raises:
        ConfigError: the ranks have other configs, code or headers. It is raised on all ranks.
    """

    def __init__(self, mesh: Mesh, checkpoint: StoredTensors, config: Any) -> None:
        self._mesh, self._checkpoint = mesh, checkpoint.stored
        self._hashes: dict[_Range, str] = {}  # of the ranges that this rank has read
        if mesh.size == 1:  # nothing to compare
            return
        _require_same_files(mesh, checkpoint, config)
        self._tensors = sorted(self._checkpoint.files)
        self._index_of = {name: index for index, name in enumerate(self._tensors)}
        self._seen = SeenFiles(mesh, self._checkpoint.folder, sorted(set(self._checkpoint.files.values())))
        # Ranks of one machine that read the same files have nothing to compare.
        if not self._seen.are_one:
            self._checkpoint.when_read = self._keep_hash

    def _keep_hash(self, name: str, rows: slice | None, tensor: torch.Tensor) -> None:
        """Keep the hash of rows of a tensor that were read; None for all rows."""
        start, stop = (0, -1) if rows is None else (rows.start, rows.stop)
        self._hashes[_Range(self._index_of[name], start, stop)] = hash_tensor(tensor)

    def require(self) -> None:
        """Raise ConfigError on all ranks if one has read other bytes, for which some read once more. All ranks call this after loading."""
        # The second reading below is hashed apart from the weights that the ranks train with.
        self._checkpoint.when_read = None
        if self._mesh.size == 1 or self._seen.are_one:
            return
        loaded = self._exchange_hashes()
        # The copy of the first rank's machine is compared with what all others have loaded, and another copy with what that
        # machine has loaded.
        first, second = self._seen.readers, self._seen.other_readers  # ranks that read the first copy, and the second
        others = [rank for rank in range(self._mesh.size) if rank not in first]
        reader_of = self._assign(loaded, others, first) | self._assign(loaded, first, second)
        self._require_equal([loaded, self._read_again(reader_of)] if reader_of else [loaded])

    def _require_equal(self, readings: list[list[dict[_Range, str]]]) -> None:
        """Raise ConfigError if two ranks have different hashes of a range. A reading has the hashes of each rank."""
        known: dict[_Range, tuple[int, str]] = {}
        for rank, hashes in chain.from_iterable(map(enumerate, readings)):
            for place, found in hashes.items():
                other, expected = known.setdefault(place, (rank, found))
                if found != expected:
                    raise ConfigError(
                        f"{self._checkpoint.folder}: the weights of rank {max(rank, other)} differ from those of rank "
                        f"{min(rank, other)} in {self._tensors[place.tensor]}; give all machines the same files"
                    )

    def _assign(self, loaded: list[dict[_Range, str]], users: list[int], readers: list[int]) -> dict[_Range, int]:
        """Return a reader for each range that ``users`` have loaded and no reader has, unless both have the same copy of its file."""
        if not readers:
            return {}
        known = {place for rank in readers for place in loaded[rank]}
        unread = {
            place
            for rank in users
            for place in loaded[rank].keys() - known
            if not self._seen.are_same(rank, readers[0], self._checkpoint.files[self._tensors[place.tensor]])
        }
        return {place: readers[number % len(readers)] for number, place in enumerate(sorted(unread))}

    def _read_again(self, reader_of: dict[_Range, int]) -> list[dict[_Range, str]]:
        """Read each range on its reader once more, only to hash it. Return the hashes that each rank has found. All ranks call this."""
        if self._mesh.rank == 0:
            files = {self._checkpoint.folder / name for name in self._checkpoint.files.values()}
            warn(
                f"{self._checkpoint.folder} is not one folder on all machines, so the first one reads all of it to compare the copies "
                f"({format_bytes(sum(path.stat().st_size for path in files))}); a shared file system saves that",
                RuntimeWarning,
            )
        self._hashes = {}
        with fail_together(self._mesh, "the comparison of weights"):
            for place in [place for place, rank in reader_of.items() if rank == self._mesh.rank]:
                name, rows = self._tensors[place.tensor], None if place.stop < 0 else slice(place.start, place.stop)
                self._keep_hash(name, rows, self._checkpoint.read([name], rows)[name])
        return self._exchange_hashes()

    def _exchange_hashes(self) -> list[dict[_Range, str]]:
        """Return the hashes of each rank. All ranks call this."""
        everyone = self._mesh.exchange("the hashes of what was read", [*self._hashes.items()])
        return [{_Range(*place): found for place, found in hashes} for hashes in everyone]


def _require_same_files(mesh: Mesh, checkpoint: StoredTensors, config: Any) -> None:
    """Raise ConfigError on all ranks if their configs, code or headers of weights differ."""
    settings, stored = json.loads(config.to_json_string(use_diff=False)), checkpoint.stored
    require_alike(
        mesh,
        stored.folder,
        {
            "weights": [stored.description(), [[name, repr(each)] for name, each in checkpoint.quantized.items()]],
            "config.json": {name: value for name, value in settings.items() if name not in _OF_MACHINE},
            "code": {path.name: path.read_text("utf-8", "replace") for path in stored.folder.glob("*.py")},
        },
    )


def require_alike(mesh: Mesh, folder: Path, own: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks if the data that they have read in a folder differ.

    Args:
        mesh: the ranks.
        folder: the folder, for the message.
        own: plain data by its name in the message, the same names on all ranks.
    """
    texts = {name: json.dumps(each, sort_keys=True, default=_plain) for name, each in own.items()}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    everyone = mesh.exchange("the opening of a model", hashes)
    for rank, found in enumerate(everyone):
        for name in own:
            if found[name] != everyone[0][name]:
                verb, object = ("differ", "those") if name == "weights" else ("differs", "that")
                raise ConfigError(
                    f"{folder}: the {name} of rank {rank} {verb} from {object} of rank 0; give all machines the same files"
                )


def _plain(value: Any) -> Any:
    """Return a value that JSON cannot write as one that it can, the same on all ranks."""
    return sorted(map(str, value)) if isinstance(value, set) else str(value)
