"""Which tensors of a checkpoint make which tensor of a model.

Names and layouts of checkpoints differ from those of modules (experts kept one by one, old prefixes); transformers' own
conversions are applied, to one target at a time.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model.

    Attributes:
        name: of the tensor; where a conversion gives several, of the first of them.
        sources: by the names of the checkpoint's tensors that it is made of, the pattern of the conversion that takes them;
            None for a plain copy.
        converter: the conversion, None for a plain copy.
    """

    name: str
    sources: Mapping[str, str | None]
    converter: WeightConverter | None

    @property
    def is_ambiguous(self) -> bool:
        """Return whether two tensors of the checkpoint claim to be this one."""
        return len(self.sources) > 1 and None in self.sources.values()

    def convert(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's tensors, by name, made of the checkpoint's. Meta tensors give meta tensors."""
        if self.converter is None:
            return {self.name: next(iter(tensors.values()))}
        own = copy.deepcopy(self.converter)  # as transformers does: it collects tensors
        for name, tensor in tensors.items():
            own.add_tensor(self.name, name, self.sources[name], tensor)  # type: ignore[arg-type]
        result = own.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a checkpoint becomes a model.

    Attributes:
        targets: the model's tensors.
        unused: names of the checkpoint that make none of them, with what they are called in the model's own terms.
    """

    targets: list[Target]
    unused: dict[str, str]


def find_conversion(model: Any, names: Iterable[str]) -> Conversion:
    """Match the names of a checkpoint with those of a model."""
    expected = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, dict[str, str | None]] = defaultdict(dict)
    unused = {}
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target in expected:
            sources[target][name] = pattern
        else:
            unused[name] = target
    targets = []
    for target, found in sources.items():
        pattern = next(iter(found.values()))
        targets.append(Target(target, found, None if pattern is None else by_pattern[pattern]))
    return Conversion(targets, unused)


def _natural(name: str) -> list[Any]:
    """Return a sort key that puts layer 10 after layer 9: experts are stacked in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
