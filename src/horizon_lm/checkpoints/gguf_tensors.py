"""The tensors of a GGUF file: names, dtypes and layouts, and their bytes, which are read while they are written.

A tensor is made of one of the folder's, or of many: experts of a layer are one tensor there.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from horizon_lm.checkpoints.gguf_architectures import Architecture, Layout
from horizon_lm.checkpoints.gguf_rotary import frequency_factors
from horizon_lm.errors import ConfigError
from horizon_lm.model.finite import require_finite
from horizon_lm.store.checkpoint_reader import Checkpoint, Header
from horizon_lm.store.checkpoint_writer import dtype_of

_OWN_MODULE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_IN_FLOAT32 = {"ffn_gate_inp"}  # routers, as llama.cpp's converter writes them


class _Piece(NamedTuple):
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


class _Source(NamedTuple):
    """The pieces of a tensor, in their order, and its shape."""

    shape: torch.Size
    pieces: list[_Piece]


class _Tensor(NamedTuple):
    """A tensor of the file."""

    name: str
    source: _Source
    dtype: torch.dtype
    layout: Layout | None

    @property
    def shape(self) -> torch.Size:
        shape = self.source.shape
        return shape if self.layout is None else self.layout(torch.empty(shape, device="meta")).shape


class _Bytes:
    """The bytes of a tensor, with all that the package's writer asks of an array. One piece is in memory at a time."""

    def __init__(self, tensor: _Tensor, checkpoint: Checkpoint) -> None:
        self._tensor, self._checkpoint = tensor, checkpoint
        self.nbytes = tensor.shape.numel() * tensor.dtype.itemsize

    def tofile(self, file: BinaryIO) -> None:
        for values in self._pieces():
            values.contiguous().view(torch.uint8).numpy().tofile(file)

    def _pieces(self) -> Iterator[torch.Tensor]:
        for piece in self._tensor.source.pieces:
            values = piece.read(self._checkpoint).to(self._tensor.dtype)
            if values.dtype == torch.float16:
                require_finite(piece.tensor, values, self._checkpoint.file_of(piece.tensor))
            yield values if self._tensor.layout is None else self._tensor.layout(values)


class Tensors:
    """The tensors of a folder, as they are in a GGUF file."""

    def __init__(
        self, architecture: Architecture, config: Any, checkpoint: Checkpoint, dtype: torch.dtype | None
    ) -> None:
        """Name all tensors.

        Args:
            architecture: that of the model.
            config: its config.
            checkpoint: its folder.
            dtype: that of matrices; None for that of each. Vectors and routers are always in float32.

        Raises:
            ConfigError: a tensor has no name or no dtype in the format.
        """
        import gguf

        self._checkpoint, self._factors = checkpoint, frequency_factors(config)
        headers, layouts = checkpoint.headers(), architecture.layouts(config)
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        self._tensors = []
        for name, source in _sources(headers, checkpoint.folder).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue  # readers take the embedding
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ConfigError(f"{checkpoint.folder}: the tensor {name} has no name in GGUF; remove it")
            if len(source.pieces) > 1:
                found += ".weight"
            part = found.rsplit(".", 2)[-2]
            exact = len(source.shape) == 1 or part in _IN_FLOAT32
            chosen = torch.float32 if exact else dtype or dtype_of(headers[source.pieces[0].tensor])
            if chosen not in _KINDS:
                raise ConfigError(
                    f"{checkpoint.folder}: the tensor {name} has the dtype {chosen}; choose another: --dtype"
                )
            self._tensors.append(_Tensor(found, source, chosen, layouts.get(part)))

    def announce(self, writer: Any) -> None:
        """Add the names, shapes and dtypes of all tensors to a writer."""
        import gguf

        kinds = gguf.GGMLQuantizationType
        for each in self._tensors:
            num_bytes = each.shape.numel() * each.dtype.itemsize
            writer.add_tensor_info(each.name, each.shape, None, num_bytes, kinds[_KINDS[each.dtype]])
        for name, factors in self._factors.items():
            writer.add_tensor_info(name, factors.shape, None, factors.nbytes, kinds.F32)

    def write(self, writer: Any) -> None:
        """Write all tensors, in the order in which they were announced."""
        for each in self._tensors:
            writer.write_tensor_data(_Bytes(each, self._checkpoint))
        for factors in self._factors.values():
            writer.write_tensor_data(factors.numpy())


def _sources(headers: Mapping[str, Header], folder: Path) -> dict[str, _Source]:
    """Return the sources of all tensors, by their names in the folder without the numbers of experts.

    Experts in modules of their own (``experts.0.up_proj.weight``) and in one tensor (``experts.gate_up_proj``, ``(E, 2 I, H)``)
    give the same names.

    Raises:
        ConfigError: an expert is missing, or has another shape than the first.
    """
    found: dict[str, _Source] = {}
    modules: dict[str, dict[int, str]] = {}
    for name, header in headers.items():
        if match := _OWN_MODULE.fullmatch(name):
            modules.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        elif match := _FUSED.fullmatch(name):
            found.update(_fused(name, header.shape, match[1], match[2]))
        else:
            found[name] = _Source(header.shape, [_Piece(name)])
    for stack, names in modules.items():
        ordered = [names.get(number, f"{stack} of expert {number}") for number in range(max(names) + 1)]
        shape = headers[names[min(names)]].shape
        if odd := next((name for name in ordered if name not in headers or headers[name].shape != shape), None):
            raise ConfigError(f"{folder}: {odd} is missing or has another shape than that of other experts")
        found[stack] = _Source(torch.Size((len(ordered), *shape)), [_Piece(name) for name in ordered])
    return found


def _fused(name: str, shape: torch.Size, experts: str, kind: str) -> dict[str, _Source]:
    """Return the sources that are made of a tensor of all experts."""
    if kind == "down":
        return {name: _Source(shape, [_Piece(name, expert) for expert in range(shape[0])])}
    half = torch.Size((shape[0], shape[1] // 2, *shape[2:]))
    return {
        f"{experts}.{projection}_proj": _Source(half, [_Piece(name, expert, index) for expert in range(shape[0])])
        for index, projection in enumerate(("gate", "up"))
    }
