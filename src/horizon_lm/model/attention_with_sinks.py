"""The attention of models with sinks, such as gpt-oss: ``attn_implementation="sinks"``, which replaces eager attention.

Hugging Face computes sinks eagerly, with all scores in memory, because torch's scaled dot-product attention takes none. Masks are those
of eager attention, so models that change their masks on the way (sparse or compressed keys) work unchanged.
"""

from typing import Any

import torch

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.sink_attention import sink_attention

NAME = "sinks"


def attention_with_sinks(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, s_aux: torch.Tensor | None = None, indices: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention with or without sinks, with the signature of transformers' AttentionInterface.

    Args:
        module: attention layer.
        query: queries (B, heads, T, D).
        key, value: keys and values (B, heads, S, D), possibly with fewer heads.
        attention_mask: (B, 1, T, S); None for causal attention, or for no mask if the layer is not causal.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: number of tokens that a token attends to, without a mask.
        s_aux: sinks (heads,); None in a layer without sinks.
        indices: keys that each query may attend to, (B, T, number of keys), among those that the mask allows.

    Returns:
        Output (B, T, heads, D), and None for attention weights.
    """
    reject_unknown(NAME, module, dropout, mask=attention_mask, sinks=s_aux, others=kwargs)
    mask = attention_mask if indices is None else _selected(attention_mask, indices)
    if s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        return output, None
    # As transformers decides for scaled dot-product attention.
    requested = kwargs.get("is_causal")
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if requested is None else requested)
    return sink_attention(query, key, value, s_aux, mask, scaling=scaling, causal=causal, window=sliding_window), None


def reject_unknown(
    name: str, module: torch.nn.Module, dropout: float, mask: Any, sinks: torch.Tensor | None, others: dict[str, Any]
) -> None:
    """Raise ModelNotSupportedError for arguments of an attention layer that would not be computed right.

    Args:
        name: attention implementation.
        module: attention layer.
        dropout, mask, sinks: its arguments; None for no mask and no sinks.
        others: its further arguments, by name.
    """
    unknown = [each for each in ("softcap", "position_bias", "cache") if others.get(each) is not None]
    if dropout and sinks is not None:
        unknown.append("attention_dropout with sinks")
    if mask is not None and mask.requires_grad:
        unknown.append("a mask that is trained")
    if sinks is None and getattr(module, "sinks", None) is not None:
        unknown.append("sinks that are not passed as s_aux")
    if unknown:
        raise ModelNotSupportedError(
            f"attn_implementation={name!r}: {type(module).__name__} uses {', '.join(unknown)}, which is not supported; "
            "choose 'eager'"
        )


def has_sinks(model: Any) -> bool:
    """Return whether a model's attention has sinks and goes through transformers' AttentionInterface."""
    return getattr(model, "_supports_attention_backend", False) and any(
        isinstance(sinks := getattr(module, "sinks", None), torch.Tensor) and sinks.ndim == 1
        for module in model.modules()
    )


def replaces_eager(model: Any) -> bool:
    """Return whether `attention_with_sinks` is to replace eager attention: transformers chose it because of sinks alone."""
    dropout = getattr(model.config.get_text_config(), "attention_dropout", None)
    return not dropout and not getattr(model, "_supports_sdpa", False) and has_sinks(model)


def register() -> None:
    """Register the implementation in transformers, with the masks of eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention_with_sinks)
    AttentionMaskInterface.register(NAME, eager_mask)


def _selected(mask: torch.Tensor | None, indices: torch.Tensor) -> torch.Tensor | None:
    """Return an additive mask (B, 1, T, S) that hides the keys of ``mask``, and all but those in ``indices`` (B, T, number of keys)."""
    if mask is None:
        raise ModelNotSupportedError(f"attn_implementation={NAME!r}: selected keys need a mask; choose 'eager'")
    hidden = torch.ones_like(mask, dtype=torch.bool).scatter(-1, indices.long()[:, None], False)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
