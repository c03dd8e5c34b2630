"""The weights of a GGUF file, dequantized tensor by tensor."""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.common.gguf_header import GgufHeader, read_gguf_header
from horizon_lm.errors import ConfigError
from horizon_lm.model.finite import require_finite
from horizon_lm.model.folder import gguf_path, require_model_files
from horizon_lm.model.gguf_architectures import Architecture, Layout, in_block
from horizon_lm.model.gguf_config import architecture_of, config_of
from horizon_lm.model.gguf_keys import rejected
from horizon_lm.model.skeletons import skeleton_of

_GATE_AND_UP = re.compile(r"(.*\.experts)\.gate_up_proj")


def load_gguf(folder: Path, gguf_file: str, dtype: torch.dtype) -> Any:
    """Return the model of a GGUF file, dequantized to a dtype and all in memory; raise ConfigError if it cannot be read."""
    require_model_files(folder)
    header = read_gguf_header(gguf_path(folder, gguf_file))
    if find_spec("gguf") is None:
        raise ConfigError("gguf_file needs the package gguf: pip install 'horizon-lm[gguf]'")
    config, architecture = config_of(header), architecture_of(header)[1]
    model = skeleton_of(config, str(header.path), dtype=dtype)
    sources = _sources(model, header, architecture)
    _require_all_used(header, architecture, sources)
    layouts = architecture.layouts(config)
    for name, tensor in _tensors(model):
        values = _joined([_read_tensor(header, source, layouts) for source in sources[name]])
        if values.shape != tensor.shape:
            raise _other_shape(header, sources[name][0], shape=tuple(values.shape), expected=str(tuple(tensor.shape)))
        values = values.to(tensor.dtype)
        require_finite(name, values, header.path)
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            module._parameters[attribute] = nn.Parameter(values)
        else:
            module._buffers[attribute] = values
    model.tie_weights()
    _set_end_tokens(model, header)
    return model


def _set_end_tokens(model: Any, header: GgufHeader) -> None:
    """Set the end tokens of a model's generation config, if the file names several: of a text, of a turn and of a message."""
    ends = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [number for number in dict.fromkeys(ends) if number is not None]
    if len(found) > 1:
        model.generation_config.eos_token_id = found


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model, and the buffers that are saved with it, by name; a tied one once, by its first name."""
    parameters = dict(model.named_parameters())
    yield from parameters.items()
    every = dict(model.named_parameters(remove_duplicate=False))
    yield from ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in every)


def _sources(model: Any, header: GgufHeader, architecture: Architecture) -> dict[str, list[str]]:
    """Return the tensors of a file that make each tensor of a model; raise ConfigError if one is missing.

    Gates and up projections of experts, which transformers joins, are two tensors in most files.
    """
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)

    def in_file(name: str) -> str:
        """Return the name in the file of a tensor, or of a part of one."""
        named = name.replace(".dt_bias", ".dt_proj.bias")  # as llama.cpp's converter does
        mapped = (names.get_name(each, try_suffixes=(".weight", ".bias")) for each in (named, named.partition(".")[2]))
        found = next(filter(None, mapped), name)
        return f"{found}.weight" if ".experts." in name else found

    sources: dict[str, list[str]] = {}
    for name, _ in _tensors(model):
        found = [in_file(name)]
        if found[0] not in header.tensors and (joined := _GATE_AND_UP.fullmatch(name)):
            found = [in_file(f"{joined[1]}.{part}_proj") for part in ("gate", "up")]
        if missing := [each for each in found if each not in header.tensors]:
            raise ConfigError(f"gguf_file: {header.path} has no tensor {missing[0]}; make the file again")
        sources[name] = found
    return sources


def _require_all_used(header: GgufHeader, architecture: Architecture, sources: dict[str, list[str]]) -> None:
    """Raise ConfigError, naming the tensor, if a file has one that the model does not use.

    Tensors of the last blocks that predict further tokens are exempt: transformers leaves these blocks out.
    """
    used = {name for names in sources.values() for name in names} | architecture.factors
    num_blocks, num_predicting = (
        header.metadata.get(f"{architecture.name}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
    )
    for name in sorted(header.tensors.keys() - used):
        block = re.match(r"blk\.(\d+)\.", name)
        if block is None or not num_blocks - num_predicting <= int(block[1]) < num_blocks:
            raise ConfigError(
                f"gguf_file: {header.path}: tensor {name} is not supported for files of {architecture.name}; open the model's "
                "Hugging Face folder instead"
            )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that a file has in parts: the projections of all experts."""
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _read_tensor(header: GgufHeader, name: str, layouts: Mapping[str, Layout]) -> torch.Tensor:
    """Return the values of a tensor in float32 and in the layout of transformers."""
    values, layout = _dequantized(header, name), layouts.get(in_block(name))
    try:
        return values if layout is None else layout.read(values)
    except (IndexError, RuntimeError, TypeError) as error:  # it cannot be viewed in the shape of the layout
        raise _other_shape(header, name, shape=tuple(values.shape), expected="another") from error


def _other_shape(header: GgufHeader, name: str, shape: tuple[int, ...], expected: str) -> ConfigError:
    """Return the error of a tensor whose shape is not that of the model that the metadata describe."""
    return ConfigError(
        f"gguf_file: {header.path}: tensor {name} is of shape {shape}, but the metadata make it {expected}; make the file again"
    )


def _dequantized(header: GgufHeader, name: str) -> torch.Tensor:
    """Return the values of a tensor in float32; raise ConfigError if its type is not known."""
    import gguf
    import numpy as np

    tensor = header.tensors[name]
    content = np.frombuffer(header.bytes_of(name), dtype=np.uint8).reshape(*tensor.shape[:-1], -1)
    try:
        values = gguf.dequantize(content, gguf.GGMLQuantizationType(tensor.kind))
    except (ValueError, NotImplementedError) as error:
        raise rejected(header.path, f"tensor {name}: its type", tensor.kind) from error
    return torch.from_numpy(np.array(values, dtype=np.float32)).view(tensor.shape)
