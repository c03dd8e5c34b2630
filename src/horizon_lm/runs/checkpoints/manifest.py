"""The manifest of a checkpoint: every file with its size and hash, and where each tensor lies.

It is written last, so a folder without one is not a checkpoint. Its own checksum covers everything in it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, TypeAdapter

from horizon_lm.common.resources import usable_cores
from horizon_lm.common.run_folders import MANIFEST
from horizon_lm.distributed.mesh import Mesh, fail_together
from horizon_lm.distributed.same_files import SeenFiles
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.checkpoints.finding import require_manifest
from horizon_lm.runs.checkpoints.unit_file import hash_file

FORMAT, VERSION = "horizon-lm checkpoint", 1
_PACKAGES = ("horizon-lm", "torch", "transformers", "numpy", "numba", "datasets", "trl", "tokenizers")
_MAX_BYTES = 1 << 30  # of a JSON file
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "I16": 2, "U8": 1}
_Size = Annotated[int, Field(ge=0)]
_Dtype = Annotated[str, Field(pattern=f"^({'|'.join(_DTYPE_BYTES)})$")]
_SourceDtype = Annotated[str, Field(pattern="^(float64|float32|float16|bfloat16)$")]


@cache
def installed_packages() -> Mapping[str, str]:
    """Return the installed versions of the packages that the numbers of a run depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: its size in bytes and its xxh3-128."""

    size: _Size
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint: elements ``start`` to ``start + length`` of ``tensor``, and where their bytes lie.

    Attributes:
        file: path of the file inside the checkpoint.
        tensor: name of the parameter, with a suffix for low halves and moments.
        start, length: the elements of the flat tensor that the file holds; all of them, unless it is sharded.
        dtype: in safetensors' terms.
        shape: of the whole tensor.
        offset: position of the first byte in the file.
        xxh3_64: hash of the bytes.
    """

    file: str
    tensor: str
    start: _Size
    length: _Size
    dtype: _Dtype
    shape: tuple[_Size, ...]
    offset: _Size
    xxh3_64: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: optimizer steps that were done.
        precision: storage mode of the weights.
        moments: kind of the optimizer's moments; None without an optimizer.
        dtypes: dtype of each parameter in the model that was trained, for export.
        files: all files but the manifest, by path inside the checkpoint.
        tensors: all tensors of the units' files.
        base: xxh3-128 of the weights of each unit that is not saved, because it is frozen under adapters.
        packages: installed versions.
    """

    step: _Size
    precision: str
    moments: str | None
    dtypes: Mapping[str, _SourceDtype]
    files: Mapping[str, FileEntry]
    tensors: Sequence[TensorEntry]
    base: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=installed_packages)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files of the checkpoint, of all ranks, with the manifest."""
        return sum(each.size for each in self.files.values()) + len(self.to_json())

    def to_json(self) -> bytes:
        """Return the manifest as the contents of its file."""
        content = {"format": FORMAT, "version": VERSION, **_JSON.dump_python(self)}
        text = json.dumps(content, separators=(",", ":"), sort_keys=True)
        return f'{{"xxh3_128": "{xxhash.xxh3_128_hexdigest(text.encode())}",\n"checkpoint": {text}}}\n'.encode()


_JSON = TypeAdapter(Manifest)


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file of a checkpoint.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is damaged: it is missing, or larger than any file of its kind")
        return json.loads(path.read_bytes())
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, after checking that its files exist and have their sizes.

    Raises:
        ConfigError: the folder is no checkpoint, or it is damaged or of another format version.
    """
    require_manifest(folder)
    path = folder / MANIFEST
    outer = read_json(path)
    try:
        content = outer["checkpoint"]
        text = json.dumps(content, separators=(",", ":"), sort_keys=True)
        if outer["xxh3_128"] != xxhash.xxh3_128_hexdigest(text.encode()):
            raise ConfigError(f"{path} is damaged: its checksum is wrong")
        if content["format"] != FORMAT:
            raise ConfigError(f"{path} is not the manifest of a checkpoint")
        if (saved_version := content["version"]) != VERSION:
            raise ConfigError(
                f"{folder} has format version {saved_version}, and this is horizon-lm {installed_packages().get('horizon-lm')}, which reads "
                f"version {VERSION}; use the release that wrote it ({content['packages'].get('horizon-lm')})"
            )
        manifest = _JSON.validate_json(text, strict=True)
        _require_tensors_in_files(manifest)
        _require_files(folder, manifest)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    return manifest


def _require_tensors_in_files(manifest: Manifest) -> None:
    """Raise ValueError if a tensor lies outside of its file, and KeyError if it is in a file that the manifest does not name."""
    for each in manifest.tensors:
        if each.offset + each.length * _DTYPE_BYTES[each.dtype] > manifest.files[each.file].size:
            raise ValueError(f"{each.tensor} ends outside of {each.file}")


def _require_files(folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError unless all files of a checkpoint are there, inside of it, and of the right size."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{folder / MANIFEST} names {name}, which is outside of the checkpoint")
        if not path.is_file():
            raise ConfigError(f"{path} is missing; the checkpoint is damaged")
        if path.stat().st_size != entry.size:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes instead of {entry.size:,}; the checkpoint is damaged"
            )


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file of a checkpoint, and compare it with its hash.

    Raises:
        ConfigError: a file is damaged or cannot be read; the message names it and the first damaged tensor.
    """
    names = list(manifest.files)
    with ThreadPoolExecutor(usable_cores()) as threads:
        hashes = threads.map(lambda name: _hash_or_reject(folder / name), names)
        for name, file_hash in zip(names, hashes, strict=True):
            require_hash(folder, manifest, name, file_hash)


def verify_copies(mesh: Mesh, folder: Path, is_verified: bool = False) -> Manifest:
    """Verify each copy of a checkpoint once, on the first rank that sees it. Return the manifest, which all copies share.

    Args:
        mesh: the ranks, all of which call this.
        folder: the folder of the checkpoint, by the same path on all ranks.
        is_verified: whether the first rank has verified its copy before.

    Raises:
        ConfigError: a copy is damaged, or they are different checkpoints. It is raised on all ranks.
    """
    with fail_together(mesh, "the manifest of a checkpoint"):
        manifest = read_manifest(folder)
    if mesh.size == 1:
        verify(folder, manifest)
        return manifest
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    hashes = mesh.exchange("the contents of a checkpoint", digest)
    if (odd := next((rank for rank, each in enumerate(hashes) if each != hashes[0]), None)) is not None:
        raise ConfigError(f"{folder}: rank {odd} has another checkpoint than rank 0; give all machines the same files")
    seen = SeenFiles(mesh, folder, [MANIFEST, *manifest.files])
    with fail_together(mesh, "the check of a checkpoint"):
        if seen.is_first_of_copy and not (is_verified and mesh.rank == 0):
            verify(folder, manifest)
    return manifest


def _hash_or_reject(path: Path) -> str:
    """Return the xxh3-128 of a file. Raise ConfigError if it cannot be read."""
    try:
        return hash_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); the checkpoint is damaged") from error


def require_hash(folder: Path, manifest: Manifest, name: str, file_hash: str) -> None:
    """Raise ConfigError with the first damaged tensor if the hash of a file is not the manifest's."""
    if name not in manifest.files:
        raise ConfigError(f"{folder / MANIFEST} does not name {name}; the checkpoint is damaged")
    if file_hash != manifest.files[name].xxh3_128:
        tensor = next((each for each in manifest.tensors if each.file == name and _is_damaged(folder, each)), None)
        place = f" at {tensor.tensor}" if tensor else ""
        raise ConfigError(f"{folder / name} is damaged{place}: its contents do not have the checksum in {MANIFEST}")


def _is_damaged(folder: Path, tensor: TensorEntry) -> bool:
    """Return whether the bytes of a tensor have another hash than the manifest's."""
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        return xxhash.xxh3_64_hexdigest(file.read(tensor.length * _DTYPE_BYTES[tensor.dtype])) != tensor.xxh3_64
