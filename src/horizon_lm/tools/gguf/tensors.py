"""The tensors of a GGUF file: names, dtypes and layouts, and their bytes, which are read while they are written.

A tensor is made of one of the folder's, or of many: experts of a layer are one tensor there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.files.checkpoint_writer import dtype_of
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.finite import require_finite
from horizon_lm.model.gguf_architectures import Architecture, Layout, in_block
from horizon_lm.model.gguf_rotary import frequency_factors

_OWN_MODULE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_IN_FLOAT32 = {"ffn_gate_inp.weight"}  # routers, as llama.cpp's converter writes them


class _Piece(NamedTuple):
    """A tensor of the folder, or an expert of a tensor of all experts, or the gate or the up projection of that expert."""

    tensor: str
    expert: int | None = None
    half: int | None = None  # 0 is the gate, 1 the up projection

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Return the values; an expert's are a matrix."""
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
        return shape if self.layout is None else self.layout.write(torch.empty(shape, device="meta")).shape


class _Bytes:
    """The bytes of a tensor, with the members of a numpy array that the package gguf uses. One piece is in memory at a time."""

    def __init__(self, tensor: _Tensor, checkpoint: Checkpoint) -> None:
        self._tensor, self._checkpoint = tensor, checkpoint
        self.nbytes = tensor.shape.numel() * tensor.dtype.itemsize

    def tofile(self, file: BinaryIO) -> None:
        for values in self._pieces():
            values.contiguous().view(torch.uint8).numpy().tofile(file)

    def _pieces(self) -> Iterator[torch.Tensor]:
        for piece in self._tensor.source.pieces:
            values = piece.read(self._checkpoint).to(self._tensor.dtype)
            require_finite(piece.tensor, values, self._checkpoint.file_of(piece.tensor))
            yield values if self._tensor.layout is None else self._tensor.layout.write(values)


class Tensors:
    """The tensors of a folder, as they are in a GGUF file."""

    def __init__(
        self, architecture: Architecture, config: Any, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype | None
    ) -> None:  # fmt: skip
        """Name all tensors.

        Args:
            architecture: the architecture of the model.
            config: its config.
            checkpoint: its weights.
            names: the tensors in it that belong to the model.
            dtype: the dtype of matrices; None for each one's own. Vectors and routers are always in float32.

        Raises:
            ConfigError: a tensor has no name or no dtype in the format.
        """
        import gguf

        self._checkpoint, self._factors = checkpoint, frequency_factors(config)
        all_headers, layouts = checkpoint.headers(), architecture.layouts(config)
        headers = {name: all_headers[name] for name in names}
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        names_in_gguf = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        sources = _sources(headers, checkpoint.folder)
        if config.tie_word_embeddings and (head := sources.pop("lm_head.weight", None)) is not None:
            sources.setdefault("model.embed_tokens.weight", head)  # readers take the embedding for the head
        self._tensors = []
        for name, source in sources.items():
            in_gguf = names_in_gguf.get_name(name, try_suffixes=(".weight", ".bias"))
            if in_gguf is None:
                raise ConfigError(f"{checkpoint.folder}: the tensor {name} has no name in GGUF; remove it")
            if len(source.pieces) > 1:
                in_gguf += ".weight"  # `name` has no such suffix if experts were joined
            part = in_block(in_gguf)
            is_in_float32 = len(source.shape) == 1 or part in _IN_FLOAT32
            tensor_dtype = torch.float32 if is_in_float32 else dtype or dtype_of(headers[source.pieces[0].tensor])
            if tensor_dtype not in _DTYPE_NAMES:
                raise ConfigError(
                    f"{checkpoint.folder}: the tensor {name} has the dtype {tensor_dtype}; choose another: --dtype"
                )
            self._tensors.append(_Tensor(in_gguf, source, tensor_dtype, layouts.get(part)))

    def announce(self, writer: Any) -> None:
        """Add the names, shapes and dtypes of all tensors to a writer."""
        import gguf

        kinds = gguf.GGMLQuantizationType
        for each in self._tensors:
            num_bytes = each.shape.numel() * each.dtype.itemsize
            writer.add_tensor_info(each.name, each.shape, None, num_bytes, kinds[_DTYPE_NAMES[each.dtype]])
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
    sources: dict[str, _Source] = {}
    stacks: dict[str, dict[int, str]] = {}  # the tensors of experts in modules of their own, by the experts' numbers
    for name, header in headers.items():
        if match := _OWN_MODULE.fullmatch(name):
            experts, number, projection = match.groups()
            stacks.setdefault(f"{experts}.{projection}", {})[int(number)] = name
        elif match := _FUSED.fullmatch(name):
            experts, kind = match.groups()
            sources.update(_fused(name, torch.Size(header.shape), experts, kind))
        else:
            sources[name] = _Source(torch.Size(header.shape), [_Piece(name)])
    for stack, names in stacks.items():
        # A missing expert gets a name that no header has, for the message.
        ordered = [names.get(number, f"{stack} of expert {number}") for number in range(max(names) + 1)]
        shape = headers[names[min(names)]].shape
        if odd := next((name for name in ordered if name not in headers or headers[name].shape != shape), None):
            raise ConfigError(f"{folder}: {odd} is missing or has another shape than that of other experts")
        sources[stack] = _Source(torch.Size((len(ordered), *shape)), [_Piece(name) for name in ordered])
    return sources


def _fused(name: str, shape: torch.Size, experts: str, kind: str) -> dict[str, _Source]:
    """Return the sources that are made of a tensor of all experts: one of ``down``, and two of ``gate_up``."""
    if kind == "down":
        return {name: _Source(shape, [_Piece(name, expert) for expert in range(shape[0])])}
    half_shape = torch.Size((shape[0], shape[1] // 2, *shape[2:]))
    return {
        f"{experts}.{projection}_proj": _Source(half_shape, [_Piece(name, expert, half) for expert in range(shape[0])])
        for half, projection in enumerate(("gate", "up"))
    }
