"""Models of images whose text is quantized to 4 bits in host memory, while their tower has 16 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

import horizon_lm
from tests.seams.compare import difference
from tests.support import image_models
from tests.support.quantized_folders import by_bitsandbytes

SAVE = {"llava": image_models.save_llava, "gemma3": image_models.save_gemma3}
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    llm_int8_skip_modules=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
)


def saved(kind: str, folder: Path) -> Path:
    """Write a model in 16 bits."""
    SAVE[kind](folder)
    AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def published(folder: Path) -> Path:
    """Write the model of a folder as bitsandbytes quantizes it."""
    pytest.importorskip("bitsandbytes")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=FOUR_BITS)
    model.save_pretrained(folder.with_name("quantized"))
    return folder.with_name("quantized")


def decoded(streamed: Any) -> Any:
    """Return the plain model in float32 with the weights that a streamed one computes with."""
    plain = AutoModelForImageTextToText.from_config(streamed.config, attn_implementation="sdpa").float()
    for name, param in streamed.named_parameters():
        plain.get_parameter(name).data.copy_(param.decode() if hasattr(param, "decode") else param)
    return plain


def batch(config: Any) -> dict[str, Any]:
    """Return two rows, each with an image of four tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (2, 12), generator=generator)
    ids[:, 2:6] = config.image_token_index
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    types = {"token_type_ids": (ids == config.image_token_index).long()} if config.model_type == "gemma3" else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": pixels, **types}


@pytest.mark.parametrize("reads_published", [True, False])
@pytest.mark.parametrize("kind", SAVE)
def test_adapters_on_text_in_4_bits_and_on_a_tower_in_16(kind: str, reads_published: bool, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "model")
    if reads_published:
        base = horizon_lm.from_pretrained(published(folder), "cpu", "float32")
    else:
        base = horizon_lm.from_pretrained(folder, "cpu", "float32", quantization_config=FOUR_BITS)
    plain, linear = decoded(base), set[str]()
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and ".language_model.layers." in name:
            linear.add(f"{name}.weight")
    assert set(base._horizon.engine.store.codecs) == linear, "the tower is quantized, or text is not"

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(plain, config)
    torch.manual_seed(1)
    streamed = get_peft_model(base, config)
    given = batch(plain.config)
    expected, got = (model.train()(**given).loss for model in (adapted, streamed))
    expected.backward()
    got.backward()
    assert got == expected
    grads = [{n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in (adapted, streamed)]
    assert any("vision_tower" in name for name in grads[0])
    assert difference(*grads, tolerance=1e-6) is None


@pytest.mark.parametrize("kind", SAVE)
def test_published_text_in_4_bits_has_the_values_of_bitsandbytes(kind: str, tmp_path: Path) -> None:
    folder = published(saved(kind, tmp_path / "model"))
    streamed, state = horizon_lm.from_pretrained(folder, "cpu", "float32"), load_file(folder / "model.safetensors")
    for name, param in streamed.named_parameters():
        in_file = name.replace("model.language_model.", "language_model.model.").removeprefix("model.")
        in_file = in_file if in_file in state else f"language_model.{in_file}"  # the head
        if hasattr(param, "decode"):
            assert torch.equal(param.decode(), by_bitsandbytes(state, in_file, param.shape).to(torch.float32)), name
        else:
            assert torch.equal(param, state[in_file].to(param.dtype)), name
