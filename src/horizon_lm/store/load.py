"""Filling the store from safetensors files, one target tensor at a time."""

import warnings

import torch

from horizon_lm.errors import CheckpointWarning, ConfigError
from horizon_lm.model.finite import require_finite
from horizon_lm.model.parts import ModelParts
from horizon_lm.store.check import check_headers, parameter_names
from horizon_lm.store.checkpoint import Checkpoint
from horizon_lm.store.conversion import find_conversion
from horizon_lm.store.store import Store

__all__ = ["Checkpoint", "load_weights"]


def load_weights(parts: ModelParts, store: Store, checkpoint: Checkpoint) -> None:
    """Check a checkpoint, and write every parameter of a model into the store. A CheckpointWarning says what is left out.

    Raises:
        ConfigError: headers that do not fit the model (`check_headers`), weights that are NaN or infinite, or a tied head
            with other weights than the table.
    """
    model = parts.model
    conversion = find_conversion(model, checkpoint.names)
    for sentence in check_headers(model, checkpoint, conversion):
        warnings.warn(sentence, CheckpointWarning, stacklevel=3)
    parameters, buffers = parameter_names(model), dict(model.named_buffers())
    written: dict[str, str] = {}
    for target in conversion.targets:
        tensors = checkpoint.read(list(target.sources))
        if target.name in parameters:
            for name, tensor in tensors.items():
                require_finite(name, tensor, checkpoint.file_of(name))
        for name, tensor in target.convert(model, tensors).items():
            if name in buffers:
                buffers[name].copy_(tensor)
            elif name in parameters:
                own = parameters[name]
                if own not in written:
                    store.source_dtypes[own] = tensor.dtype
                    store.write(own, tensor)
                elif not _is_stored(store, own, tensor):  # a tied one; transformers would untie it
                    raise ConfigError(
                        f"{written[own]} and {name} have different values in {checkpoint.folder}, but its config.json says "
                        "that they are one parameter; set tie_word_embeddings: false in it"
                    )
                written[own] = name


def _is_stored(store: Store, name: str, tensor: torch.Tensor) -> bool:
    """Return whether a parameter has these values, as far as its precision keeps them."""
    rounded = tensor if store.precision.low_half else tensor.to(store.weight(name).dtype)
    return torch.equal(store.master(name), rounded.float())
