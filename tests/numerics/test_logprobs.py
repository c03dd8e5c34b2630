"""Log-probabilities and gradients of a chunked head equal those of whole logits, also at a vocabulary of 152k."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import horizon_lm
from horizon_lm.errors import StreamingError
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.head_probe import head_peak
from tests.support import models_with_images, tiny_models
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned

CHUNKED = {"head": "chunked", "head_chunk_tokens": 5}


def of_logits(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """Return log-probabilities by definition, from all logits of a forward pass."""
    logs = torch.log_softmax(logits.float() / temperature, -1)
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    counts = target != -100
    own = logs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return [own * counts, logs.mean(-1) * counts, -(logs.exp() * logs).sum(-1) * counts]


def some_loss(values: Any) -> torch.Tensor:
    weights = torch.linspace(-1, 1, values[0].numel()).view_as(values[0])
    return (values[0] * weights + 0.3 * values[1] * weights.flip(1) + 0.2 * values[2]).sum()


def assert_same_gradients(streamed: Any, plain: Any, tolerance: float) -> None:
    for (name, p), q in zip(streamed.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, rtol=tolerance, atol=tolerance * q.grad.abs().max().item(), msg=name
            )


@pytest.mark.parametrize(
    ("temperature", "settings", "family"),
    thinned(
        product(
            (1.0, 0.7),
            (CHUNKED, CHUNKED | {"device_micro_batch_size": 1}, {"head": "whole"}),
            ("llama", "gemma2", "granite", "gpt2", "cohere2", "mixtral"),
        ),
        every=5,
    ),
)
def test_values_and_gradients(family: str, settings: dict[str, Any], temperature: float) -> None:
    plain = tiny_models.build(family).eval()
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", **settings)
    ids = tiny_models.batch()["input_ids"]
    labels = ids.clone()
    labels[0, :3] = -100
    got = horizon_lm.token_logprobs(
        streamed, input_ids=ids, labels=labels, temperature=temperature, statistics=["entropy", "mean"]
    )
    expected = of_logits(plain(input_ids=ids, use_cache=False).logits, labels, temperature)
    for value, other in zip(got[:3], expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    some_loss(got).backward()
    some_loss(expected).backward()
    assert_same_gradients(streamed, plain, 2e-5)


@pytest.mark.parametrize("head", [CHUNKED, {"head": "whole"}], ids=["chunked", "whole"])
@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("gemma2", 0.7), ("granite", 0.7)])
def test_statistics_without_gradients(family: str, temperature: float, head: dict[str, Any]) -> None:
    """Those that DPO and GRPO of TRL log: they equal those of all logits, and leave the gradients as they are."""
    plain = tiny_models.build(family).eval()
    ids = tiny_models.batch()["input_ids"]
    labels = ids.clone()
    labels[0, :3] = -100
    scaled = plain(input_ids=ids, use_cache=False).logits.double().detach() / temperature
    counts = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    expected = {
        "mean_logits": scaled.mean(-1) * counts,
        "log_sum_sq_probs": torch.softmax(scaled, -1).square().sum(-1).log() * counts,
    }
    assert (expected["log_sum_sq_probs"][counts] < -1).all()  # the probabilities are no ones
    grads = []
    for names in ((), tuple(expected)):
        streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", **head)
        got = horizon_lm.token_logprobs(
            streamed, input_ids=ids, labels=labels, temperature=temperature, statistics=names
        )
        for name in names:
            assert not getattr(got, name).requires_grad
            torch.testing.assert_close(getattr(got, name).double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
        got.logprobs.sum().backward()
        grads.append([param.grad for param in streamed.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_two_forward_passes_before_one_backward_pass() -> None:
    """Two forward passes precede the backward pass, as in preference losses; neither owns the buffer of the head."""
    plain = tiny_models.build("llama").eval()
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", **CHUNKED)
    batches = [tiny_models.batch(seed=seed)["input_ids"] for seed in (1, 2)]
    chosen, rejected = (horizon_lm.token_logprobs(streamed, input_ids=b, labels=b).logprobs.sum() for b in batches)
    torch.nn.functional.softplus(rejected - chosen).backward()
    own = [of_logits(plain(input_ids=b, use_cache=False).logits, b, 1.0)[0].sum() for b in batches]
    torch.nn.functional.softplus(own[1] - own[0]).backward()
    assert_same_gradients(streamed, plain, 2e-5)


def test_shifted_labels_no_labels_and_no_trained_token() -> None:
    streamed = horizon_lm.stream(tiny_models.build("llama"), precision="float32", **CHUNKED)
    ids = tiny_models.batch()["input_ids"]
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    a = horizon_lm.token_logprobs(streamed, input_ids=ids, labels=ids)
    b = horizon_lm.token_logprobs(streamed, input_ids=ids, shift_labels=shifted)
    assert torch.equal(a.logprobs, b.logprobs)
    assert a.mean is None
    assert a.entropy is None
    with torch.no_grad():
        assert not horizon_lm.token_logprobs(streamed, input_ids=ids, labels=ids).logprobs.requires_grad
    nothing = horizon_lm.token_logprobs(streamed, input_ids=ids, labels=torch.full_like(ids, -100))
    nothing.logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in streamed.parameters())
    with pytest.raises(ValueError, match="labels"):
        horizon_lm.token_logprobs(streamed, input_ids=ids)
    with pytest.raises(StreamingError, match="streamed model"):
        horizon_lm.token_logprobs(tiny_models.build("llama"), input_ids=ids, labels=ids)


@pytest.mark.parametrize("objective", thinned(["logprobs", "loss"]))
def test_vocabulary_of_152k(objective: str) -> None:
    """Values equal those of Hugging Face within 1e-6; logits take the planned memory for any number of tokens."""
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    chunk = 64
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", head="chunked", head_chunk_tokens=chunk)
    peaks = {}
    for tokens in (192, 384):
        ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        streamed.zero_grad()
        streamed(input_ids=ids, labels=ids).loss.backward()  # allocates the buffers
        streamed.zero_grad()
        with StorageMeter() as storages:
            if objective == "loss":
                value = streamed(input_ids=ids, labels=ids).loss
            else:
                value = -horizon_lm.token_logprobs(streamed, input_ids=ids, labels=ids).logprobs.sum() / (tokens - 1)
            value.backward()
        peaks[tokens] = storages.peak
    expected = plain(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    assert_same_gradients(streamed, plain, 1e-5)
    stated = head_peak(find_parts(plain), plain.model, torch.float32, chunked=True).at(chunk)
    print(f"{objective}: {peaks[384] / 2**20:.0f} MiB beside the buffers, stated {stated / 2**20:.0f} MiB for logits")
    assert 0.5 * stated < peaks[384] < 1.05 * stated
    assert peaks[384] < peaks[192] + 2**20


@pytest.mark.parametrize("family", tiny_models.MOE_WITH_AUXILIARY_LOSS)
@pytest.mark.parametrize("head", ["chunked", "whole"])
def test_auxiliary_loss_of_experts_is_returned(family: str, head: str) -> None:
    """A loss from log-probabilities and the auxiliary loss equals the model's own loss, and so do its gradients."""
    inputs = tiny_models.batch()
    plain = tiny_models.build(family)
    expected = plain(**inputs).loss
    expected.backward()
    streamed = horizon_lm.stream(tiny_models.build(family), precision="float32", head=head)
    output = horizon_lm.token_logprobs(streamed, **inputs)
    assert output.aux_loss is not None
    loss = -output.logprobs.sum() / (inputs["labels"][:, 1:] != -100).sum() + output.aux_loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, param in streamed.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_auxiliary_loss_of_a_model_of_images_has_the_weight_of_its_text_config(kind: str) -> None:
    inputs = models_with_images.text_batch() | {"output_router_logits": True}
    plain = models_with_images.tiny(kind)
    plain.config.text_config.router_aux_loss_coef = 0.5
    streamed = models_with_images.streamed(plain)
    expected = plain(**inputs)
    output = horizon_lm.token_logprobs(streamed, **inputs)
    assert output.aux_loss > 0
    torch.testing.assert_close(output.aux_loss, 0.5 * expected.aux_loss)
    loss = -output.logprobs.sum() / (inputs["labels"][:, 1:] != -100).sum() + output.aux_loss
    torch.testing.assert_close(loss, expected.loss)
