"""Folders of tiny models of images and text, with random weights and their processors, and pictures for them; nothing is downloaded."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.e2e.tiny import build_tokenizer, write_jsonl

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
# As LLaVA's: images before all texts of a turn, and contents as parts only.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As that of Qwen2.5-VL: contents as text or as parts, in their order.
_PARTS_TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{{{{ '{image}' }}}}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{{{{ '<|im_end|>\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
QWEN_TEMPLATE = _PARTS_TEMPLATE.format(image="<|vision_start|><|image_pad|><|vision_end|>")
GEMMA_TEMPLATE = _PARTS_TEMPLATE.format(image="<start_of_image>")
MARKED_TEMPLATE = QWEN_TEMPLATE.replace(
    "{% if message['content'] is string %}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'][0]['text'] if message['content'] is not string else message['content'] }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% continue %}{% endif %}{% if message['content'] is string %}",
)


def tokenizer_with(template: str | None, *tokens: str, **named: str) -> Any:
    """Return the tiny tokenizer with further special tokens, some of them under names."""
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, *named.values()], **named})
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def save_llava(folder: Path, template: str | None = LLAVA_TEMPLATE) -> Path:
    """Write a LLaVA that reads 16 x 16 pixels as four tokens."""
    tokenizer = tokenizer_with(template, "<image>")
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "projection_dim": 16, **_VISION},
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **_TEXT},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=4,
        vision_feature_select_strategy="default", vision_feature_layer=-1, pad_token_id=1,
    )  # fmt: skip
    return _save(LlavaForConditionalGeneration, config, folder, tokenizer)


def save_gemma3(folder: Path) -> Path:
    """Write a Gemma 3 that reads 16 x 16 pixels as four tokens, between line breaks and tokens of its own."""
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_with(GEMMA_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=names, **tokenizer.special_tokens_map
    )
    tokenizer.chat_template = GEMMA_TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    boi, eoi, soft = (
        tokenizer.convert_tokens_to_ids(names[name]) for name in ("boi_token", "eoi_token", "image_token")
    )
    config = Gemma3Config(
        vision_config={"image_size": 16, **_VISION},
        text_config={"vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 64, **_TEXT},
        mm_tokens_per_image=4, boi_token_index=boi, eoi_token_index=eoi, image_token_index=soft,
    )  # fmt: skip
    return _save(Gemma3ForConditionalGeneration, config, folder, tokenizer)


def save_qwen2_5_vl(folder: Path, template: str = QWEN_TEMPLATE) -> Path:
    """Write a Qwen2.5-VL, whose images have as many tokens as squares of 16 x 16 pixels."""
    tokenizer = tokenizer_with(template, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 4096}, patch_size=8)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>",
        }.items()
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
            "window_size": 32, "fullatt_block_indexes": [1],
        },
        text_config={"vocab_size": len(tokenizer), "rope_parameters": rope, **_TEXT}, **ids,
    )  # fmt: skip
    return _save(Qwen2_5_VLForConditionalGeneration, config, folder, tokenizer)


def save_qwen3_5(folder: Path, tied: bool = False) -> Path:
    """Write a Qwen 3.5, which transformers also has as a causal language model, and whose images are those of `save_qwen2_5_vl`.

    ``tied``: the head is the embedding.
    """
    tokenizer = tokenizer_with(QWEN_TEMPLATE, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 4096}, patch_size=8).save_pretrained(folder)
    names = {
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
    }
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    config = Qwen3_5Config(
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        text_config={
            "vocab_size": len(tokenizer), "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": rope, "tie_word_embeddings": tied, **_TEXT,
        },
        tie_word_embeddings=tied,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )  # fmt: skip
    return _save(Qwen3_5ForConditionalGeneration, config, folder, tokenizer)


def _save(model_class: Any, config: Any, folder: Path, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(seed: int = 0, size: tuple[int, int] = (24, 18), mode: str = "RGB") -> Image.Image:
    """Return a picture of random pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode) if channels == 1 else Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of a file with a picture."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_uri(image: Image.Image) -> str:
    """Return a picture as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def write_rows(folder: Path, count: int) -> Path:
    """Write rows of which every third has no image, and every third but one has two."""
    rows = []
    for number in range(count):
        picture(number, (24 + number, 18)).save(folder / f"{number}.png")
        names = [f"{number}.png", "0.png"][: (1, 2, 0)[number % 3]]
        turns = ("user", f"{'<image>' * len(names)}What is seen on night {number}?"), ("assistant", f"{number} stars.")
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns], "images": names})
    return write_jsonl(folder / "rows.jsonl", rows)
