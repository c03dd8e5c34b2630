"""Filling the store from safetensors files, one target tensor at a time."""

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from horizon_lm.errors import ConfigError
from horizon_lm.model.parts import ModelParts
from horizon_lm.store.store import Store

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors of a folder of safetensors files, by name."""

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

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """These tensors. Files are closed again, so that their pages do not count as ours."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._file_of[name]].append(name)
        tensors = {}
        for file_name, wanted in by_file.items():
            path = self.folder / file_name
            if not path.is_file():
                raise ConfigError(f"{self.folder / _INDEX} names {file_name}, which is missing; download it again")
            with _opened(path) as file:
                tensors.update({name: file.get_tensor(name) for name in wanted})
        return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error


def load_weights(parts: ModelParts, store: Store, checkpoint: Checkpoint) -> None:
    """Write every parameter of a model into the store.

    Names and layouts of checkpoints differ from those of modules (experts kept one by one, old prefixes); transformers'
    own conversions are applied, to one target at a time.

    Raises:
        ConfigError: parameters that the checkpoint lacks, or shapes that do not fit.
    """
    model = parts.model
    expected = model.state_dict()
    buffers = dict(model.named_buffers())
    missing = set(store.unit_of)
    for target, sources, converter in _targets(model, checkpoint.names, expected):
        for name, tensor in _convert(model, target, checkpoint.read(sources), converter).items():
            if name in store.unit_of:
                _check_shape(name, tensor, expected[name])
                store.source_dtypes[name] = tensor.dtype
                store.write(name, tensor)
                missing.discard(name)
            elif name in buffers:
                buffers[name].copy_(tensor)
    if missing:
        raise ConfigError(
            f"{checkpoint.folder} lacks {len(missing)} of {len(store.unit_of)} parameters, for example "
            f"{sorted(missing)[0]}; the folder does not hold a {type(model).__name__}"
        )


def _targets(model: Any, names: list[str], expected: dict[str, Any]) -> Iterator[tuple[str, list[str], Any]]:
    """Target name, the checkpoint's names it is made of, and how (None: a plain copy)."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target in expected:
            sources[target].append((name, pattern))
    for target, found in sources.items():
        pattern = found[0][1]
        converter = None if pattern is None else (by_pattern[pattern], dict(found))
        yield target, [name for name, _ in found], converter


def _natural(name: str) -> list[Any]:
    """Sort key that puts layer 10 after layer 9: experts are stacked in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _convert(model: Any, target: str, tensors: dict[str, torch.Tensor], converter: Any) -> dict[str, torch.Tensor]:
    if converter is None:
        return {target: next(iter(tensors.values()))}
    pattern_converter, pattern_of = converter
    own = copy.deepcopy(pattern_converter)  # as transformers does: it collects tensors
    for name, tensor in tensors.items():
        own.add_tensor(target, name, pattern_of[name], tensor)
    result = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


def _check_shape(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape:
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)} in the checkpoint and {tuple(expected.shape)} in the model; "
            "config.json does not belong to these weights"
        )
