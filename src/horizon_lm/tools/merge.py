"""Merge adapters into their base: write its folder, tensor by tensor, and merge the tensors that adapters change."""

import copy
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Disk
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import hf_config, hub, skeletons
from horizon_lm.model.adapter_config import require_adapter_config
from horizon_lm.model.adapters import Adapters, base_of_adapters, class_of_adapters, open_base
from horizon_lm.model.files.checkpoint_loader import check_headers, converted_on_meta, parameter_names, read_target
from horizon_lm.model.files.checkpoint_reader import StoredTensors, file_of
from horizon_lm.model.files.checkpoint_writer import write_folder
from horizon_lm.model.files.conversion import Target, find_conversion
from horizon_lm.model.files.quantized_checkpoint import DecodedCheckpoint, open_checkpoint
from horizon_lm.model.files.tensors import Contents, Group, as_stored, group_of
from horizon_lm.model.finite import require_finite
from horizon_lm.model.folder import TEMPLATES, require_model_files
from horizon_lm.model.generation import read_generation_config
from horizon_lm.model.merged_layers import MergedLayers
from horizon_lm.model.opening import created_in_float32, kept_in_float32
from horizon_lm.model.quantization import take_quantization
from horizon_lm.model.tying import declare_untied
from horizon_lm.model.units import TRAINED_DTYPES
from horizon_lm.runs.checkpoints.new_folder import require_new, write_new_folder

_CHUNK = (
    32 * 2**20
)  # bytes of small tensors that are read together, so that a file is not opened again for each of them
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template*",
    f"{TEMPLATES}/*", "*.model",
)  # fmt: skip
_PROCESSOR_FILES = ("*processor_config.json",)


def merge_adapter(
    adapter: str | Path,
    folder: str | Path,
    base: str | Path | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "50GB",
    trust_remote_code: bool = False,
) -> None:
    """Write a model with its adapters merged as a Hugging Face folder, as PEFT's ``merge_and_unload`` would merge them.

    Tensors that no adapter changes have the bytes of the base, also buffers; those of a quantized base are decoded. A table that
    the head shares is written twice, with ``tie_word_embeddings: false``, if the adapters change one of both. Memory is needed
    for the adapters and one layer of the model.

    Args:
        adapter: folder or hub id of the adapters.
        folder: the folder to write; it must not exist.
        base: folder or hub id of the base; None for the one that the adapters name.
        dtype: ``bfloat16``, ``float16`` or ``float32``; None for the base's. Adapters are merged in the base's dtype.
        max_shard_size: the largest size of a file.
        trust_remote_code: allow code that comes with the base.

    Raises:
        ConfigError: a folder cannot be read, the adapters do not belong to the base or are damaged, or ``folder`` exists.
        ModelNotSupportedError: adapters of this kind cannot be merged, or the base is not supported.
    """
    from transformers import AutoModelForCausalLM

    folder, adapter = Path(folder), hub.local_folder(adapter)
    require_new(folder)
    require_model_folder(adapter)
    require_adapter_config(adapter)
    base_name = base_of_adapters(adapter)
    assert base_name is not None
    require_model_files(adapter)  # its tokenizer is copied
    source = open_base(adapter, base_name) if base is None else hub.local_folder(base)
    config = hf_config.load_config(source, trust_remote_code)
    quantization = take_quantization(config)
    checkpoint = DecodedCheckpoint(open_checkpoint(source, quantization))
    open_skeleton = partial(skeletons.open_skeleton, source, trust_remote_code=trust_remote_code)
    model_class = class_of_adapters(Adapters(folder=str(adapter)), config)
    # The folder stays what it was, with a tower that a class of text lacks.
    whole_class = hf_config.saved_class(config) if model_class is AutoModelForCausalLM else model_class
    plain, adapted = (open_skeleton(config, model_class=model_class) for _ in range(2))
    base_tensors = _Base(plain, checkpoint)
    merged = _Merged(base_tensors, MergedLayers(adapted, adapter, base_tensors))
    whole = base_tensors
    if whole_class is not model_class:
        whole = _Base(open_skeleton(config, model_class=whole_class), checkpoint)
    written = whole.model
    untied = _find_untied(base_tensors, merged)
    if untied:
        untied_config = copy.deepcopy(config)
        declare_untied(untied_config)
        written = open_skeleton(untied_config, model_class=whole_class)
        first_names = parameter_names(open_skeleton(untied_config, model_class=model_class))
        if still_tied := [each for each in untied if first_names[each] != each]:
            raise ModelNotSupportedError(
                f"{adapter}: the adapters change either the embedding or the head, and a {type(plain).__name__} shares "
                f"{still_tied[0]} between both whatever its config says; use the adapters with their base"
            )
    if (settings := read_generation_config(adapter)) is not None:
        written.generation_config = settings
    contents = _contents(base_tensors, whole, merged, untied, getattr(torch, dtype) if dtype else None)

    def fill(part: Path) -> None:
        """Write the model, the tokenizer, the processor of images, and code that belongs to one of them."""
        write_folder(Disk(), part, written, contents, max_shard_size)
        for patterns in (_TOKENIZER_FILES, _PROCESSOR_FILES):
            if not _copy_files(patterns, adapter, part):
                _copy_files(patterns, source, part)
        for path in sorted(source.glob("*.py")) if trust_remote_code else ():  # also the code of its tokenizer
            if not (part / path.name).exists():
                shutil.copyfile(path, part / path.name)

    write_new_folder(folder, fill)


def _copy_files(patterns: Iterable[str], source: Path, target: Path) -> bool:
    """Copy the files of a folder that match a pattern to the same places in another one. Return whether there are any."""
    files = [path for pattern in patterns for path in sorted(source.glob(pattern)) if path.is_file()]
    for path in files:
        copied = target / path.relative_to(source)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copied)
    return bool(files)


# Tensors


class _Base:
    """The tensors of a base by their names in the model. Implements `Tensors`.

    A `Target` converts tensors of the checkpoint to one or several tensors of the model.

    Args:
        model: the base without weights.
        checkpoint: its weights, decoded if they are quantized.

    Attributes:
        first_names: the first name of each parameter, by all of its names: tied ones have several.
        given: the names of the tensors that a target gives.
        target_of: the target that gives a tensor, by the tensor's name.

    Raises:
        ConfigError: the weights are not those of the model.
    """

    def __init__(self, model: Any, checkpoint: StoredTensors) -> None:
        self.model, self.checkpoint, self._initial = model, checkpoint, model.state_dict()
        conversion = find_conversion(model, checkpoint.names)
        check_headers(model, checkpoint, conversion)
        metas = {target: converted_on_meta(model, checkpoint, target) for target in conversion.targets}
        self._meta = {name: meta for given in metas.values() for name, meta in given.items()}
        self.given = {target: list(given) for target, given in metas.items()}
        self.target_of = {name: target for target, names in self.given.items() for name in names}
        self.first_names = parameter_names(model)
        # The name by which a target gives a tensor, perhaps another one of a tied parameter; None if the checkpoint lacks it.
        by_parameter = {self.first_names.get(name, name): name for name in self.target_of}
        self._given_as = {name: by_parameter.get(self.first_names.get(name, name)) for name in self._initial}
        self._given_as |= {name: name for name in self.target_of}  # a tied name with a tensor of its own keeps it

    def lacks(self, name: str) -> bool:
        """Return whether the checkpoint has no value of a tensor, so that it has the value of a new model."""
        return self._given_as[name] is None

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor of the model."""
        given_as = self._given_as[name]
        return self._initial[name].to("meta") if given_as is None else self._meta[given_as]

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return tensors of the model by name; reject values that are not finite."""
        given = {name: given_as for name in names if (given_as := self._given_as[name]) is not None}
        found: dict[str, torch.Tensor] = {}
        for target in dict.fromkeys(self.target_of[name] for name in given.values()):
            found |= read_target(self.model, self.checkpoint, target)
        return {name: found[given[name]] if name in given else self._initial[name] for name in names}

    def names_in(self, other: "_Base") -> dict[str, str]:
        """Return the names that tensors of the checkpoint have in another class of the model, by their names in this one."""
        target_of = {source: target for target in other.given for source in target.sources}
        return {
            name: theirs
            for target, names in self.given.items()
            for name, theirs in zip(names, other.given[target_of[next(iter(target.sources))]], strict=True)
        }

    def in_folder(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of the model with the names and in the layout of the checkpoint."""
        targets = {name: self.target_of[name] for name in tensors if name in self.target_of}
        copied = {name: next(iter(each.sources)) for name, each in targets.items() if each.converter is None}
        added = {name: tensor for name, tensor in tensors.items() if name not in targets}
        others = {name: tensor for name, tensor in tensors.items() if name not in copied}
        return {copied[name]: tensors[name] for name in copied} | as_stored(self.model, added | others)


class _Merged:
    """The tensors of a model with its adapters merged, by their names in the model. Implements `Tensors`.

    Args:
        base: the tensors of the base.
        layers: the adapters.

    Attributes:
        layers: the names of the tensors that are merged together: those of each layer of adapters, and each that comes whole with them.
        layer_of: the index in ``layers`` of each of these names.
    """

    def __init__(self, base: _Base, layers: MergedLayers) -> None:
        self._base, self._merged_layers, self.layers = base, layers, layers.groups
        self.layer_of = {name: index for index, names in enumerate(self.layers) for name in names}

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor of the model: those of the base."""
        return self._base.meta(name)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return merged tensors by name. A tensor that stays equal keeps its bits: adding nothing may change the sign of a zero."""
        values = self._base.read(names)
        for index in dict.fromkeys(self.layer_of[name] for name in names if name in self.layer_of):
            layer = self.layers[index]
            base = values | self._base.read([name for name in layer if name not in values])
            merged = self._merged_layers.merge(index, {name: base[name].clone() for name in layer})
            values |= {n: each for n, each in merged.items() if n in values and not torch.equal(each, base[n])}
        return values


# The folder


def _find_untied(base: _Base, merged: _Merged) -> list[str]:
    """Return all names of the parameters that are one in the base, and have different values once adapters are merged."""
    names_of: dict[str, list[str]] = {}  # by the first name of a parameter
    for name, first in base.first_names.items():
        names_of.setdefault(first, []).append(name)
    untied = []
    for names in names_of.values():
        if len(names) > 1 and not merged.layer_of.keys().isdisjoint(names):
            first_value, *others = merged.read(names).values()
            if not all(torch.equal(each, first_value) for each in others):
                untied += names
    return untied


def _contents(
    base: _Base, whole: _Base, merged: _Merged, untied: Collection[str], dtype: torch.dtype | None
) -> Contents:
    """Return the weights of the folder: those of the base in its order, and then tensors that only the merged model has.

    Args:
        base: the tensors of the base, in the class of the adapters.
        whole: the tensors of the base, in the class of the folder that is written.
        merged: the tensors of the merged model.
        untied: names of the parameters that were one in the base, and have different values now.
        dtype: the dtype of the merged weights; None for each tensor's own in the base.
    """
    cast = set[str]() if dtype is None else _find_cast(base, dtype)
    cast_in_whole = cast if whole is base or dtype is None else _find_cast(whole, dtype)
    targets = [whole.target_of[name] for name in cast_in_whole if name in whole.target_of]
    sources = {source for target in targets for source in target.sources}

    def copied(names: Sequence[str]) -> Group:
        """Return the group of tensors of the checkpoint that stay as they are."""
        return group_of(base.checkpoint, names, partial(_cast, dtype=dtype, names=sources))

    def changed(names: Sequence[str]) -> Group:
        """Return the group of tensors of the model that are merged together."""

        def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return whole.in_folder({renamed.get(n, n): each for n, each in _cast(tensors, dtype, cast).items()})

        return group_of(merged, names, convert)

    renamed = base.names_in(whole)
    joined, added = _find_changed(base, merged, untied)
    groups = [*_groups_in_order(base.checkpoint, joined, copied, changed), *map(changed, added)]
    first = [whole.meta(name) for name, first_name in whole.first_names.items() if first_name == name]
    separate = [base.meta(name) for name in untied if base.first_names[name] != name]
    base_dtype = base.model.config.dtype
    if not isinstance(base_dtype, torch.dtype):
        base_dtype = base.meta(next(iter(base.first_names))).dtype
    return Contents(groups, dtype or base_dtype, sum(each.numel() for each in [*first, *separate]))


def _find_cast(base: _Base, dtype: torch.dtype) -> set[str]:
    """Return the parameters that the dtype of the merged model applies to: all but the ones that transformers keeps in float32."""
    names = base.first_names
    return names.keys() - kept_in_float32(base.model, names, dtype) - created_in_float32(base.model, names)


def _cast(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return tensors, of which those with these names are cast to a dtype; reject values that are not finite then."""
    found = {name: tensor.to(dtype) if dtype and name in names else tensor for name, tensor in tensors.items()}
    for name, tensor in found.items():
        if tensor.dtype in TRAINED_DTYPES and not tensor.is_meta:
            require_finite(name, tensor, f"the merged model, in {tensor.dtype}")
    return found


def _find_changed(
    base: _Base, merged: _Merged, untied: Collection[str]
) -> tuple[dict[Target, tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the names of the tensors that are not copied from the checkpoint.

    Returns:
        For each target that adapters change, the names of all tensors that are merged with the ones that it gives: layers that
        change tensors of one target, such as stacked experts, are merged together.
        The names of tensors that no target gives, in tuples of those that are merged together.
    """

    def is_added(name: str) -> bool:
        """Return whether a tensor of the model is written though the checkpoint has none of its name."""
        return name not in base.target_of and (name in untied or base.lacks(name))

    joined: dict[Target, tuple[str, ...]] = {}
    added: list[tuple[str, ...]] = []
    for layer in merged.layers:
        targets = dict.fromkeys(base.target_of[name] for name in layer if name in base.target_of)
        earlier = dict.fromkeys(joined[target] for target in targets if target in joined)
        names = [name for joined_names in earlier for name in joined_names]
        names += [name for target in targets if target not in joined for name in base.given[target]]
        names += [name for name in layer if is_added(name)]
        together = tuple(names)
        joined |= {base.target_of[name]: together for name in names if name in base.target_of}
        if together and not targets:
            added.append(together)
    # The other names of parameters that were tied, which no layer changes.
    added += [(name,) for name in untied if name not in merged.layer_of and is_added(name)]
    return joined, added


def _groups_in_order(
    checkpoint: StoredTensors,
    joined: Mapping[Target, tuple[str, ...]],
    copied: Callable[[Sequence[str]], Group],
    changed: Callable[[Sequence[str]], Group],
) -> Iterator[Group]:
    """Yield merged groups in the order of their first tensors in the checkpoint, and between them groups of copied tensors.

    Args:
        checkpoint: the tensors of the base.
        joined: the names of the tensors that are merged together, by each of their targets.
        copied: a function that returns a group of tensors of the checkpoint.
        changed: a function that returns a group of merged tensors.
    """
    names_of = {source: names for target, names in joined.items() for source in target.sources}
    yielded = set[tuple[str, ...]]()
    copies, num_bytes, file = list[str](), 0, None
    for name in checkpoint.names:
        if name in names_of:
            if names_of[name] not in yielded:
                yielded.add(names_of[name])
                yield changed(names_of[name])
            continue
        most_bytes = checkpoint.meta(name).numel() * 4
        if copies and (num_bytes + most_bytes > _CHUNK or file != file_of(checkpoint, name)):
            yield copied(copies)
            copies, num_bytes = [], 0
        copies.append(name)
        num_bytes, file = num_bytes + most_bytes, file_of(checkpoint, name)
    if copies:
        yield copied(copies)
