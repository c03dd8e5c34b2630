"""Write a Hugging Face folder as a GGUF file, one tensor at a time, for llama.cpp and programs that are built on it.

Names and the format are those of the package gguf, layouts and metadata those of llama.cpp's ``convert_hf_to_gguf.py``. What
transformers would not read back from the file as it was is rejected.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from horizon_lm.checkpoints.gguf_tokenizer import add_tokenizer
from horizon_lm.checkpoints.new_folder import write_new_folder
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model import hf_config, hub
from horizon_lm.model.adapters import base_of_adapters
from horizon_lm.model.finite import require_finite
from horizon_lm.model.quantization import quantization_of
from horizon_lm.store.checkpoint_reader import Checkpoint
from horizon_lm.store.checkpoint_writer import dtype_of

FILE = "model.gguf"
_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # types of transformers, and their names in GGUF
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WITHOUT_EFFECT = {  # on what a trained model computes; tokens are in the tokenizer's part of the file
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "pad_token_id",
    "pretraining_tp", "tie_word_embeddings", "use_cache",
}  # fmt: skip
# Read by the models' code and by that of masks, also where the type of config does not have them.
_READ_IF_PRESENT = {"attention_chunk_size", "head_dim", "is_causal", "layer_types", "sliding_window"}


def export_gguf(model: str | Path, folder: str | Path, dtype: str | None = None) -> None:
    """Write the model of a Hugging Face folder as ``model.gguf`` in a new folder. Memory is needed for one tensor at a time.

    Args:
        model: folder or hub id of a model, such as ``OUTPUT_DIR/model``, or of merged adapters.
        folder: the folder to write; it must not exist.
        dtype: ``bfloat16``, ``float16`` or ``float32`` of matrices; None for that of each. Vectors are always in float32.

    Raises:
        ConfigError: a folder cannot be read or exists, the package gguf is missing, or a tensor has no place in the format.
        ModelNotSupportedError: the file would not be read as this model or this tokenizer.
    """
    folder, source = Path(folder), hub.local_folder(model)
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another folder")
    if base_of_adapters(source) is not None:
        raise ConfigError(f"{source} has adapters; merge them first: horizon-lm merge {source} OUT")
    checkpoint, config = Checkpoint(source), hf_config.load_config(source, trust_remote_code=False)
    if quantization_of(config) is not None:
        raise ModelNotSupportedError(f"{source}: quantized weights are not written as GGUF; decode them first")
    if config.model_type not in _TYPES:
        raise ModelNotSupportedError(
            f"{source}: models of type {config.model_type} are not written as GGUF; those of type {', '.join(_TYPES)} are"
        )
    gguf = _package()
    _require_kept(gguf, config, source)
    tensors = _Tensors(gguf, config, checkpoint, getattr(torch, dtype) if dtype else None)

    def fill(part: Path) -> None:
        with closing(_describe(gguf, config, source, part / FILE)) as writer:
            tensors.write(writer)

    write_new_folder(folder, fill)


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("--format gguf needs the package gguf: pip install 'horizon-lm[gguf]'") from error
    return gguf


def _describe(gguf: Any, config: Any, source: Path, path: Path) -> Any:
    """Return a writer with the metadata of a model and its tokenizer."""
    writer = gguf.GGUFWriter(path, _TYPES[config.model_type])
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(gguf, writer, source, config.vocab_size)
    return writer


def _write_header(writer: Any) -> None:
    """Write metadata, and the names and shapes of the tensors that the writer was told of."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _require_kept(gguf: Any, config: Any, source: Path) -> None:
    """Raise ModelNotSupportedError if transformers reads another config from the metadata of the file to come."""
    with tempfile.TemporaryDirectory() as name:
        with closing(_describe(gguf, config, source, Path(name) / FILE)) as writer:
            _write_header(writer)
        read = hf_config.read_config(Path(name), trust_remote_code=False, gguf_file=FILE).to_dict()
    own = config.to_dict()
    for key in sorted(_computed_from(config)):
        if not _equal(own.get(key), read.get(key)):
            raise ModelNotSupportedError(
                f"{source}: {key}: {own.get(key)} cannot be written as GGUF; it would be read as {read.get(key)}"
            )


def _computed_from(config: Any) -> set[str]:
    """Return the keys of a config that decide what the model computes.

    The keys that all types have say where a model comes from and how it is called, and code reads no others than these.
    """
    from transformers import PreTrainedConfig

    own = type(config)().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    return (own | _READ_IF_PRESENT | {"model_type"}) - _WITHOUT_EFFECT


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # GGUF has 32 bits
    return bool(one == other)


class _Tensors:
    """The tensors of a folder with their names, dtypes and layouts in GGUF."""

    def __init__(self, gguf: Any, config: Any, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self._gguf, self._checkpoint, self._headers = gguf, checkpoint, checkpoint.headers()
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_TYPES[config.model_type].upper()], config.num_hidden_layers)
        self._names: dict[str, str] = {}
        for name in self._headers:
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue  # readers take the embedding
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ConfigError(f"{checkpoint.folder}: the tensor {name} has no name in GGUF; remove it")
            self._names[name] = found
        self._dtypes = {
            name: torch.float32 if len(self._headers[name].shape) == 1 else dtype or dtype_of(self._headers[name])
            for name in self._names
        }
        if foreign := next((name for name, each in self._dtypes.items() if each not in _KINDS), None):
            raise ConfigError(
                f"{checkpoint.folder}: the tensor {foreign} has the dtype {self._dtypes[foreign]}; choose another: --dtype"
            )
        self._layouts = _rotary_layouts(config) if config.model_type == "llama" else {}

    def write(self, writer: Any) -> None:
        """Write all metadata and tensors."""
        for name, found in self._names.items():
            shape, kind = self._headers[name].shape, self._gguf.GGMLQuantizationType[_KINDS[self._dtypes[name]]]
            writer.add_tensor_info(found, shape, None, shape.numel() * self._dtypes[name].itemsize, kind)
        _write_header(writer)
        for name in self._names:
            writer.write_tensor_data(self._bytes(name))

    def _bytes(self, name: str) -> Any:
        tensor = self._checkpoint.read([name])[name].to(self._dtypes[name])
        if tensor.dtype == torch.float16:
            require_finite(name, tensor, self._checkpoint.file_of(name))
        layout = self._layouts.get(name.rsplit(".", 2)[-2])
        return (tensor if layout is None else layout(tensor)).contiguous().view(torch.uint8).numpy()


def _rotary_layouts(config: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the layouts of a Llama's queries and keys, in which llama.cpp rotates neighbours instead of halves of a head."""

    def neighbours(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: (
            tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        )

    return {"q_proj": neighbours(config.num_attention_heads), "k_proj": neighbours(config.num_key_value_heads)}
