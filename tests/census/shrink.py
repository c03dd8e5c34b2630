"""Shrink the default config of a model type: reduce every size, by rules on the names of fields."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.census.overrides import OVERRIDES

VOCABULARY = 112
NUM_PLAIN_TOKENS = 80  # ids from this one on are special tokens, which rows of text do not contain
WIDTH, HEADS, HEAD_DIM, INTERMEDIATE, EXPERTS = 64, 4, 16, 96, 4
LENGTH = 64  # length of the longest row


def tiny_config(model_type: str, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the default config of a model type with every size reduced."""
    config_class = CONFIG_MAPPING[model_type]
    special = OVERRIDES.get(model_type, {})
    default = config_class(**special.get("default", {}))
    ids = _SpecialTokens()
    return _shrink(default, _merge(special.get("set", {}), overrides or {}), ids, tower=False)


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for name, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merge(merged[name], value) if both else value
    return merged


class _SpecialTokens:
    """An assignment of ids to special tokens by the name of their field, starting at `NUM_PLAIN_TOKENS`."""

    _COMMON: Mapping[str, int] = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "forced_eos": 2, "forced_bos": 1}

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def of(self, field: str) -> int:
        name = re.sub(r"_(token_)?(id|ids|index)$", "", field)
        if name in self._COMMON:
            return self._COMMON[name]
        return self._ids.setdefault(name, NUM_PLAIN_TOKENS + len(self._ids))


_SPECIAL = re.compile(r"(_token_id|_token_index|^im_.*_id|^image_patch_id)$")
DROPOUT = re.compile(r"drop(out|path)?|pdrop|layerdrop")
_TOWER = re.compile(r"vision|audio|vit|sam|qformer|image_tokenizer|vq|encoder|perceiver|resampler|dit|projector")


def _shrink(default: Any, overrides: Mapping[str, Any], ids: _SpecialTokens, tower: bool) -> Any:
    """Return a config of the same class in which every size is tiny."""
    values: dict[str, Any] = {}
    layers = _chosen_layers(default, tower)
    for name, value in _fields(default).items():
        if name in overrides and not isinstance(overrides[name], Mapping):
            continue
        if isinstance(value, PreTrainedConfig):
            inner = tower or bool(_TOWER.search(name))
            values[name] = _shrink(value, overrides.get(name, {}), ids, inner)
        elif _SPECIAL.search(name):
            if isinstance(value, int):
                values[name] = ids.of(name)
            elif isinstance(value, (list, tuple)):
                values[name] = type(value)([ids.of(name)])
        elif layers is not None and _is_per_layer(value, default):
            values[name] = type(value)(range(len(layers)) if _is_range(value) else (value[i] for i in layers))
        elif layers is not None and name in _LAYERS:
            values[name] = len(layers)
        else:
            tiny = _tiny_value(name, value, default, tower)
            if tiny is not _KEEP:
                values[name] = tiny
    for name, value in overrides.items():
        if not (isinstance(value, Mapping) and isinstance(getattr(default, name, None), PreTrainedConfig)):
            values[name] = value
    return type(default)(**values)


def _fields(config: Any) -> dict[str, Any]:
    """Return the arguments of a config's class, with their values."""
    values = {}
    config.allow_global_per_layer_attribute_access = True  # values that differ by layer are derived from these fields
    for name in type(config).__dataclass_fields__:
        with suppress(AttributeError):
            values[name] = getattr(config, name)
    return values


_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def _chosen_layers(config: Any, tower: bool) -> list[int] | None:
    """Return layer indices that cover every kind, for a config that lists the kind of each layer."""
    lists = [v for v in _fields(config).values() if _is_per_layer(v, config) and not _is_range(v)]
    if not lists:
        return None
    kinds = list(zip(*(map(repr, each) for each in lists), strict=True))
    first = sorted({kinds.index(kind) for kind in kinds})[:6]
    others = (i for i in range(len(kinds)) if i not in first)
    return sorted(first + [next(others) for _ in range(min(len(kinds), 2 if tower else 3) - len(first))])


def _is_per_layer(value: Any, config: Any) -> bool:
    depth = next((getattr(config, name) for name in _LAYERS if isinstance(getattr(config, name, None), int)), None)
    scalars = isinstance(value, (list, tuple)) and not any(isinstance(v, (list, tuple, dict)) for v in value)
    return scalars and depth is not None and depth > 2 and len(value) == depth


def _is_range(value: Any) -> bool:
    return list(value) == list(range(len(value)))


_KEEP = object()
_Rule = Callable[
    [int, Any, bool], int
]  # arguments: the default value, its config, and whether it belongs to an image or audio tower


def _at_most(largest: int) -> _Rule:
    return lambda value, config, tower: min(value, largest)


_width = ContextVar("the width of tiny models", default=WIDTH)


@contextmanager
def of_width(width: int) -> Iterator[None]:
    """Context manager: build tiny models of this hidden size."""
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


def _at_most_width(value: int, config: Any, tower: bool) -> int:
    return min(value, WIDTH if tower else _width.get())


def _layers(value: int, config: Any, tower: bool) -> int:
    return min(value, 2) if tower else min(value, max(3, 4 if _varies(config) else 3))


def _varies(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return len(set(map(str, kinds))) > 1 or any(_PERIOD.search(name) for name in vars(config))


def _kv_heads(value: int, config: Any, tower: bool) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return HEADS if value == heads else 1 if value == 1 else 2


# Lists of layers; a tiny model has at least two.
_INDICES = re.compile(r"(indexes|indices|idxs|layer_ids|^cross_attention_layers)$")
_PERIOD = re.compile(r"(period|_interval|every_n_layers|layer_group_size|sliding_window_pattern|_frequency)$")
_INT_RULES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"^(chunk_size_feed_forward|chunk_size_lm_head|pretraining_tp|model_parallel_size|seed|type_vocab_size|task_type_vocab_size)$", _KEEP),
        (r"(^|_)(vocab_size|vocab)$|vocab_size_per_layer_input|vocabulary_size", VOCABULARY),
        (r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|layers|depth|num_(decoder|encoder)_layers|num_blocks|conf_num_hidden_layers|num_global_layers|num_layers_per_stack|resampler_depth|num_lstm_layers|aligner_num_add_layers)$", _layers),
        (r"(period|every_n_layers|layer_group_size|no_rope_layer_interval|attention_interval|sliding_window_pattern|n_layers_per_attn_res_block)$", _at_most(2)),
        (r"^attn_layer_offset$", 1),
        (r"^rotary_dim$", 8),
        (r"(first_k_dense_replace|num_dense_layers)$", _at_most(1)),
        (r"^max_window_layers$", 2),
        (r"(num_key_value_heads|num_kv_heads|kv_n_heads|multi_query_group_num)$", _kv_heads),
        (r"(attention_heads|^num_heads|^n_heads?|resampler_n?_?heads|num_attention_heads|index_n_heads|encoder_attention_heads)$", HEADS),
        (r"^(linear_num_key_heads|linear_num_heads)$", 2),
        (r"^linear_num_value_heads$", 4),
        (r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", lambda value, *_: 8 if value > 8 else 2),
        (r"^(qk_nope_head_dim|v_head_dim|index_head_dim)$", 16),
        (r"^qk_rope_head_dim$", _at_most(8)),
        (r"^qk_head_dim$", 24),
        (r"(head_dim|kv_channels|d_kv|d_head|dim_head|attention_head_size|headdim)$", HEAD_DIM),
        (r"lora_rank|(^|_)rank$|lowrank", _at_most(16)),
        (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)$", _at_most(EXPERTS)),
        (r"^(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|moe_top_k|top_k)$", _at_most(2)),
        (r"(n_shared_experts|num_shared_experts)$", _at_most(1)),
        (r"^(n_group|num_expert_group)$", _at_most(2)),
        (r"^topk_group$", 1),
        (r"^(index_topk|index_topk_blocks)$", 4),
        (r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner|d_inner|mlp_dim|inner_dim|feed_forward_size|intermediate_size_mlp|shared_intermediate_size|share_expert_dim|alignment_intermediate_size)$", _at_most(INTERMEDIATE)),
        (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length|max_target_positions|max_source_positions|original_max_position_embeddings|model_max_length|num_position_embeddings|max_2d_position_embeddings)$", LENGTH),
        (r"^(sliding_window|sliding_window_size|attention_window_size|attention_chunk_size|keep_window_size)$", 6),
        (r"^(chunk_size|mamba_chunk_size|block_size)$", _at_most(8)),
        (r"^(state_size|mamba_d_state|ssm_state_size)$", 8),
        (r"^image_size$", 16),
        (r"^patch_size$", 4),
        (r"(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|projection_dim|output_dim|projector_hidden_size|lru_width|attention_hidden_size|hidden_size_global|output_hidden_size|out_hidden_size|projection_hidden_size|projector_output_dim|projector_input_dim|patch_embed_hidden_size)$", _at_most_width),
        (r"^hidden_size_per_layer_input$", _at_most(16)),
    )
]  # fmt: skip


def _tiny_value(name: str, value: Any, config: Any, tower: bool) -> Any:
    """Return the tiny value of one field, or `_KEEP`."""
    if isinstance(value, float) and DROPOUT.search(name):
        return 0.0
    if value is None:
        return HEAD_DIM if name == "head_dim" else _KEEP
    if isinstance(value, bool):
        return _KEEP
    if isinstance(value, int):
        for pattern, rule in _INT_RULES:
            if pattern.search(name):
                return rule(value, config, tower) if callable(rule) else rule
        return _KEEP
    if _INDICES.search(name) and isinstance(value, (list, tuple)) and len(value) and not _is_per_layer(value, config):
        return type(value)([1])
    if name in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
        return type(value)([16 if name == "image_size" else 4] * len(value))
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _tiny_rope(value, "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()))
    return _KEEP


def _tiny_rope(rope: dict[str, Any], sections: bool) -> Any:
    """Return rotary parameters for heads of `HEAD_DIM`. ``sections``: positions have several coordinates."""
    if any(isinstance(v, dict) for v in rope.values()):
        return {k: _tiny_rope(v, sections) if isinstance(v, dict) else v for k, v in rope.items()}
    tiny = dict(rope)
    if sections or tiny.get("mrope_section"):
        half = int(HEAD_DIM * tiny.get("partial_rotary_factor", 1.0)) // 2
        tiny["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    if "original_max_position_embeddings" in tiny:
        tiny["original_max_position_embeddings"] = LENGTH
    return tiny
