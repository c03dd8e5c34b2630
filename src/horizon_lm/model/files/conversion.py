"""Map the tensors of a checkpoint to those of a model.

Names and layouts of checkpoints differ from those of modules, for example one tensor per expert, or old prefixes.
The conversions of transformers are applied to one target at a time.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor of the model, and its sources in the checkpoint. Targets are compared by identity.

    Attributes:
        name: name of the tensor; the first name if a conversion returns several tensors.
        sources: source tensors by name, each with the matching pattern of the conversion; None for a plain copy.
        converter: conversion; None for a plain copy.
    """

    name: str
    sources: Mapping[str, str | None]
    converter: WeightConverter | None

    @property
    def is_ambiguous(self) -> bool:
        """True if two tensors of the checkpoint are the same tensor of the model."""
        return len(self.sources) > 1 and None in self.sources.values()

    def convert(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert tensors of the checkpoint to tensors of the model, by name. Meta tensors give meta tensors."""
        if self.converter is None:
            return {self.name: next(iter(tensors.values()))}
        converter = copy.deepcopy(self.converter)  # as in transformers, because it accumulates tensors
        for name, tensor in tensors.items():
            converter.add_tensor(self.name, name, self.sources[name], tensor)  # type: ignore[arg-type]
        result = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}

    @property
    def is_stack(self) -> bool:
        """True if rows of the tensor are tensors of the checkpoint, one for each expert."""
        first, *others = self.converter.operations if self.converter is not None else [None]
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(each, Concatenate) and each.dim == 1 for each in others)
        )

    def of_rows(self, rows: slice) -> "Target":
        """Return the target that gives these rows of a stack."""
        by_pattern = defaultdict(list)
        for source, pattern in self.sources.items():
            by_pattern[pattern].append(source)
        sources = {source: pattern for pattern, names in by_pattern.items() for source in names[rows]}
        return Target(self.name, sources, self.converter)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The mapping of a checkpoint to a model.

    Attributes:
        targets: tensors of the model.
        unused: tensors of the checkpoint without a target, with the names that they would have in the model.
    """

    targets: list[Target]
    unused: dict[str, str]


def find_conversion(model: Any, names: Iterable[str]) -> Conversion:
    """Match the tensor names of a checkpoint with those of a model."""
    expected = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, dict[str, str | None]] = defaultdict(dict)
    unused = {}
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:  # the model has it as it is
            target, pattern = name, None
        if target in expected:
            sources[target][name] = pattern
        else:
            unused[name] = target
    targets = []
    for name, patterns in sources.items():
        # All sources have the same converter, unless the target is ambiguous, which the loader rejects.
        first = next(iter(patterns.values()))
        targets.append(Target(name, patterns, None if first is None else converter_of[first]))
    return Conversion(targets, unused)


def _natural(name: str) -> list[Any]:
    """Return a sort key that orders layer 10 after layer 9, because experts are stacked in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
