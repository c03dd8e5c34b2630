"""A model that is opened once: its config is read once, and its skeleton is built once."""

import copy
from pathlib import Path
from typing import Any

import torch

from horizon_lm.model import attention, skeletons
from horizon_lm.model.quantization import take_quantization


class ModelSource:
    """A model with a known config.

    Args:
        config: Hugging Face config, which is copied.
        place: the model's name in messages.
        folder: the folder of its files; None if they are not on this machine.
        model_class: class of transformers that opens the model; None for that of the checkpoint (`hf_config.auto_class`).
        trust_remote_code, attn_implementation: as in `horizon_lm.from_pretrained`.
        dtype: dtype that transformers would open the model in; None for that of the config.

    Attributes:
        config: the config, without ``quantization_config``.
        quantization: the ``quantization_config`` of the weights; None if they are not quantized.
    """

    def __init__(
        self, config: Any, place: str, folder: Path | None = None, *, model_class: Any = None, trust_remote_code: bool = False,
        attn_implementation: str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.config, self.place, self.folder = copy.deepcopy(config), place, folder
        self.quantization = take_quantization(self.config)
        self.attn_implementation, self.trust_remote_code = attn_implementation, trust_remote_code
        self._options = {
            "model_class": model_class, "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation, "dtype": dtype,
        }  # fmt: skip
        self._skeleton: Any = None

    def skeleton(self) -> Any:
        """Return the model without weights, in evaluation mode. It is shared: read it or copy it, but do not change it.

        Raises:
            ConfigError: transformers cannot build it.
        """
        if self._skeleton is None:
            attention.register()
            config = copy.deepcopy(self.config)
            self._skeleton = (
                skeletons.skeleton_of(config, self.place, **self._options)
                if self.folder is None
                else skeletons.open_skeleton(self.folder, config, **self._options)
            )
        return self._skeleton

    def take_skeleton(self) -> Any:
        """Return the model without weights, to be changed by the caller; the next call of `skeleton` builds another one."""
        found, self._skeleton = self.skeleton(), None
        return found
