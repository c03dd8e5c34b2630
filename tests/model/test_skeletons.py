"""A model without weights takes no memory for them, and has the buffers of one with weights."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Llama4TextConfig, OpenAIGPTConfig

from horizon_lm.errors import ConfigError
from horizon_lm.model import skeletons
from tests.support import models_with_images, tiny_models
from tests.support.tensor_memory import StorageMeter


def llama4(experts: int, width: int) -> Any:
    """Return a config whose class makes the experts of each block with ``torch.zeros``."""
    return Llama4TextConfig(
        num_hidden_layers=2, hidden_size=width, intermediate_size=2 * width, intermediate_size_mlp=2 * width, head_dim=64,
        num_attention_heads=8, num_key_value_heads=8, num_local_experts=experts, interleave_moe_layer_step=1, vocab_size=512,
    )  # fmt: skip


@pytest.mark.parametrize(("experts", "width"), [(8, 1024), (128, 5120)], ids=["a large one", "Llama 4 Maverick"])
def test_experts_take_no_memory(experts: int, width: int) -> None:
    meter = StorageMeter()
    with meter:
        model = skeletons.build_skeleton(llama4(experts, width))
    assert model.get_parameter("model.layers.1.feed_forward.experts.gate_up_proj").shape == (experts, width, 4 * width)
    assert all(param.is_meta for param in model.parameters())
    assert meter.peak < 2**20


def test_a_large_buffer_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeletons, "_LARGE", 2**10)
    config = OpenAIGPTConfig(n_positions=64, n_embd=16, n_layer=1, n_head=2, vocab_size=64)
    assert torch.equal(
        skeletons.build_skeleton(config).get_buffer("transformer.h.0.attn.bias")[0, 0], torch.ones(64, 64).tril()
    )
    with pytest.raises(ConfigError, match="a table of 1,000,000,000,000 elements would be computed"):
        skeletons.build_skeleton(OpenAIGPTConfig(n_positions=10**6))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_buffers_do_not_depend_on_what_is_large(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_models.build(family).config
    expected = skeletons.build_skeleton(AutoConfig.for_model(**config.to_dict()))
    monkeypatch.setattr(skeletons, "_LARGE", 0)
    skeleton = skeletons.build_skeleton(AutoConfig.for_model(**config.to_dict()))
    assert {n: (p.shape, p.dtype) for n, p in skeleton.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in expected.named_parameters()
    }
    buffers = dict(expected.named_buffers())
    assert buffers.keys() == dict(skeleton.named_buffers()).keys()
    assert all(torch.equal(each, buffers[name]) for name, each in skeleton.named_buffers())


def test_a_part_of_a_config_keeps_the_name_of_its_folder() -> None:
    """The causal language model of Qwen3.5 has the config of the text alone; trainers find its tokenizer by the name."""
    config = models_with_images.tiny("qwen3_5").config
    config.name_or_path = "a/folder"
    model = skeletons.build_skeleton(config, AutoModelForCausalLM)
    assert type(model.config) is not type(config)
    assert model.config.name_or_path == "a/folder"
