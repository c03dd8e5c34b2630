"""PEFT's trained tokens: rows of the input embedding that an adapter replaces (``trainable_token_indices``).

PEFT copies the whole table in every forward pass and replaces these rows in it. Here the rows of a batch are looked up in the
streamed table, and those of trained tokens are replaced afterwards, with the same values and gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from horizon_lm.device.base import send
from horizon_lm.model.functional import look_up
from horizon_lm.model.parts import ModelParts


def trained_token_layers(parts: ModelParts) -> list[nn.Module]:
    """Return PEFT's layers around the tables of a model that replace the rows of trained tokens."""
    return [
        layer
        for layer in parts.embed.modules()
        if hasattr(layer, "trainable_tokens_delta") and getattr(layer, "base_layer", None) in parts.tables
    ]


def trained_tokens_forward(layer: Any) -> Callable[..., torch.Tensor]:
    """Return a forward method of such a layer that needs no table on the device.

    It takes ids (B, T) on the device and returns their hidden states (B, T, H).
    """
    owner = weakref.ref(layer)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        layer: Any = owner()
        hidden: torch.Tensor = layer.base_layer(ids)
        if layer.disable_adapters or layer.merged:
            return hidden
        layer._check_overlapping_tokens(layer.active_adapters)
        for name in layer.active_adapters:
            hidden = _replace(layer, hidden, ids, layer.trainable_tokens_delta[name], layer.token_indices[name])
        return hidden

    return forward


def _replace(
    layer: Any, hidden: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, tokens: list[int]
) -> torch.Tensor:
    """Return hidden states (B, T, H) of ids (B, T), in which the n trained ``tokens`` are computed from their own rows (n, H)."""
    # PEFT keeps the tokens as they were given; `searchsorted` needs them in order.
    order = torch.tensor(sorted(range(len(tokens)), key=tokens.__getitem__))  # (n,)
    sorted_tokens, order = send(torch.tensor(tokens)[order], ids.device), send(order, ids.device)
    # An id above all trained tokens would be at place n, which does not exist.
    places = torch.searchsorted(sorted_tokens, ids).clamp_(max=len(tokens) - 1)  # (B, T)
    is_trained = sorted_tokens[places] == ids
    padding = layer.base_layer.padding_idx
    position = tokens.index(padding) if padding in tokens else None
    # Looked up by the embedding of the base, which may scale its rows, as that of Gemma 3 does.
    of_trained = look_up(layer.base_layer, rows.to(hidden.dtype), order[places], position)
    # Without indices of the trained tokens, whose number a GPU would have to report to the host first.
    return torch.where(is_trained[..., None], of_trained, hidden)
