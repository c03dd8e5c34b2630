"""Compare gradients with plain Hugging Face autograd on the same device, in fp32 and in bf16."""

import copy
from typing import Any

import pytest
import torch

import horizon_lm
from tests.gpu.accelerator import Accelerator
from tests.gpu.comparison import error_of, plain_step, streamed_step
from tests.support import tiny_models

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_plan")]  # recomputed blocks must be equal bit for bit

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32},  # eager attention, soft caps
    "mixtral": {},
    "gpt2": {"n_embd": 128, "n_inner": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole head": {"head": "whole"},
    "micro-batches": {"device_micro_batch_size": 2, "activation_checkpoints": "host"},
    "resident blocks": {"resident_blocks": 2, "resident_graphs": 1},
    "compiled": {"compile": True},
}


def _build(family: str) -> Any:
    return tiny_models.build(family, **SIZES | FAMILIES[family])


def _batch(padding: str = "none") -> dict[str, torch.Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding == "right":
        mask[0, 40:], mask[2, 17:] = 0, 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return batch | ({"attention_mask": mask} if padding != "none" else {})


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_plain_autograd(accelerator: Accelerator, family: str, settings: str) -> None:
    model, batch = _build(family), _batch()
    loss, reference = plain_step(model, batch, accelerator, torch.float32)
    got, grads = streamed_step(model, batch, accelerator, precision="float32", **SETTINGS[settings])
    equal = sum(torch.equal(grads[name], g) for name, g in reference.items())
    print(
        f"{family}, {settings}: error {error_of(grads, reference):.1e}, {equal} of {len(reference)} gradients bit-equal"
    )
    torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)
    assert error_of(grads, reference) < 2e-5


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_plain_autograd(accelerator: Accelerator, family: str, settings: str) -> None:
    """Rounding errors relative to fp32 are about as large as those of plain Hugging Face in bf16."""
    model, batch = _build(family).bfloat16().float(), _batch()  # weights that are exact in bf16
    exact, reference = plain_step(model, batch, accelerator, torch.float32)
    theirs, their_grads = plain_step(model, batch, accelerator, torch.bfloat16)
    ours, our_grads = streamed_step(
        model.bfloat16(), batch, accelerator, precision="bf16", compute_dtype=torch.bfloat16, **SETTINGS[settings]
    )
    errors = error_of(our_grads, reference), error_of(their_grads, reference)
    print(f"{family}, {settings}: error {errors[0]:.2e}, plain {errors[1]:.2e}")
    assert errors[0] < 1.3 * errors[1]
    assert abs(ours - exact) < 2 * abs(theirs - exact) + 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_padded_rows_without_a_mask_equal_plain_autograd(accelerator: Accelerator, dtype: torch.dtype) -> None:
    model, batch = _build("llama").to(dtype).float(), _batch("right")
    loss, reference = plain_step(model, batch, accelerator, torch.float32)
    got, grads = streamed_step(
        model, batch, accelerator, precision="float32", compute_dtype=dtype, attn_implementation="varlen"
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, loss, rtol=tolerance, atol=0)
    assert error_of(grads, reference) < 2 * tolerance


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_experts_without_tokens_have_no_gradient(accelerator: Accelerator, compiles: bool) -> None:
    """Two tokens reach at most four of eight experts. A grouped product may leave the others' gradients unwritten."""
    model = tiny_models.build("qwen3_moe", num_experts=8, hidden_size=128, moe_intermediate_size=64).bfloat16().float()
    batch = tiny_models.batch(rows=1, length=2, padding="none")
    _, reference = plain_step(model, batch, accelerator, torch.float32)
    stale = torch.full((2**24,), torch.nan, device=accelerator.torch_device)
    del stale  # the allocator hands out its memory again
    _, grads = streamed_step(
        model.bfloat16(), batch, accelerator, precision="bf16", compute_dtype=torch.bfloat16, compile=compiles
    )
    assert all(grad.isfinite().all() for grad in grads.values())
    assert error_of(grads, reference) < 5e-2
    experts = [grad for name, grad in grads.items() if "experts" in name]
    assert experts
    assert all(sum(bool((grad[expert] == 0).all()) for expert in range(8)) >= 4 for grad in experts)


def test_training_equals_torch(accelerator: Accelerator) -> None:
    """Ten clipped steps equal those of Hugging Face with torch's AdamW on the same device."""
    model = _build("llama")
    plain = copy.deepcopy(model).to(accelerator.torch_device)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    streamed = horizon_lm.stream(model, accelerator.open(), "float32", compile=False)
    ours = horizon_lm.AdamW(streamed, lr=1e-3, weight_decay=0.0, max_grad_norm=1.0)
    before = {name: p.detach().cpu().clone() for name, p in plain.named_parameters()}
    for seed in range(10):
        ids = torch.randint(3, SIZES["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(seed))
        device_ids = ids.to(accelerator.torch_device)
        plain(input_ids=device_ids, labels=device_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        streamed(input_ids=ids, labels=ids).loss.backward()
        ours.step()
        ours.zero_grad()
    horizon_lm.synchronize(streamed)
    final = {name: p.detach().cpu() for name, p in plain.named_parameters()}
    moved = {name: final[name] - p for name, p in before.items()}
    got = {name: p.detach() - before[name] for name, p in streamed.named_parameters()}
    assert error_of(got, moved) < 1e-3
