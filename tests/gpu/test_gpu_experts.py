"""Mixtures of experts on the device under test: in tiles, quantized, and only those that some tokens are routed to."""

from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.schedule.ops import Kind
from tests.gpu.accelerator import Accelerator
from tests.gpu.comparison import error_of, plain_step, streamed_step
from tests.support import tiny_models
from tests.support.expert_models import NAMES
from tests.support.thinned_cases import covering, thinned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_plan")]  # recomputed blocks must be equal bit for bit

EXPERTS = 16
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 128, "intermediate_size": 64},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 64},
    "deepseek_v3": {"hidden_size": 128, "moe_intermediate_size": 64},  # shared experts beside the routed ones
}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiles of 1": {"expert_tile": 1},
    "tiles of 5": {"expert_tile": 5},  # the last one is smaller
    "micro-batches": {"expert_tile": 4, "device_micro_batch_size": 1, "activation_checkpoints": "host"},
}


def _build(family: str) -> Any:
    return tiny_models.build(family, **SIZES[family] | {NAMES[family]: EXPERTS}).bfloat16().float()


def _batch() -> dict[str, torch.Tensor]:
    return tiny_models.batch(rows=4, length=32, padding="none")


@pytest.mark.parametrize(("settings", "family"), covering(SETTINGS, SIZES))
def test_tiles_in_fp32_equal_plain_autograd(accelerator: Accelerator, family: str, settings: str) -> None:
    model, batch = _build(family), _batch()
    loss, reference = plain_step(model, batch, accelerator, torch.float32)
    got, grads = streamed_step(model, batch, accelerator, precision="float32", **SETTINGS[settings])
    equal = sum(torch.equal(grads[name], grad) for name, grad in reference.items())
    print(f"{family}, {settings}: error {error_of(grads, reference):.1e}, {equal} of {len(reference)} bit-equal")
    torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)
    assert error_of(grads, reference) < 2e-5


@pytest.mark.parametrize("family", thinned(SIZES, every=2))
def test_tiles_in_bf16_are_as_exact_as_whole_blocks(accelerator: Accelerator, family: str) -> None:
    model, batch = _build(family), _batch()
    _, reference = plain_step(model, batch, accelerator, torch.float32)
    whole, tiled = (
        streamed_step(model.bfloat16(), batch, accelerator, precision="bf16", compute_dtype=torch.bfloat16, **options)[
            1
        ]
        for options in ({}, {"expert_tile": 5})
    )
    errors = error_of(tiled, reference), error_of(whole, reference)
    print(f"{family}: error {errors[0]:.2e}, in whole blocks {errors[1]:.2e}")
    assert errors[0] < 1.3 * errors[1] < 0.4  # in gpt_oss, rounding changes the choice of some experts


@pytest.mark.parametrize("settings", thinned(SETTINGS, every=2))
def test_training_in_tiles_equals_whole_blocks(accelerator: Accelerator, settings: str) -> None:
    """Three clipped steps: the gradients of tiles land, and their weights are updated and streamed again."""
    moved = []
    for options in (SETTINGS[settings], {}):
        model = horizon_lm.stream(_build("qwen3_moe"), accelerator.open(), "float32", compile=False, **options)
        optimizer = horizon_lm.AdamW(model, lr=1e-3, eps=1e-4, max_grad_norm=1.0)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for seed in range(3):
            model(**tiny_models.batch(rows=4, length=32, padding="none", seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        horizon_lm.synchronize(model)
        moved.append({name: param.detach() - before[name] for name, param in model.named_parameters()})
    assert error_of(*moved) < 1e-3


def test_the_device_holds_a_few_experts_at_a_time(accelerator: Accelerator) -> None:
    """Its memory does not grow with the experts, of which a tile is there."""
    slots = []
    for experts in (8, 32):
        model = horizon_lm.stream(
            tiny_models.build("qwen3_moe", **SIZES["qwen3_moe"], num_experts=experts), accelerator.open(), "bf16", expert_tile=2, compile=False
        )  # fmt: skip
        model(**_batch()).loss.backward()
        horizon_lm.synchronize(model)
        found = horizon_lm.stats(model)["device_bytes_by_kind"]
        slots.append({name: num for name, num in found.items() if "tile" in name or "expert" in name})
    print(slots)
    assert slots[0]
    assert sum(slots[1].values()) < 1.5 * sum(slots[0].values())


@torch.no_grad()
@pytest.mark.parametrize("family", thinned(SIZES, every=2))
def test_few_tokens_stream_their_own_experts(accelerator: Accelerator, family: str) -> None:
    model, prompt = _build(family).eval(), torch.tensor([[5, 9]])
    expected = model.to(accelerator.torch_device)(prompt.to(accelerator.torch_device)).logits.cpu()
    streamed = horizon_lm.stream(model.cpu(), accelerator.open(), "float32", compile=False).eval()
    got = streamed(prompt).logits.cpu()
    moved = horizon_lm.stats(streamed)["moved_bytes"]
    assert sum(num for key, num in moved.items() if key.startswith(f"{Kind.STREAM_IN}:") and ".tile" in key)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    covering([("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("deepseek_v3", "int4")], [{}, {"expert_tile": 2}]),
)
def test_adapters_on_quantized_experts(
    accelerator: Accelerator, tmp_path: Path, kind: tuple[str, str], options: dict[str, Any]
) -> None:
    """Decoded on the device under test, and on the CPU: loss and gradients of the adapters."""
    pytest.importorskip("peft")
    from tests.support.quantized_folders import adapter_folder, save_published

    modules = ["q_a_proj" if kind[0] == "deepseek_v3" else "q_proj"]
    folder = adapter_folder(save_published(*kind, tmp_path / "base"), tmp_path, target_modules=modules)
    found = []
    for device in (accelerator.open(), "cpu"):
        model = horizon_lm.from_pretrained(
            folder, device, precision="float32", compute_dtype=torch.float32, attn_implementation="eager", compile=False, **options
        ).train()  # fmt: skip
        loss = model(**_batch()).loss
        loss.backward()
        grads = {name: param.grad.float().clone() for name, param in model.named_parameters() if param.grad is not None}
        found.append((loss.detach().float().cpu(), grads))
    (got, grads), (expected, reference) = found
    assert grads.keys() == reference.keys() != set()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert error_of(grads, reference) < 1e-4
