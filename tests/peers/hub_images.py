"""The hub's models of images and text: processors and configurations for TRL's scripts, which make the models."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

Options = dict[str, Any]
_QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
_QWEN_IDS = {
    "image_token_id": "image_token", "video_token_id": "video_token",
    "vision_start_token_id": "vision_bos_token", "vision_end_token_id": "vision_eos_token",
}  # fmt: skip
_SIZES = {"intermediate_size": 32}


@dataclass(frozen=True)
class Kind:
    """The parts of a model's processor, and what TRL's script takes from the configuration of the hub's model."""

    name: str  # of its classes
    template: str  # of TRL
    tokens: dict[str, str]  # by their names in the tokenizer
    ids: dict[str, str]  # fields of the configuration, with the names of their tokens
    images: Options  # of the image processor
    text: Options = field(default_factory=dict)  # of the configuration's parts
    vision: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)  # of the configuration
    processor: Options = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)  # tokens in place of the tokenizer's
    classes: dict[str, str] = field(default_factory=dict)  # parts of the processor whose classes are another model's


def _llava(name: str, images: Options, options: Options | None = None) -> Kind:
    return Kind(
        name, "llava_next", {"image_token": "<image>"}, {"image_token_index": "image_token"},
        images={"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}} | images,
        text=_SIZES | {"model_type": "llama", "max_position_embeddings": 2048},
        vision=_SIZES | {"model_type": "clip_vision_model", "image_size": 64, "patch_size": 16},
        options={"image_seq_length": 16, "vision_feature_select_strategy": "default", **(options or {})},
        processor={"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        classes={"image_processor": "CLIP"} if name == "Llava" else {},
    )  # fmt: skip


def _qwen(name: str, template: str, patch: int, video: str = "Qwen2VL", processor: str = "") -> Kind:
    square = (2 * patch) ** 2
    return Kind(
        name, template, _QWEN, _QWEN_IDS,
        images={"patch_size": patch, "size": {"shortest_edge": 4 * square, "longest_edge": 16 * square}},
        text=_SIZES, vision={"patch_size": patch} | ({} if patch == 14 else _SIZES),
        classes={"image_processor": "Qwen2VL", "video_processor": video, "processor": processor or name},
    )  # fmt: skip


KINDS = {  # a part of a model's name
    "google/gemma-3": Kind(
        "Gemma3", "gemma3",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        images={"size": {"height": 224, "width": 224}}, special={"bos_token": "<bos>"},
        text={"head_dim": 8, "sliding_window": 512}, vision={"patch_size": 14, "vision_use_head": False},
    ),
    "google/gemma-4": Kind(
        "Gemma4", "gemma4",
        {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>", "sot_token": "<|turn>", "eot_token": "<turn|>",
        },
        {
            "image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token",
            "audio_token_id": "audio_token", "boa_token_id": "boa_token", "eoa_token_index": "eoa_token",
        },
        images={"max_soft_tokens": 70},
        text={
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "global_head_dim": 8,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2048,
        },
        vision={"head_dim": 8}, special={"bos_token": "<bos>"},
        classes={"feature_extractor": "Gemma4Audio", "video_processor": "Gemma4"},
    ),
    "llava-1.5": _llava("Llava", {}),
    "llava-v1.6": _llava(
        "LlavaNext", {"image_grid_pinpoints": [[64, 128], [128, 64]]}, {"image_grid_pinpoints": [[64, 128], [128, 64]]}
    ),
    "Qwen2-VL": _qwen("Qwen2VL", "qwen2_5_vl", 14),
    "Qwen2.5-VL": _qwen("Qwen2_5_VL", "qwen2_5_vl", 14),
    "Qwen3-VL": _qwen("Qwen3VL", "qwen3_vl", 16, video="Qwen3VL"),
    "Qwen3.5": _qwen("Qwen3_5", "qwen3_5_nothink", 16, video="Qwen3VL", processor="Qwen3VL"),
    "Qwen3.6": _qwen("Qwen3_5Moe", "qwen3_6", 16, video="Qwen3VL", processor="Qwen3VL"),
    "idefics2": Kind(
        "Idefics2", "llava_next", {"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
        {"image_token_id": "image_token"},
        images={"size": {"shortest_edge": 64, "longest_edge": 128}, "do_image_splitting": False},
        text=_SIZES | {"model_type": "mistral"}, vision=_SIZES | {"image_size": 128, "patch_size": 16},
    ),
}  # fmt: skip


def kind_of(name: str) -> Kind | None:
    return next((kind for part, kind in KINDS.items() if part in name), None)


def processor_of(kind: Kind, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the processor of a kind with TRL's template, whose tokenizer is the given one with the kind's tokens."""
    import trl

    options: Options = {
        "image_processor": _class(kind, "image_processor")(**kind.images),
        "tokenizer": with_tokens(tokenizer, kind),
        "chat_template": (Path(trl.__file__).parent / "chat_templates" / f"{kind.template}.jinja").read_text("utf-8"),
    }
    for part in ("video_processor", "feature_extractor"):
        if part in kind.classes:
            options[part] = _class(kind, part)()
    return _class(kind, "processor")(**options, **kind.processor)


def with_tokens(tokenizer: PreTrainedTokenizerFast, kind: Kind) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has the tokens of a kind, too."""
    names = tokenizer.special_tokens_map | {"pad_token": tokenizer.pad_token or "<pad>"} | kind.special
    return type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=kind.tokens, model_max_length=2048,
        **names,
    )  # fmt: skip


def config_of(
    kind: Kind, tokenizer: PreTrainedTokenizerFast, text_config: Any = (), vision_config: Any = (), **more: Any
) -> Any:
    """Return the configuration that a script would load from the hub with its own values for some fields."""
    named = with_tokens(tokenizer, kind)
    special = {"vocab_size": len(named), "pad_token_id": named.pad_token_id, "eos_token_id": named.eos_token_id}
    special["bos_token_id"] = special["eos_token_id"] if named.bos_token_id is None else named.bos_token_id
    return getattr(transformers, f"{kind.name}Config")(
        text_config=special | kind.text | dict(text_config), vision_config=kind.vision | dict(vision_config),
        **kind.options, **{field: named.convert_tokens_to_ids(kind.tokens[name]) for field, name in kind.ids.items()}, **more,
    )  # fmt: skip


def _class(kind: Kind, part: str) -> Any:
    suffix = "".join(word.title() for word in part.split("_"))
    return getattr(transformers, kind.classes.get(part, kind.name) + suffix)
