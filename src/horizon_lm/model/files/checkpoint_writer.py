"""Write a Hugging Face folder from the store, one tensor at a time.

The safetensors format (https://github.com/huggingface/safetensors, "Format") is a JSON header followed by raw bytes.
The library's writer takes all tensors of a file together, which would be a second copy of the model; here each tensor
is written from its slab directly to the file.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.core_model_loading import revert_weight_conversion

from horizon_lm.common.disk import Disk, new_file, part_of, sync_tree, write_file
from horizon_lm.common.quantities import parse_bytes
from horizon_lm.errors import CheckpointWarning, ConfigError, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.files.buffers import unrounded_buffers
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES, DTYPES
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.generation import write_generation_config
from horizon_lm.model.opening import kept_in_float32
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.tying import true_config


class Tensors(Protocol):
    """The tensors of a folder, in units that are in memory one at a time.

    Attributes:
        main_dtype: the dtype that the config gets.
        num_params: number of elements of the model's parameters.
    """

    main_dtype: torch.dtype
    num_params: int

    def plan(self) -> list[dict[str, torch.Tensor]]:
        """Return meta tensors for each unit, with the shapes and dtypes of the tensors that `unit` returns."""
        ...

    def unit(self, index: int) -> dict[str, torch.Tensor]:
        """Return a unit's tensors by their names in the folder."""
        ...


def dtype_of(header: Header) -> torch.dtype:
    """Return the dtype of a tensor in a folder. Raise ConfigError if torch has none."""
    if header.dtype not in DTYPES:
        raise ConfigError(f"tensors of {header.dtype} cannot be copied; use a copy of the model without them")
    return DTYPES[header.dtype]


def as_stored(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model with the names and in the layout that they have in a folder."""
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found


def save_pretrained(
    parts: ModelParts,
    store: Store,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    values: Mapping[str, torch.Tensor] | None = None,
    variant: str | None = None,
    disk: Disk | None = None,
) -> None:
    """Write config, generation config and weights in the format that transformers reads (see `StreamedModel`).

    Files appear under their names only when complete, and are durable on return. ``values`` override the store's.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; save_pretrained needs a folder")
    exporter = _Exporter(parts, store, dtype, values or {})
    write_folder(disk or Disk(), folder, parts.model, exporter, max_shard_size, variant)


def write_folder(
    disk: Disk, folder: Path, model: Any, tensors: Tensors, max_shard_size: int | str, variant: str | None = None
) -> None:
    """Write config, generation config and tensors of a model. See `save_pretrained`."""
    disk.make_folder(folder)
    files = _split(tensors.plan(), parse_bytes(max_shard_size), variant)
    for name, group in files.items():
        _write_file(disk, folder / name, group, tensors)
    _write_index(disk, folder, files, tensors.num_params, variant)
    if variant is None:
        _remove_stale(disk, folder, files)
    write_configs(disk, model, folder, tensors.main_dtype)
    disk.sync(folder)


def _remove_stale(disk: Disk, folder: Path, files: Collection[str]) -> None:
    """Remove the weights that an earlier save has left in a folder, in files with other names."""
    for path in folder.glob("model*.safetensors"):
        if path.name not in files and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name):
            disk.remove(path)


def checkpoint_tensors(parts: ModelParts, store: Store, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint with their names, unit by unit."""
    exporter = _Exporter(parts, store, dtype, {})
    for index in range(len(exporter._units)):
        yield from exporter.unit(index).items()


def main_dtype(store: Store) -> torch.dtype:
    """Return the dtype of a written model, as its config has it: that of its embedding, as transformers reads it from a model."""
    return store.written_dtype or store.source_dtypes[next(iter(store.unit_of))]


class _Exporter:
    """The tensors of a checkpoint with their names, layouts and dtypes, unit by unit."""

    def __init__(
        self, parts: ModelParts, store: Store, dtype: torch.dtype | None, values: Mapping[str, torch.Tensor]
    ) -> None:
        self._model, self._store = parts.model, store
        self._dtype = dtype or store.written_dtype
        self._in_float32: frozenset[str] = frozenset()
        if dtype is not None:
            self._in_float32 = frozenset(kept_in_float32(parts.model, store.unit_of, dtype) | parts.in_float32)
        first_names = parameter_names(parts.model)  # by all names of a parameter: tied ones have several
        given = {first_names.get(name, name): value for name, value in values.items()}
        self._given = {  # values of the caller that are not the store's own, and that can be written
            name: value
            for name, value in given.items()
            if name in store.unit_of and name not in store.codecs and value.data_ptr() != store.weight(name).data_ptr()
        }
        for name in [name for name, value in self._given.items() if value.shape != store.shape(name)]:
            warn(
                f"save_pretrained: state_dict has {name} of shape {tuple(self._given.pop(name).shape)}, and the model "
                f"{tuple(store.shape(name))}; the model's own weight was written",
                CheckpointWarning,
            )
        self._buffers = unrounded_buffers(parts, store)
        self._overflows = False  # of float16, by a weight that was written
        # The streamed units, and the names of the tensors of each. The buffers are one more unit, the last, which is not streamed.
        self._streamed = list(store.units)
        self._units = [list(slabs.layout) for slabs in store.units.values()]
        self._units.append(list(self._buffers))
        self.main_dtype = dtype or main_dtype(store)
        self.num_params = sum(math.prod(store.shape(name)) for name in store.unit_of)

    def plan(self) -> list[dict[str, torch.Tensor]]:
        """Return meta tensors for each unit, with the shapes and dtypes of the tensors that `unit` returns."""
        return [as_stored(self._model, {name: self._describe(name) for name in names}) for names in self._units]

    def unit(self, index: int) -> dict[str, torch.Tensor]:
        """Return a unit's tensors in the form in which the checkpoint stores them."""
        with self._store.whole(self._streamed[index]) if index < len(self._streamed) else nullcontext():
            tensors = as_stored(self._model, {name: self._value(name) for name in self._units[index]})
            if self._store.shard.is_whole:
                return tensors
            # Copies, because `whole` gives back the memory of what other ranks own.
            return {name: each.clone() for name, each in tensors.items()}

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a weight is written: as requested, or else as in the caller's value, or in the file."""
        if name in self._in_float32:
            return torch.float32
        given = self._given.get(name)
        return self._dtype or (self._store.source_dtypes[name] if given is None else given.dtype)

    def _describe(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor that `_value` returns."""
        if name in self._buffers:
            return self._buffers[name].to("meta")
        return torch.empty(self._store.shape(name), dtype=self._dtype_of(name), device="meta")

    def _value(self, name: str) -> torch.Tensor:
        """Return a tensor to be written: the caller's value or else the store's, which has all bits of its master."""
        if name in self._buffers:
            return self._buffers[name].to("cpu")
        if name in self._given:
            return self._rounded(name, self._given[name].cpu())
        weight, dtype = self._store.weight(name), self._dtype_of(name)
        if name in self._store.codecs:
            return self._rounded(name, self._store.decode(name))
        return weight if weight.dtype == dtype else self._rounded(name, self._store.master(name))

    def _rounded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value in the dtype in which it is written. Warn about the first one that float16 makes infinite."""
        rounded = value.to(self._dtype_of(name))
        if rounded.dtype == torch.float16 and not self._overflows and rounded.isinf().any():
            self._overflows = True
            warn(
                f"{name} has values above 65,504, which float16 makes infinite; save the model in bfloat16",
                CheckpointWarning,
            )
        return rounded


Shard = dict[int, dict[str, torch.Tensor]]  # by the index of a unit, its meta tensors in this file


def _split(units: list[dict[str, torch.Tensor]], max_bytes: int, variant: str | None) -> dict[str, Shard]:
    """Assign the units' meta tensors to files. Return the files by name. A tensor above the limit gets a separate file."""
    shards: list[Shard] = [{}]
    used = 0  # bytes of the last file
    for unit, tensors in enumerate(units):
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if used and used + size > max_bytes:
                shards.append({})
                used = 0
            shards[-1].setdefault(unit, {})[name] = tensor
            used += size
    if len(shards) == 1:
        return {_file_name("model.safetensors", variant): shards[0]}
    return {
        _file_name(f"model-{i:05}-of-{len(shards):05}.safetensors", variant): shard for i, shard in enumerate(shards, 1)
    }


def _file_name(name: str, variant: str | None) -> str:
    """Return a file name with its variant, in the format of transformers."""
    return name if variant is None else name.replace("model", f"model.{variant}", 1)


def header_bytes(model: Any, units: Sequence[Mapping[str, torch.Tensor]], max_shard_size: int | str = "50GB") -> int:
    """Return the bytes that a folder has for the names and shapes of its tensors: the headers of their files, and the index.

    Args:
        model: the model, or its skeleton.
        units: the tensors of each of its units by their names in the model; those on the meta device suffice.
        max_shard_size: as in `save_pretrained`.
    """
    files = _split([as_stored(model, dict(tensors)) for tensors in units], parse_bytes(max_shard_size), None)
    num_params = sum(tensor.numel() for tensors in units for tensor in tensors.values())
    index = 0 if len(files) == 1 else len(_index(files, num_params))
    return index + sum(len(_header(shard)) for shard in files.values())


def _header(shard: Shard) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensors in shard.values():
        for name, tensor in tensors.items():
            end = position + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end],
            }  # fmt: skip
            position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _write_file(disk: Disk, path: Path, shard: Shard, source: Tensors) -> None:
    """Write a safetensors file: its header, and the tensors in the header's order."""
    with new_file(disk, path) as file:
        file.write(_header(shard))
        for index, tensors in shard.items():
            values = source.unit(index)
            for name in tensors:
                file.write(values[name].contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_index(disk: Disk, folder: Path, files: dict[str, Shard], num_params: int, variant: str | None) -> None:
    """Write which file has which tensor. A single file needs no index, so an index of an earlier save is removed."""
    index = folder / ("model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json")
    if len(files) == 1:
        disk.remove(index)
    else:
        write_file(disk, index, _index(files, num_params))


def _index(files: Mapping[str, Shard], num_params: int) -> bytes:
    """Return the contents of the file that says which file has which tensor."""
    weight_map = {name: file for file, shard in files.items() for name in _names(shard)}
    total = sum(t.numel() * t.element_size() for shard in files.values() for ts in shard.values() for t in ts.values())
    content = {"metadata": {"total_parameters": num_params, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _names(shard: Shard) -> Iterator[str]:
    for tensors in shard.values():
        yield from tensors


def write_configs(disk: Disk, model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Let transformers write the config and generation config of a model into a folder.

    transformers replaces a file in place, and a crash would leave half of one. So it writes into a temporary folder, whose files
    are moved into the real one once they are durable.
    """
    config = true_config(model)
    nested = [getattr(config, key, None) for key in config.sub_configs]
    for each in (config, *nested):
        if each is not None:
            each.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    part = part_of(folder / "config")
    for left in folder.glob(f"{part.name}*"):  # left by a save that failed
        disk.remove(left)
    disk.make_folder(part)
    try:
        config.save_pretrained(part)
        if model.can_generate():
            write_generation_config(model.generation_config, part)
        sync_tree(disk, part)
        for file in part.iterdir():
            disk.rename(file, folder / file.name)
    finally:
        with suppress(OSError):  # the next save removes it
            disk.remove(part)
