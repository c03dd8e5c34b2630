"""Generation with a key-value cache on the device under test: the tokens of plain Hugging Face, greedy and sampled."""

from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.schedule.ops import Kind
from tests.gpu.accelerator import Accelerator
from tests.support import tiny_models
from tests.support.thinned_cases import covering

pytestmark = pytest.mark.gpu

# Windows, routed experts, sinks, latent keys and values.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3_text": {}, "qwen3_moe": {"num_experts": 16}, "gpt_oss": {"num_local_experts": 16}, "deepseek_v3": {},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {}, "resident blocks": {"resident_blocks": 2}, "tiles": {"expert_tile": 2},
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}, "no cache": {"use_cache": False},
}  # fmt: skip


def _build(family: str) -> Any:
    # With a cache, older versions of transformers cannot compute the auxiliary loss, which generation does not need.
    without = {"output_router_logits": False} if family in tiny_models.MOE_WITH_AUXILIARY_LOSS else {}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    return tiny_models.build(family, **sizes | FAMILIES[family], **without).eval()


def _generate(model: Any, device: torch.device, **call: Any) -> torch.Tensor:
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    made: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, **call
    )  # fmt: skip
    return made.cpu()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "call"), covering(FAMILIES, CALLS))
def test_tokens_are_those_of_plain_transformers(accelerator: Accelerator, family: str, call: str) -> None:
    model = _build(family)
    expected = _generate(model.to(accelerator.torch_device), accelerator.torch_device, **CALLS[call])
    streamed = horizon_lm.stream(model.cpu(), accelerator.open(), "float32", compile=False).eval()
    assert torch.equal(_generate(streamed, torch.device("cpu"), **CALLS[call]), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("settings", "family"), covering(SETTINGS, ["qwen3_moe", "gpt_oss"]))
def test_only_the_experts_of_a_token_are_streamed(accelerator: Accelerator, family: str, settings: str) -> None:
    model = _build(family)
    expected = _generate(model.to(accelerator.torch_device), accelerator.torch_device)
    streamed = horizon_lm.stream(model.cpu(), accelerator.open(), "float32", compile=False, **SETTINGS[settings]).eval()
    assert torch.equal(_generate(streamed, torch.device("cpu")), expected)
    moved = horizon_lm.stats(streamed)["moved_bytes"]
    print(f"{family}, {settings}: {dict(moved)}")
    if settings == "default":
        assert sum(num for key, num in moved.items() if key.startswith(f"{Kind.STREAM_IN}:") and ".tile" in key)


def test_training_goes_on_after_generating(accelerator: Accelerator) -> None:
    """A model that generates between its steps trains as one that does not."""
    losses = []
    for generates in (False, True):
        model = horizon_lm.stream(_build("qwen3_moe").train(), accelerator.open(), "float32", compile=False)
        optimizer = horizon_lm.AdamW(model, lr=1e-3, max_grad_norm=1.0)
        losses.append([])
        for seed in range(3):
            loss = model(**tiny_models.batch(rows=2, length=16, padding="none", seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach().cpu())
            if generates:
                _generate(model.eval(), torch.device("cpu"))
                model.train()
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=1e-5, atol=0)
