"""Merge adapters into their base, one unit at a time, by PEFT's own arithmetic."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.codecs.base import Codec
from horizon_lm.disk import Disk, replace_folder
from horizon_lm.errors import ConfigError
from horizon_lm.model import hub
from horizon_lm.model.adapters import Adapters, base_of_adapters, read_adapters
from horizon_lm.model.quantization import take_quantization
from horizon_lm.model.units import ModelParts, find_parts
from horizon_lm.shards import WHOLE
from horizon_lm.store.checkpoint_loader import check_headers, parameter_names
from horizon_lm.store.checkpoint_reader import Checkpoint
from horizon_lm.store.checkpoint_writer import save_pretrained
from horizon_lm.store.conversion import Target, find_conversion
from horizon_lm.store.quantized_checkpoint import QuantizedCheckpoint, codecs_of, open_checkpoint
from horizon_lm.store.store import SlabLayout

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "*.model",
)  # fmt: skip


def merge_adapter(
    adapter: str | Path,
    folder: str | Path,
    base: str | Path | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Write a model with its adapters merged as a Hugging Face folder, as PEFT's ``merge_and_unload`` would merge them.

    Memory is needed for one unit of the model (a decoder block, or the embedding) and the adapters.

    Args:
        adapter: folder or hub id of the adapters.
        folder: the folder to write; it must not exist.
        base: folder or hub id of the base; None for that which the adapters name.
        dtype: ``bfloat16``, ``float16`` or ``float32``; None for that of the base. Adapters are merged in the base's dtype.
        max_shard_size: the largest size of a file.

    Raises:
        ConfigError: a folder cannot be read, the adapters do not belong to the base, or ``folder`` exists.
    """
    folder, adapter = Path(folder), hub.local_folder(adapter)
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another folder")
    name = base_of_adapters(adapter)
    if name is None:
        raise ConfigError(f"{adapter} has no adapter_config.json; it is not the folder of adapters")
    hub.require_model_files(adapter)  # its tokenizer is copied
    source = hub.local_folder(base or name)
    config = hub.load_config(source, trust_remote_code=False)
    quantization = take_quantization(config)
    plain, adapted = (hub.open_skeleton(source, config) for _ in range(2))
    parts = find_parts(plain)
    store: Any = _MergedStore(parts, adapted, adapter, open_checkpoint(source, quantization))

    def fill(part: Path) -> None:
        save_pretrained(parts, store, part, getattr(torch, dtype) if dtype else None, max_shard_size)
        for path in _tokenizer_files(adapter) or _tokenizer_files(source):
            shutil.copyfile(path, part / path.name)

    folder.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(Disk(), folder, fill)


def _tokenizer_files(folder: Path) -> list[Path]:
    return [path for pattern in _TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]


class _Unit:
    """The tensors of a unit."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.layout = SlabLayout(shapes)


class _MergedStore:
    """The merged weights of a base and its adapters, with the interface of `Store` that exporting needs.

    Args:
        parts: the base without weights, for names and shapes.
        model: another copy of it, which gets the adapters.
        adapter: folder of the adapters.
        checkpoint: the weights of the base.
    """

    shard = WHOLE
    written_dtype = None
    source_buffers: Mapping[str, torch.Tensor] = {}

    def __init__(self, parts: ModelParts, model: Any, adapter: Path, checkpoint: Checkpoint) -> None:
        conversion = find_conversion(parts.model, checkpoint.names)
        headers, first = checkpoint.headers(), parameter_names(parts.model)
        check_headers(parts.model, checkpoint, conversion)
        self._checkpoint, self._plain = checkpoint, parts.model
        self._targets: dict[str, Target] = {}  # by the first name of each parameter
        for target in conversion.targets:
            described = target.convert(
                parts.model, {n: torch.empty(headers[n].shape, device="meta") for n in target.sources}
            )
            self._targets |= {first[name]: target for name in described if name in first}
        self.units = {unit: _Unit({r.name: r.param.shape for r in refs}) for unit, refs in parts.units.items()}
        self.unit_of = {name: unit for unit, each in self.units.items() for name in each.layout}
        self.source_dtypes = {
            name: _DTYPES[headers[next(iter(self._targets[name].sources))].dtype] for name in self.unit_of
        }
        self._owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in self.unit_of
        }
        self._formats = codecs_of(checkpoint, parts) if isinstance(checkpoint, QuantizedCheckpoint) else {}
        self.codecs: Mapping[str, Codec] = {}  # merged weights are not quantized
        self._merging = _Merging(Adapters(folder=str(adapter)).add_to(model, draw=False), adapter)
        self._values: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> torch.Size:
        return self.units[self.unit_of[name]].layout.entries[name].shape

    def master(self, name: str) -> torch.Tensor:
        return self.weight(name).float()

    def weight(self, name: str) -> torch.Tensor:
        return self._values[name]

    @contextmanager
    def whole(self, unit: str) -> Iterator[None]:
        self._values = self._merge(unit)
        try:
            yield
        finally:
            self._values = {}

    def _read(self, target: Target) -> dict[str, torch.Tensor]:
        """Return tensors of the base by their names in the model, decoded if they are quantized."""
        if isinstance(self._checkpoint, QuantizedCheckpoint) and target.name in self._formats:
            codec, shape = self._formats[target.name], self.shape(target.name)
            packed = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
            self._checkpoint.pack(self._plain, target, codec, packed, shape)
            return {target.name: codec.decode(packed, torch.empty(shape, dtype=self.source_dtypes[target.name]))}
        return target.convert(self._plain, self._checkpoint.read(list(target.sources)))

    def _merge(self, unit: str) -> dict[str, torch.Tensor]:
        """Return the merged weights of a unit."""
        names, first = list(self.units[unit].layout), parameter_names(self._plain)
        for target in {id(self._targets[name]): self._targets[name] for name in names}.values():
            for name, tensor in self._read(target).items():
                if name in first:
                    module, attribute = self._owners[first[name]]
                    module._parameters[attribute] = nn.Parameter(tensor.contiguous(), requires_grad=False)
        merged = self._merging.merge({self._owners[name][0] for name in names})
        values = {}
        for name in names:
            module, attribute = self._owners[name]
            values[name] = getattr(merged.get(module, module), attribute).data
            module._parameters[attribute] = nn.Parameter(values[name].to("meta"), requires_grad=False)
        return values


class _Merging:
    """The layers of a PEFT model, whose base has no weights except those of the unit that is being merged."""

    def __init__(self, model: Any, adapter: Path) -> None:
        read_adapters(model, adapter)
        self._wrappers: list[tuple[Any, nn.Module]] = []  # each outermost layer of PEFT with the module that it wraps
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            wrapped = getattr(module, "original_module", None) or getattr(module, "base_layer", None)
            if wrapped is not None and not name.startswith(inside or ("\0",)):
                inside += (f"{name}.",)
                while hasattr(wrapped, "base_layer"):
                    wrapped = wrapped.base_layer
                self._wrappers.append((module, wrapped))

    def merge(self, modules: set[nn.Module]) -> dict[nn.Module, nn.Module]:
        """Merge the adapters of these modules of the base into their weights. Return the modules that replace others."""
        merged: dict[nn.Module, nn.Module] = {}
        for wrapper, wrapped in self._wrappers:
            parts = dict(wrapped.named_modules())
            if modules.isdisjoint(parts.values()):
                continue
            if hasattr(wrapper, "unload_and_optionally_merge_module"):
                unloaded = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                wrapper.merge()
                unloaded = wrapper.get_base_layer()
            merged |= {part: unloaded.get_submodule(path) for path, part in parts.items()}
            for layer in wrapper.modules():
                getattr(layer, "merged_adapters", []).clear()
        return merged
