"""Build a tiny model of a model type of transformers."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from tests.census.overrides import OVERRIDES
from tests.census.shrink import DROPOUT, tiny_config
from tests.support.tiny_models import attending_as_streamed

MAPPINGS = {
    "causal": "CAUSAL_LM", "image_text": "IMAGE_TEXT_TO_TEXT", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "masked": "MASKED_LM",
    "classification": "SEQUENCE_CLASSIFICATION", "tokens": "TOKEN_CLASSIFICATION", "speech": "SPEECH_SEQ_2_SEQ",
}  # fmt: skip


class CannotBuildError(Exception):
    """Raised for a model type without a tiny model; the message is the reason."""


def model_types(mapping: str) -> list[str]:
    """Return the model types in a mapping of transformers (``MODEL_FOR_CAUSAL_LM_MAPPING`` for ``causal``), with
    aliases.
    """
    return sorted(getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[mapping]}_MAPPING_NAMES"))


def build(model_type: str, mapping: str = "causal", seed: int = 0, **overrides: Any) -> Any:
    """Return a tiny model in float32 with random weights, large enough for visible gradients everywhere.

    Raises:
        CannotBuildError: no tiny model can be built; the message says why.
    """
    torch.manual_seed(seed)
    try:
        model = _build(model_type, mapping, overrides)
    except Exception as error:  # any error raised by a config or a class of transformers
        raise CannotBuildError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn_like(param) * 0.05)
    remove_dropout(model)
    return attending_as_streamed(model).train()


def _build(model_type: str, mapping: str, overrides: Mapping[str, Any]) -> Any:
    special = OVERRIDES.get(model_type, {})
    if mapping == "causal" and hasattr(CONFIG_MAPPING[model_type], "is_decoder"):
        overrides = {"is_decoder": True} | dict(overrides)  # otherwise bert and similar models attend to later tokens
    config = tiny_config(model_type, overrides)
    if mapping == "classification":
        config.get_text_config().pad_token_id = 0  # without it, a classifier takes single rows only
    if "part" in special:
        config = getattr(config, special["part"])
    model_class = getattr(transformers, special["class"]) if "class" in special else _model_class(mapping, config)
    if model_class.config_class == config.sub_configs.get("text_config"):  # like AutoModel
        config = config.get_text_config()
    return model_class._from_config(config, dtype=torch.float32)


def _model_class(mapping: str, config: Any) -> Any:
    found = getattr(modeling_auto, f"MODEL_FOR_{MAPPINGS[mapping]}_MAPPING")[type(config)]
    return found[0] if isinstance(found, tuple) else found


def remove_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to 0, also in the modules."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in module.__dict__.items():
            if isinstance(value, float) and DROPOUT.search(name):
                setattr(module, name, 0.0)


def describe_model(model: Any) -> dict[str, Any]:
    """Describe a tiny model: classes, size, kinds of layers."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    embedding = head = None
    with suppress(NotImplementedError):  # pp_formulanet
        embedding, head = (
            getattr(m, "weight", None) for m in (model.get_input_embeddings(), model.get_output_embeddings())
        )
    return {
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "layer_types": sorted(set(map(str, kinds))),
        "tied": embedding is not None and embedding is head,
    }
