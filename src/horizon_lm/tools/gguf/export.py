"""Write a Hugging Face folder as a GGUF file, one tensor at a time, for llama.cpp and programs that are built on it.

Names and the format are those of the package gguf, layouts and metadata those of llama.cpp's ``convert_hf_to_gguf.py``. What would
not be read back from the file as it was is rejected.
"""

import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model import hf_config, hub, skeletons
from horizon_lm.model.adapters import base_of_adapters
from horizon_lm.model.files.checkpoint_loader import check_headers
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.files.conversion import find_conversion
from horizon_lm.model.gguf_architectures import ARCHITECTURES
from horizon_lm.model.gguf_rotary import frequency_factors
from horizon_lm.model.quantization import quantization_of
from horizon_lm.runs.checkpoints.new_folder import require_new, write_new, write_new_folder
from horizon_lm.tools.gguf.reading import require_kept
from horizon_lm.tools.gguf.tensors import announce, file_tensors
from horizon_lm.tools.gguf.tokenizer import Tokenizer, read_tokenizer

FILE = "model.gguf"


class Exported(NamedTuple):
    """A file that was written, with lines on its gaps and on what other programs do differently."""

    notes: list[str]


def file_of(target: Path) -> Path:
    """Return the file that an export writes: the target if it is named like one, else ``model.gguf`` in that folder."""
    return target if target.suffix == ".gguf" else target / FILE


def export_gguf(model: str | Path, target: str | Path, dtype: str | None = None) -> Exported:
    """Write the model of a Hugging Face folder as a new file NAME.gguf, or as ``model.gguf`` in a new folder. Memory is needed for one tensor at a time.

    Args:
        model: folder or hub id of a model, such as ``OUTPUT_DIR/model``, or of merged adapters.
        target: the file or folder to write; it must not exist.
        dtype: ``bfloat16``, ``float16`` or ``float32`` of matrices; None for each one's own. Vectors are always in float32.

    Raises:
        ConfigError: a folder cannot be read or exists, its weights are not those of the model, the package gguf is missing, or a
            tensor has no place in the format.
        ModelNotSupportedError: the file would not be read as this model or this tokenizer.
    """
    target, source = Path(target), hub.local_folder(model)
    require_new(target)
    require_model_folder(source)
    if base_of_adapters(source) is not None:
        raise ConfigError(f"{source} has adapters; merge them first: horizon-lm merge {source} OUT")
    checkpoint, config = Checkpoint(source), hf_config.load_config(source, trust_remote_code=False)
    if quantization_of(config) is not None:
        raise ModelNotSupportedError(f"{source}: quantized weights are not written as GGUF; decode them first")
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelNotSupportedError(
            f"{source}: models of type {config.model_type} are not written as GGUF; those of type {known} are"
        )
    if find_spec("gguf") is None:
        raise ConfigError("--format gguf needs the package gguf: pip install 'horizon-lm[gguf]'")
    architecture, skeleton = ARCHITECTURES[config.model_type], skeletons.open_skeleton(source, config)
    tokenizer = read_tokenizer(source, config.vocab_size, skeleton.generation_config)
    # Before anything is written, a file with no other tensors than the factors of rotary frequencies, which belong to the config, is read
    # back, to compare its config with the model's.
    with tempfile.TemporaryDirectory() as scratch:
        header = Path(scratch) / FILE
        with closing(_open_writer(config, tokenizer, header)) as writer:
            for tensor, factors in frequency_factors(config).items():
                if tensor in architecture.factors:
                    writer.add_tensor(tensor, factors.numpy())
            _write_metadata(writer)
            writer.write_tensors_to_file()
        notes = require_kept(architecture, config, header, source)
    conversion = find_conversion(skeleton, checkpoint.names)
    names = [name for name in checkpoint.names if name not in conversion.unused]
    tensors = file_tensors(architecture, config, checkpoint, names, getattr(torch, dtype) if dtype else None)
    notes = [*check_headers(skeleton, checkpoint, conversion), *notes]

    is_file = file_of(target) == target

    def fill(part: Path) -> None:
        """Write the file, whose header has the tensors' names and shapes."""
        with closing(_open_writer(config, tokenizer, part if is_file else part / FILE)) as writer:
            announce(writer, tensors)
            _write_metadata(writer)
            writer.write_ti_data_to_file()
            for each in tensors:
                writer.write_tensor_data(each)

    (write_new if is_file else write_new_folder)(target, fill)
    return Exported(notes + tokenizer.notes)


def _open_writer(config: Any, tokenizer: Tokenizer, path: Path) -> Any:
    """Return a writer of a file, with the metadata of a model and its tokenizer, which `_write_metadata` writes."""
    import gguf

    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture.name)
    adders: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in architecture.metadata(config).items():
        adders[type(value)](f"{architecture.name}.{name}", value)
    tokenizer.add_to(writer)
    return writer


def _write_metadata(writer: Any) -> None:
    """Write the metadata that were added to the writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
