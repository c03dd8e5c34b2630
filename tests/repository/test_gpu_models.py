"""Compare the arithmetic of the accelerator benchmarks with published figures."""

from typing import Any

import pytest
import torch
from gpu_models import MODELS, count_parameters, make_config, model_flops, random_model, toy, wider

# Parameters in billions, from the model cards.
PUBLISHED = {"qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "llama-3.1-8b": 8.03}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters(name: str, billions: float) -> None:
    config = make_config(MODELS[name], 128)
    total, active = count_parameters(config)
    assert round(total / 1e9, 2) == pytest.approx(billions, abs=0.011)
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert active == total - lookup


def test_a_token_uses_few_experts() -> None:
    config = make_config(MODELS["qwen3-30b-a3b, 8 blocks"] | {"num_hidden_layers": 48}, 128)
    total, active = count_parameters(config)
    assert round(total / 1e9, 1) == 30.5
    assert 3.3 <= (active + config.vocab_size * config.hidden_size) / 1e9 < 3.4  # the model card counts the lookup


def test_operations_equal_those_counted_in_autograd() -> None:
    """Count a forward and backward pass without recomputation, with all scores, of which causal attention
    needs half.
    """
    from torch.utils.flop_counter import FlopCounterMode

    rows, length = 3, 64
    config = make_config(toy(MODELS["qwen2.5-7b"]) | {"attn_implementation": "eager"}, length)
    model = random_model(config, torch.float32, torch.device("cpu"), torch.device("cpu"))
    ids = torch.randint(0, config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    config.head_dim = config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * rows * length * length * config.num_attention_heads * config.head_dim
    expected = model_flops(config, rows * length, length) + attention
    # Biases and norms are parameters, but not matrix products.
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("settings", [*MODELS.values(), wider(3, 10)], ids=lambda s: s["model_type"])
def test_random_weights_are_initialized_like_the_model(settings: dict[str, Any]) -> None:
    config = make_config(toy(settings), 32)
    model = random_model(config, torch.float32, torch.device("cpu"), torch.device("cpu"))
    ids = torch.randint(0, config.vocab_size, (2, 32))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.item() == pytest.approx(torch.log(torch.tensor(float(config.vocab_size))).item(), rel=0.05)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == config.tie_word_embeddings
