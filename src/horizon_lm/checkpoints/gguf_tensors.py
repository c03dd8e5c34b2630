"""The tensors of a folder with their names, dtypes and layouts in GGUF."""

from typing import Any

import torch

from horizon_lm.checkpoints.gguf_architectures import Architecture
from horizon_lm.checkpoints.gguf_rotary import FACTORS, frequency_factors
from horizon_lm.errors import ConfigError
from horizon_lm.model.finite import require_finite
from horizon_lm.store.checkpoint_reader import Checkpoint
from horizon_lm.store.checkpoint_writer import dtype_of

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Tensors:
    """The tensors of a folder, read and written one at a time."""

    def __init__(
        self, gguf: Any, architecture: Architecture, config: Any, checkpoint: Checkpoint, dtype: torch.dtype | None
    ) -> None:
        """Name all tensors.

        Args:
            gguf: the package.
            architecture: that of the model.
            config: its config.
            checkpoint: its folder.
            dtype: that of matrices; None for that of each. Vectors are always in float32.

        Raises:
            ConfigError: a tensor has no name or no dtype in the format.
        """
        self._gguf, self._checkpoint, self._headers = gguf, checkpoint, checkpoint.headers()
        self._layouts, self._factors = architecture.layouts(config), frequency_factors(config)
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
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

    def announce(self, writer: Any) -> None:
        """Add the names, shapes and dtypes of all tensors to a writer."""
        for name, found in self._names.items():
            shape, kind = self._headers[name].shape, self._gguf.GGMLQuantizationType[_KINDS[self._dtypes[name]]]
            writer.add_tensor_info(found, shape, None, shape.numel() * self._dtypes[name].itemsize, kind)
        if self._factors is not None:
            kind = self._gguf.GGMLQuantizationType.F32
            writer.add_tensor_info(FACTORS, self._factors.shape, None, self._factors.nbytes, kind)

    def write(self, writer: Any) -> None:
        """Write all tensors, in the order in which they were announced."""
        for name in self._names:
            writer.write_tensor_data(self._bytes(name))
        if self._factors is not None:
            writer.write_tensor_data(self._factors.numpy())

    def _bytes(self, name: str) -> Any:
        tensor = self._checkpoint.read([name])[name].to(self._dtypes[name])
        if tensor.dtype == torch.float16:
            require_finite(name, tensor, self._checkpoint.file_of(name))
        layout = self._layouts.get(self._names[name].rsplit(".", 2)[-2])
        return (tensor if layout is None else layout(tensor)).contiguous().view(torch.uint8).numpy()
