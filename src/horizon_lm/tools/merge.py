"""Merge adapters into their base: write its folder, tensor by tensor, and merge the tensors that adapters change."""

import copy
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.disk import Disk
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import hf_config, hub, skeletons
from horizon_lm.model.adapter_config import require_adapter_config
from horizon_lm.model.adapters import base_of_adapters, open_base
from horizon_lm.model.files.checkpoint_loader import check_headers, parameter_names
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.files.checkpoint_writer import as_stored, dtype_of, write_folder
from horizon_lm.model.files.conversion import Target, find_conversion
from horizon_lm.model.files.decoded_checkpoint import DecodedCheckpoint
from horizon_lm.model.files.quantized_checkpoint import require_untransposed
from horizon_lm.model.finite import require_finite
from horizon_lm.model.folder import TEMPLATES, require_model_files
from horizon_lm.model.generation import read_generation_config
from horizon_lm.model.merged_layers import MergedLayers
from horizon_lm.model.opening import created_in_float32, kept_in_float32
from horizon_lm.model.quantization import take_quantization
from horizon_lm.model.tying import declare_untied
from horizon_lm.model.units import TRAINED_DTYPES, find_parts
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
    plain, adapted = (skeletons.open_skeleton(source, config, trust_remote_code=trust_remote_code) for _ in range(2))
    checkpoint = Checkpoint(source) if quantization is None else DecodedCheckpoint(source, quantization)
    merged = _MergedFolder(plain, adapted, adapter, checkpoint, getattr(torch, dtype) if dtype else None)
    written = plain
    if merged.untied:
        untied_config = copy.deepcopy(config)
        declare_untied(untied_config)
        written = skeletons.open_skeleton(source, untied_config, trust_remote_code=trust_remote_code)
        first_names = parameter_names(written)
        if still_tied := [each for each in merged.untied if first_names[each] != each]:
            raise ModelNotSupportedError(
                f"{adapter}: the adapters change either the embedding or the head, and a {type(plain).__name__} shares "
                f"{still_tied[0]} between both whatever its config says; use the adapters with their base"
            )
    if (settings := read_generation_config(adapter)) is not None:
        written.generation_config = settings

    def fill(part: Path) -> None:
        """Write the model, the tokenizer, the processor of images, and code that belongs to one of them."""
        write_folder(Disk(), part, written, merged, max_shard_size)
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


@dataclass(slots=True)
class _Unit:
    """Tensors that are written together: copied tensors of the base, or the merged tensors of some targets.

    Attributes:
        copies: names in the checkpoint.
        targets: tensors of the model that are merged.
        groups: indices of the groups of adapters that are merged into them.
        added: names in the model of tensors that the checkpoint does not have.
    """

    copies: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def absorb(self, other: "_Unit") -> None:
        """Add the merged tensors of another unit to this one, to be written with its own."""
        self.groups += other.groups
        self.targets += other.targets
        self.added += other.added


class _MergedFolder:
    """The tensors of a folder with the merged model. Implements `model.files.checkpoint_writer.Tensors`.

    Args:
        plain: the base without weights.
        adapted: another copy of it, which gets the adapters.
        adapter: folder of the adapters.
        checkpoint: the weights of the base.
        dtype: the dtype of the merged weights; None for each tensor's own in the base.

    Attributes:
        untied: names of the parameters that were one in the base, and have different values now.
    """

    def __init__(
        self, plain: Any, adapted: Any, adapter: Path, checkpoint: Checkpoint, dtype: torch.dtype | None
    ) -> None:
        self._model, self._checkpoint, self._dtype = plain, checkpoint, dtype
        conversion = find_conversion(plain, checkpoint.names)
        if isinstance(checkpoint, DecodedCheckpoint):
            require_untransposed(checkpoint, conversion, find_parts(plain))
        check_headers(plain, checkpoint, conversion)
        self._headers = checkpoint.headers()
        # The first names of parameters, by all of their names: tied ones have several.
        self._first_name = parameter_names(plain)
        self._shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
        self._targets: dict[str, Target] = {}  # by the name of each tensor that it gives
        for target in conversion.targets:
            self._targets |= dict.fromkeys(self._meta_of_target(target), target)
        self._stored_target = self._find_stored_targets()
        sources = {
            name: next(iter(target.sources)) for name, target in self._stored_target.items() if target is not None
        }
        dtypes = {name: dtype_of(self._headers[source]) for name, source in sources.items()}
        # What `dtype` applies to, by names in the model and in the checkpoint.
        self._converted = self._find_converted()
        targets = [target for name, target in self._targets.items() if name in self._converted]
        self._converted_sources = {source for target in targets for source in target.sources}
        self._layers = MergedLayers(adapted, adapter, dtypes, self._read)
        self._groups = self._layers.groups
        self.untied = self._find_untied()
        self._units = self._find_units(conversion.targets)
        first_names = [name for name in self._shapes if self._first_name.get(name) == name]
        # Names of tied parameters that are parameters of their own from now on.
        separate = [name for name in self.untied if self._first_name[name] != name]
        self.num_params = sum(self._shapes[name].numel() for name in first_names + separate)
        base_dtype = plain.config.dtype
        self.main_dtype = dtype or (base_dtype if isinstance(base_dtype, torch.dtype) else next(iter(dtypes.values())))

    # Plan

    def plan(self) -> list[dict[str, torch.Tensor]]:
        """Return meta tensors for each unit, with the shapes and dtypes of the tensors that `unit` returns."""
        return [self._written(unit, self._base_meta(unit.copies), self._meta_of_merged(unit)) for unit in self._units]

    def unit(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit by their names in the folder."""
        unit = self._units[index]
        found = self._written(unit, self._checkpoint.read(unit.copies), self._merged_tensors(unit))
        for name, tensor in found.items():
            if tensor.dtype in TRAINED_DTYPES:
                require_finite(name, tensor, f"the merged model, in {tensor.dtype}")
        return found

    def _find_stored_targets(self) -> dict[str, Target | None]:
        """Return the target that gives each tensor of the model, perhaps under another name of a tied parameter; None if the checkpoint has
        no such tensor.
        """
        by_first_name = {self._first_name.get(name, name): target for name, target in self._targets.items()}
        return {
            name: self._targets.get(name) or by_first_name.get(self._first_name.get(name, name))
            for name in self._shapes
        }

    def _find_converted(self) -> set[str]:
        """Return the parameters that the dtype of the merged model applies to: all but the ones that transformers keeps in float32."""
        names = set(self._first_name)
        if self._dtype is None:
            return names
        in_float32 = kept_in_float32(self._model, self._first_name, self._dtype)
        return names - in_float32 - created_in_float32(self._model, self._first_name)

    def _find_untied(self) -> list[str]:
        """Return all names of the parameters that are one in the base, and have different values once adapters are merged."""
        names_of: dict[str, list[str]] = {}  # by the first name of a parameter
        for name, first in self._first_name.items():
            names_of.setdefault(first, []).append(name)
        group_of = {name: index for index, names in enumerate(self._groups) for name in names}
        untied = []
        for names in names_of.values():
            if len(names) > 1 and not group_of.keys().isdisjoint(names):
                values = [self._merged_value(name, group_of.get(name)) for name in names]
                if not all(torch.equal(each, values[0]) for each in values[1:]):
                    untied += names
        return untied

    def _merged_value(self, name: str, group: int | None) -> torch.Tensor:
        """Return a tensor of the merged model. ``group``: index of the group of adapters that changes it; None if none does."""
        if group is None:
            return self._read(name)
        base = {each: self._read(each) for each in self._groups[group]}
        return self._layers.merge(group, _copies_of(base))[name]

    def _find_units(self, targets: Sequence[Target]) -> list[_Unit]:
        """Return the tensors that are written together, in the order of the checkpoint.

        Groups of adapters whose weights are one tensor in the checkpoint, as stacked experts are, share a unit. Units that only
        add tensors come last.
        """
        by_target: dict[int, _Unit] = {}  # by the id of the target
        merged: list[_Unit] = []
        for index, names in enumerate(self._groups):
            # Targets cannot be hashed, so they are known by their ids.
            targets_of_group = {id(self._targets[name]): self._targets[name] for name in names if name in self._targets}
            unit = _Unit(groups=[index])
            overlapping = {id(by_target[key]): by_target[key] for key in targets_of_group if key in by_target}
            for other in overlapping.values():  # of earlier groups that are merged into some of the same tensors
                unit.absorb(other)
                merged.remove(other)
            unit.targets += [target for key, target in targets_of_group.items() if key not in by_target]
            unit.added += [name for name in names if name not in self._targets and self._is_added(name)]
            by_target |= dict.fromkeys((id(target) for target in unit.targets), unit)
            merged.append(unit)
        in_groups = {name for names in self._groups for name in names}
        # The other names of parameters that were tied, which no group changes.
        merged += [_Unit(added=[name]) for name in self.untied if name not in in_groups and name not in self._targets]
        unit_of = {source: by_target[id(t)] for t in targets if id(t) in by_target for source in t.sources}
        return [*self._in_checkpoint_order(unit_of), *(unit for unit in merged if not unit.targets and unit.added)]

    def _is_added(self, name: str) -> bool:
        """Return whether a tensor of the model is written though the checkpoint has none of its name."""
        return name in self.untied or self._stored_target[name] is None

    def _in_checkpoint_order(self, unit_of: Mapping[str, _Unit]) -> Iterator[_Unit]:
        """Yield merged units in the order of their first tensors in the checkpoint, and between them units of copied tensors.

        ``unit_of`` has the merged units by the names of their tensors in the checkpoint.
        """
        yielded: set[int] = set()
        copies, num_bytes, file = _Unit(), 0, None
        for name in self._checkpoint.names:
            unit = unit_of.get(name)
            if unit is not None:
                if id(unit) not in yielded:
                    yielded.add(id(unit))
                    yield unit
                continue
            most_bytes = self._headers[name].numel * 4
            if copies.copies and (num_bytes + most_bytes > _CHUNK or file != self._checkpoint.file_of(name)):
                yield copies
                copies, num_bytes = _Unit(), 0
            copies.copies.append(name)
            num_bytes, file = num_bytes + most_bytes, self._checkpoint.file_of(name)
        if copies.copies:
            yield copies

    # Tensors

    def _base_meta(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return meta tensors with the shapes and dtypes of the base's, by their names in the checkpoint."""
        headers = {name: self._headers[name] for name in names}
        return {name: torch.empty(h.shape, dtype=dtype_of(h), device="meta") for name, h in headers.items()}

    def _meta_of_merged(self, unit: _Unit) -> dict[str, torch.Tensor]:
        """Return the tensors that `_merged_tensors` would return, as meta tensors."""
        found = {name: tensor for target in unit.targets for name, tensor in self._meta_of_target(target).items()}
        return found | {name: self._read(name).to("meta") for name in unit.added}

    def _merged_tensors(self, unit: _Unit) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit that are no copies, merged, by their names in the model."""
        values = {name: tensor for target in unit.targets for name, tensor in self._read_target(target).items()}
        values |= {name: self._read(name) for name in unit.added}
        for index in unit.groups:
            base = {name: values[name] if name in values else self._read(name) for name in self._groups[index]}
            merged = self._layers.merge(index, _copies_of(base))
            # Tensors that stay equal keep their bits: adding nothing may change the sign of a zero.
            values |= {n: each for n, each in merged.items() if n in values and not torch.equal(each, base[n])}
        return values

    def _written(
        self, unit: _Unit, copies: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit by their names in the folder, in the dtype of the merged model.

        ``copies`` has copied tensors by their names in the checkpoint, and ``values`` all others, by their names in the model.
        """
        emitted = self._cast(copies, self._converted_sources)
        cast = self._cast(values, self._converted)
        to_convert = {name: cast[name] for name in unit.added}
        for target in unit.targets:
            if target.converter is None:  # one tensor of the checkpoint, as it is
                emitted[next(iter(target.sources))] = cast[target.name]
            else:
                to_convert |= {name: cast[name] for name in self._meta_of_target(target)}
        return emitted | as_stored(self._model, to_convert)

    def _cast(self, tensors: Mapping[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
        """Return tensors, with those named in ``names`` cast to the dtype of the merged model if it has one."""
        if self._dtype is None:
            return dict(tensors)
        return {name: tensor.to(self._dtype) if name in names else tensor for name, tensor in tensors.items()}

    def _meta_of_target(self, target: Target) -> dict[str, torch.Tensor]:
        """Return meta tensors of the model that a target gives, by name."""
        return target.convert(self._model, self._base_meta(target.sources))

    def _read(self, name: str) -> torch.Tensor:
        """Return a tensor of the base by its name in the model; the value of a new model if the checkpoint has none."""
        target = self._stored_target[name]
        if target is None:
            value: torch.Tensor = self._model.state_dict()[name]
            return value
        found = self._read_target(target)
        if name in found:
            return found[name]
        # stored under another name of a tied parameter
        return next(tensor for other, tensor in found.items() if self._first_name[other] == self._first_name[name])

    def _read_target(self, target: Target) -> dict[str, torch.Tensor]:
        """Return the tensors of the base that a target gives, by their names in the model. Reject values that are not finite."""
        tensors = self._checkpoint.read(list(target.sources))
        for name, tensor in tensors.items():
            require_finite(name, tensor, self._checkpoint.file_of(name))
        return target.convert(self._model, tensors)


def _copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
