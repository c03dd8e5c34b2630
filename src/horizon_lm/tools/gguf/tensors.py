"""The tensors of a GGUF file: names, dtypes and layouts, and their bytes, which are read while they are written.

A tensor is made of one of the folder's, or of many: experts of a layer are one tensor there.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import StoredTensors, file_of
from horizon_lm.model.finite import require_finite
from horizon_lm.model.gguf_architectures import Architecture, Layout, in_block
from horizon_lm.model.gguf_rotary import frequency_factors

_OWN_MODULE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_IN_FLOAT32 = {"ffn_gate_inp.weight"}  # routers, as llama.cpp's converter writes them


class FileTensor(NamedTuple):
    """A tensor of the file, with the members of a numpy array that the package gguf uses.

    Attributes:
        name: its name in the file.
        meta: a meta tensor with its shape and dtype.
        pieces: a function that yields its values in order, of which one piece is in memory at a time.
    """

    name: str
    meta: torch.Tensor
    pieces: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return self.meta.nbytes

    def tofile(self, file: BinaryIO) -> None:
        for values in self.pieces():
            values.contiguous().view(torch.uint8).numpy().tofile(file)


class _Piece(NamedTuple):
    """A tensor of the folder, or an expert of a tensor of all experts, or the gate or the up projection of that expert."""

    tensor: str
    expert: int | None = None
    half: int | None = None  # 0 is the gate, 1 the up projection

    def read(self, checkpoint: StoredTensors) -> torch.Tensor:
        """Return the values; an expert's are a matrix."""
        if self.expert is None:
            return checkpoint.read([self.tensor])[self.tensor]
        matrix = checkpoint.read([self.tensor], slice(self.expert, self.expert + 1))[self.tensor][0]
        return matrix if self.half is None else matrix.chunk(2)[self.half]


class _Source(NamedTuple):
    """The pieces of a tensor, in their order, and its shape."""

    shape: torch.Size
    pieces: list[_Piece]

    def read(self, checkpoint: StoredTensors, dtype: torch.dtype, layout: Layout | None) -> Iterator[torch.Tensor]:
        """Yield the values of each piece in a dtype, in the layout of the file."""
        for piece in self.pieces:
            values = piece.read(checkpoint).to(dtype)
            require_finite(piece.tensor, values, file_of(checkpoint, piece.tensor))
            yield values if layout is None else layout.write(values)


def file_tensors(
    architecture: Architecture, config: Any, checkpoint: StoredTensors, names: Iterable[str], dtype: torch.dtype | None
) -> list[FileTensor]:
    """Return the tensors of a model, as they are in a GGUF file.

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

    folder, layouts = checkpoint.stored.folder, architecture.layouts(config)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names_in_gguf = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    sources = _sources({name: checkpoint.meta(name).shape for name in names}, folder)
    if config.tie_word_embeddings and (head := sources.pop("lm_head.weight", None)) is not None:
        sources.setdefault("model.embed_tokens.weight", head)  # readers take the embedding for the head
    found = []
    for name, source in sources.items():
        in_gguf = names_in_gguf.get_name(name, try_suffixes=(".weight", ".bias"))
        if in_gguf is None:
            raise ConfigError(f"{folder}: the tensor {name} has no name in GGUF; remove it")
        if len(source.pieces) > 1:
            in_gguf += ".weight"  # `name` has no such suffix if experts were joined
        part = in_block(in_gguf)
        is_in_float32 = len(source.shape) == 1 or part in _IN_FLOAT32
        in_dtype = torch.float32 if is_in_float32 else dtype or checkpoint.meta(source.pieces[0].tensor).dtype
        if in_dtype not in _DTYPE_NAMES:
            raise ConfigError(f"{folder}: the tensor {name} has the dtype {in_dtype}; choose another: --dtype")
        meta, layout = torch.empty(source.shape, dtype=in_dtype, device="meta"), layouts.get(part)
        pieces = partial(source.read, checkpoint, in_dtype, layout)
        found.append(FileTensor(in_gguf, meta if layout is None else layout.write(meta), pieces))
    factors = frequency_factors(config)
    return found + [FileTensor(name, each.to("meta"), partial(iter, [each])) for name, each in factors.items()]


def announce(writer: Any, tensors: Iterable[FileTensor]) -> None:
    """Add the names, shapes and dtypes of tensors to a writer, to which they are written in this order."""
    import gguf

    for each in tensors:
        kind = gguf.GGMLQuantizationType[_DTYPE_NAMES[each.meta.dtype]]
        writer.add_tensor_info(each.name, each.meta.shape, None, each.nbytes, kind)


def _sources(shapes: Mapping[str, torch.Size], folder: Path) -> dict[str, _Source]:
    """Return the sources of all tensors, by their names in the folder without the numbers of experts.

    Experts in modules of their own (``experts.0.up_proj.weight``) and in one tensor (``experts.gate_up_proj``, ``(E, 2 I, H)``)
    give the same names.

    Raises:
        ConfigError: an expert is missing, or has another shape than the first.
    """
    sources: dict[str, _Source] = {}
    stacks: dict[str, dict[int, str]] = {}  # the tensors of experts in modules of their own, by the experts' numbers
    for name, shape in shapes.items():
        if match := _OWN_MODULE.fullmatch(name):
            experts, number, projection = match.groups()
            stacks.setdefault(f"{experts}.{projection}", {})[int(number)] = name
        elif match := _FUSED.fullmatch(name):
            experts, kind = match.groups()
            sources.update(_fused(name, shape, experts, kind))
        else:
            sources[name] = _Source(shape, [_Piece(name)])
    for stack, names in stacks.items():
        # A missing expert gets a name that no tensor has, for the message.
        ordered = [names.get(number, f"{stack} of expert {number}") for number in range(max(names) + 1)]
        shape = shapes[names[min(names)]]
        if odd := next((name for name in ordered if shapes.get(name) != shape), None):
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
