"""Models that transformers has itself, though their config names a type that it does not have."""

from pathlib import Path

from horizon_lm.model.config_limits import read_settings


def own_type_remedy(folder: Path) -> str:
    """Return the remedy for a config whose architecture transformers has under another type; empty for others.

    Kimi-K2 has the type ``kimi_k2`` and the architecture ``DeepseekV3ForCausalLM``. Its publisher names the same remedy.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = folder / "config.json"
    config = read_settings(path) if path.is_file() else {}
    kind, names = config.get("model_type"), config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    own = next((own for own, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if each == name), None)
    if own is None or not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return ""
    return f"; transformers has {name} itself: to use it, set model_type: {own} in config.json, and remove its auto_map"
