"""The memory of a block's computation found on the meta device, compared with the bytes counted in a real run."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_lm.planning.measure.block_probe import _written, run_on_meta
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned

MODELS = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 4},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 32, "layer_types": ["full_attention"]},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def call_of_a_block(
    family: str, rows: int, length: int, **settings: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the only block of a small model, and the arguments with which the model calls it."""
    config = AutoConfig.for_model(
        family, hidden_size=256, intermediate_size=688, num_hidden_layers=1, num_attention_heads=8, vocab_size=128,
        **MODELS[family] | settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    calls: list[Any] = []
    (block,) = model.get_decoder().layers
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    model(input_ids=torch.randint(0, 128, (rows, length)), use_cache=False)
    handle.remove()
    args, kwargs = calls[0]
    return block, tuple(a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args), kwargs


@pytest.mark.parametrize(
    ("family", "rows", "length"), thinned([(family, *size) for family in MODELS for size in ((2, 128), (3, 320))])
)
def test_a_block_takes_the_measured_footprint(family: str, rows: int, length: int) -> None:
    require_measured(*call_of_a_block(family, rows, length))


def test_frozen_experts_have_no_gradients() -> None:
    """Grouped products of frozen weights are as many backward as forward, but for the fallback in other dtypes."""
    block, args, kwargs = call_of_a_block("mixtral", 2, 128)
    experts = 2 * 2 * 128 * 2 * 3 * 256 * 688
    for name, param in block.named_parameters():
        param.requires_grad_("experts" not in name)
    require_measured(block, args, kwargs)
    works = [run_on_meta(block, args, kwargs, dtype) for dtype in (torch.bfloat16, torch.float32)]
    others = works[0].forward.products - experts
    assert [each.backward.products for each in works] == [2 * others + experts, 2 * others + 2 * experts]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_experts_have_a_footprint() -> None:
    """PEFT applies them to all experts in a call, and switches autocast off meanwhile. Nothing of this writes weights."""
    peft = pytest.importorskip("peft")
    block, args, kwargs = call_of_a_block("mixtral", 2, 128)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters), block)
    require_measured(block, args, kwargs)
    assert not _written(block, args, kwargs)


def require_measured(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a block, and compare the bytes that it takes with those found on the meta device."""
    found = run_on_meta(block, args, kwargs, torch.bfloat16).footprint
    with StorageMeter() as real:
        output = block(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        graph = real.current
        for param in filter(lambda p: p.requires_grad, block.parameters()):
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        output.backward(torch.ones_like(output))
    assert found.graph == pytest.approx(graph, rel=0.05)
    assert found.peak == pytest.approx(real.peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_expert_that_a_token_chooses_is_counted(dtype: torch.dtype) -> None:
    rows, length = 2, 64
    one, two = (
        run_on_meta(*call_of_a_block("mixtral", rows, length, num_experts_per_tok=chosen), dtype) for chosen in (1, 2)
    )
    of_an_expert = 2 * rows * length * 3 * 256 * 688
    assert two.forward.products - one.forward.products == of_an_expert
    assert two.backward.products - one.backward.products == 2 * of_an_expert
