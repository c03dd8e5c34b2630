"""Write a Hugging Face folder from the store, one tensor at a time.

The safetensors format (https://github.com/huggingface/safetensors, "Format") is a JSON header followed by raw bytes.
The library's writer takes all tensors of a file together, which would be a second copy of the model; here each tensor
is written from its slab directly to the file.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Disk, new_file, new_files, write_file
from horizon_lm.common.quantities import parse_bytes
from horizon_lm.errors import CheckpointWarning, ConfigError, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.files.checkpoint_loader import parameter_names
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES
from horizon_lm.model.files.tensors import Contents, Group, as_stored
from horizon_lm.model.files.written_weights import unrounded_buffers, written_model
from horizon_lm.model.generation import write_generation_config
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.tying import true_config


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
    given = _given_values(parts, store, values or {})
    contents = written_model(parts, store, unrounded_buffers(parts, store), dtype, given)
    write_folder(disk or Disk(), folder, parts.model, contents, max_shard_size, variant)


def _given_values(parts: ModelParts, store: Store, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the caller's values that are not the store's own, and that can be written. Warn about those of another shape."""
    first_names = parameter_names(parts.model)  # by all names of a parameter: tied ones have several
    given: dict[str, torch.Tensor] = {}
    for name, value in {first_names.get(name, name): value for name, value in values.items()}.items():
        if name not in store.unit_of or name in store.codecs or value.data_ptr() == store.weight(name).data_ptr():
            continue
        if value.shape == store.shape(name):
            given[name] = value
        else:
            warn(
                f"save_pretrained: state_dict has {name} of shape {tuple(value.shape)}, and the model "
                f"{tuple(store.shape(name))}; the model's own weight was written",
                CheckpointWarning,
            )
    return given


def write_folder(
    disk: Disk, folder: Path, model: Any, contents: Contents, max_shard_size: int | str, variant: str | None = None
) -> None:
    """Write config, generation config and weights of a model. See `save_pretrained`."""
    disk.make_folder(folder)
    files = _split([group.meta for group in contents.groups], parse_bytes(max_shard_size), variant)
    for name, shard in files.items():
        _write_file(disk, folder / name, shard, contents.groups)
    _write_index(disk, folder, files, contents.num_params, variant)
    if variant is None:
        _remove_stale(disk, folder, files)
    write_configs(disk, model, folder, contents.dtype)
    disk.sync(folder)


def _remove_stale(disk: Disk, folder: Path, files: Collection[str]) -> None:
    """Remove the weights that an earlier save has left in a folder, in files with other names."""
    for path in folder.glob("model*.safetensors"):
        if path.name not in files and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name):
            disk.remove(path)


Shard = dict[int, dict[str, torch.Tensor]]  # by the index of a group, its meta tensors in this file


def _split(groups: Sequence[Mapping[str, torch.Tensor]], max_bytes: int, variant: str | None) -> dict[str, Shard]:
    """Assign the groups' meta tensors to files. Return the files by name. A tensor above the limit gets a separate file."""
    shards: list[Shard] = [{}]
    used = 0  # bytes of the last file
    for index, tensors in enumerate(groups):
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if used and used + size > max_bytes:
                shards.append({})
                used = 0
            shards[-1].setdefault(index, {})[name] = tensor
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
    files = _split([as_stored(model, tensors) for tensors in units], parse_bytes(max_shard_size), None)
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


def _write_file(disk: Disk, path: Path, shard: Shard, groups: Sequence[Group]) -> None:
    """Write a safetensors file: its header, and the tensors in the header's order."""
    with new_file(disk, path) as file:
        file.write(_header(shard))
        for index, tensors in shard.items():
            values = groups[index].read()
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
    """Let transformers write the config and generation config of a model into a folder. A crash leaves no half of a file."""
    config = true_config(model)
    nested = [getattr(config, key, None) for key in config.sub_configs]
    for each in (config, *nested):
        if each is not None:
            each.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    with new_files(disk, folder, "config") as part:
        config.save_pretrained(part)
        if model.can_generate():
            write_generation_config(model.generation_config, part)
