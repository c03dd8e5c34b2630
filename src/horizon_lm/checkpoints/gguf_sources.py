"""Tensors of a folder from which those of a GGUF file are made: experts of a layer are one tensor there."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from horizon_lm.errors import ConfigError
from horizon_lm.store.checkpoint_reader import Checkpoint, Header

_OWN_MODULE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


class Piece(NamedTuple):
    """A tensor, or an expert of a tensor of all experts, or the gate or the up projection of that expert."""

    tensor: str
    expert: int | None = None
    half: int | None = None

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Return the values, shape (rows, columns) of an expert."""
        if self.expert is None:
            return checkpoint.read([self.tensor])[self.tensor]
        matrix = checkpoint.read([self.tensor], slice(self.expert, self.expert + 1))[self.tensor][0]
        return matrix if self.half is None else matrix.chunk(2)[self.half]


class Source(NamedTuple):
    """The pieces of a tensor, in their order, and its shape."""

    shape: torch.Size
    pieces: list[Piece]


def sources(headers: Mapping[str, Header], folder: Path) -> dict[str, Source]:
    """Return the sources of all tensors, by their names in the folder without the numbers of experts.

    Experts in modules of their own (``experts.0.up_proj.weight``) and in one tensor (``experts.gate_up_proj``, ``(E, 2 I, H)``)
    give the same names.

    Raises:
        ConfigError: an expert is missing, or has another shape than the first.
    """
    found: dict[str, Source] = {}
    modules: dict[str, dict[int, str]] = {}
    for name, header in headers.items():
        if match := _OWN_MODULE.fullmatch(name):
            modules.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        elif match := _FUSED.fullmatch(name):
            found.update(_fused(name, header.shape, match[1], match[2]))
        else:
            found[name] = Source(header.shape, [Piece(name)])
    for stack, names in modules.items():
        ordered = [names.get(number, f"{stack} of expert {number}") for number in range(max(names) + 1)]
        shape = headers[names[min(names)]].shape
        if odd := next((name for name in ordered if name not in headers or headers[name].shape != shape), None):
            raise ConfigError(f"{folder}: {odd} is missing or has another shape than that of other experts")
        found[stack] = Source(torch.Size((len(ordered), *shape)), [Piece(name) for name in ordered])
    return found


def _fused(name: str, shape: torch.Size, experts: str, kind: str) -> dict[str, Source]:
    """Return the sources that are made of a tensor of all experts."""
    if kind == "down":
        return {name: Source(shape, [Piece(name, expert) for expert in range(shape[0])])}
    half = torch.Size((shape[0], shape[1] // 2, *shape[2:]))
    return {
        f"{experts}.{projection}_proj": Source(half, [Piece(name, expert, index) for expert in range(shape[0])])
        for index, projection in enumerate(("gate", "up"))
    }
