"""Read a folder of quantized weights as if they had never been quantized: each is decoded when it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from horizon_lm.memory.codecs.base import Codec
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES
from horizon_lm.model.files.conversion import Conversion, Target
from horizon_lm.model.files.quantized_checkpoint import QuantizedCheckpoint
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.finite import require_finite


class DecodedCheckpoint(QuantizedCheckpoint):
    """A quantized checkpoint whose tensors are plain ones for whoever reads them. Memory is needed for one of them at a time.

    Args:
        folder: the folder of the weights.
        quantization: the ``quantization_config`` of their config.
        dtype: the dtype that they are decoded to; None for that of the weights that were quantized.

    Raises:
        ConfigError, ModelNotSupportedError: as `QuantizedCheckpoint`.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
        super().__init__(folder, quantization)
        self._dtypes = {name: dtype or each.dtype for name, each in self.quantized.items()}
        self._headers |= {n: Header(DTYPE_NAMES[self._dtypes[n]], each.shape) for n, each in self.quantized.items()}

    def codecs(self, conversion: Conversion) -> dict[str, Codec]:
        """Return no codecs, because no parameter stays quantized."""
        return {}

    def read(self, names: list[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return tensors, or some of their rows. A quantized one is decoded as a whole first."""
        tensors = super().read([name for name in names if name not in self.quantized], rows)
        for name in names:
            if name in self.quantized:
                decoded = self._decode(name)
                tensors[name] = decoded if rows is None else decoded[rows]
        return tensors

    def _decode(self, name: str) -> torch.Tensor:
        """Read and decode one quantized tensor."""
        weight = self.quantized[name]
        packed = torch.empty(weight.codec.num_bytes(weight.shape), dtype=torch.uint8)
        # A parameter that is this tensor alone, without a converter of transformers, so no model is asked.
        alone = Target(name, {name: None}, None)
        self.pack(None, alone, weight.codec, packed, weight.shape)
        decoded = weight.codec.decode(packed, torch.empty(weight.shape, dtype=self._dtypes[name]))
        require_finite(name, decoded, self.file_of(name))
        return decoded
