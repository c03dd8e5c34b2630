"""Loss, logits and gradients equal plain Hugging Face autograd, bit for bit unless the order of summation differs."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.engine.passes.micro_batches import micro_batch_seeds
from tests.census import tiny_models as census
from tests.census.images import image_batch
from tests.support.gradients import assert_close_gradients, assert_equal_gradients, gradients, without_dropout
from tests.support.thinned_cases import thinned
from tests.support.tiny_models import FAMILIES, MOE_WITH_AUXILIARY_LOSS, batch, build

WHOLE = {"precision": "float32", "head": "whole", "check_recompute": True}


def plain_step(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Run a step of plain Hugging Face autograd, without a cache, whose copies change memory layouts."""
    torch.manual_seed(7)
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    return output


def streamed_step(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(7)
    output = model(**inputs)
    output.loss.backward()
    return output


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal(family: str, padding: str, device: str) -> None:
    reference = build(family)
    model = horizon_lm.stream(
        copy.deepcopy(reference), device, activation_checkpoints="host" if padding == "left" else "device", **WHOLE
    )
    inputs = batch(padding=padding)
    expected, got = plain_step(reference, inputs), streamed_step(model, inputs)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)
    assert_equal_gradients(model, reference)
    if family in MOE_WITH_AUXILIARY_LOSS:
        assert torch.equal(got.aux_loss, expected.aux_loss)
        assert got.aux_loss > 0


@pytest.mark.parametrize(  # three rows in three or two micro-batches
    ("family", "head", "micro_batch_size"), thinned(itertools.product(FAMILIES, ["whole", "chunked"], [1, 2]))
)
def test_micro_batches_and_chunks(family: str, head: str, micro_batch_size: int) -> None:
    reference = without_dropout(build(family))
    model = horizon_lm.stream(
        copy.deepcopy(reference),
        precision="float32",
        head=head,
        head_chunk_tokens=9,  # 26 trained tokens in three chunks
        device_micro_batch_size=micro_batch_size,
        check_recompute=True,
    )
    inputs = batch()
    expected, got = plain_step(reference, inputs), streamed_step(model, inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert_close_gradients(model, reference)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["whole", "chunked"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "falcon"])
def test_tied_and_untied(family: str, head: str, tied: bool) -> None:
    reference = without_dropout(build(family, tie_word_embeddings=tied))
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head=head, check_recompute=True)
    inputs = batch()
    expected, got = plain_step(reference, inputs), streamed_step(model, inputs)
    assert len(gradients(model)) == len(gradients(reference))
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=1e-6)
    if head == "whole":
        assert_equal_gradients(model, reference)
    else:
        assert_close_gradients(model, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_master_computes_like_float32_on_rounded_weights(family: str) -> None:
    rounded = without_dropout(build(family))
    for param in rounded.parameters():
        param.data = param.data.to(torch.bfloat16).float()
    model = horizon_lm.stream(copy.deepcopy(rounded), precision="fp32_master", head="whole", check_recompute=True)
    inputs = batch()
    expected, got = plain_step(rounded, inputs), streamed_step(model, inputs)
    assert torch.equal(got.logits, expected.logits)
    for name, theirs in gradients(rounded).items():
        if rounded.config.tie_word_embeddings and rounded.get_parameter(name) is rounded.get_input_embeddings().weight:
            # Two contributions, each rounded.
            assert (gradients(model)[name].float() - theirs).norm() < 0.01 * theirs.norm()
        else:
            grad = gradients(model)[name]  # float32 of a weight that this version of transformers keeps in float32
            assert grad.dtype == (torch.float32 if name in model._horizon.engine.parts.in_float32 else torch.bfloat16)
            assert torch.equal(grad, theirs.to(grad.dtype)), name


def test_dropout_follows_the_micro_batch() -> None:
    # No dropout on the embedding, because the model applies it to the whole batch.
    reference = build("gpt2", embd_pdrop=0.0, resid_pdrop=0.2, attn_pdrop=0.2)
    model = horizon_lm.stream(copy.deepcopy(reference), device_micro_batch_size=1, **WHOLE)
    inputs = batch()
    torch.manual_seed(3)
    seeds = micro_batch_seeds(3)
    num_items = (inputs["labels"][:, 1:] != -100).sum()
    total = torch.zeros(())
    for row, seed in enumerate(seeds):
        torch.manual_seed(seed)
        part = {k: v[row : row + 1] for k, v in inputs.items()}
        loss = reference(**part, use_cache=False, num_items_in_batch=num_items).loss
        loss.backward()
        total += loss.detach()
    torch.manual_seed(3)
    got = model(**inputs)
    got.loss.backward()
    torch.testing.assert_close(got.loss, total, rtol=1e-6, atol=1e-6)
    assert_close_gradients(model, reference)
    # Another draw gives another mask, so the test would find dropout that is not replayed or not random.
    assert not torch.equal(model(**inputs).loss, got.loss)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast(family: str, inside: bool) -> None:
    reference = build(family)
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE)
    inputs = batch()
    losses = []
    for each in (reference, model):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**inputs, use_cache=False).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        losses.append(loss)
    assert torch.equal(losses[0], losses[1])
    assert_equal_gradients(model, reference)


def test_the_recompute_tries_attention_kernels_in_the_order_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    attend = functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(_cur_sdpa_kernel_backends(with_priority=True))
        return attend(*args, **kwargs)

    model = horizon_lm.stream(build("llama"), **WHOLE)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        loss = model(**batch(), use_cache=False).loss
    loss.backward()
    assert len(seen) == 2 * model.config.num_hidden_layers  # forward pass and recompute
    assert all(order == [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION] for order in seen)
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_two_forward_passes_then_one_backward_pass(device: str, head: str) -> None:
    reference = build("llama")
    model = horizon_lm.stream(
        copy.deepcopy(reference), device, precision="float32", head=head, activation_checkpoints="host"
    )
    first, second = batch(seed=1), batch(rows=2, length=7, seed=2)
    for each in (reference, model):
        (each(**first, use_cache=False).loss + 2 * each(**second, use_cache=False).loss).backward()
    if head == "whole":
        assert_close_gradients(model, reference, 1e-6)
    else:
        assert_close_gradients(model, reference)


def test_accumulation_over_two_backward_passes() -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE)
    for seed in (1, 2):
        plain_step(reference, batch(seed=seed))
        streamed_step(model, batch(seed=seed))
    assert_equal_gradients(model, reference)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_evaluation_between_forward_and_backward(device: str) -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), device, **WHOLE)
    loss = model(**batch()).loss
    with torch.no_grad():
        evaluated = model(**batch(seed=5)).loss
        assert torch.equal(evaluated, reference(**batch(seed=5)).loss)
    model(**batch(seed=6))  # abandoned
    loss.backward()
    plain_step(reference, batch())
    assert_equal_gradients(model, reference)


@pytest.mark.parametrize(
    "trained",
    [
        r"model\.layers|model\.norm|lm_head",
        r"model\.(embed|norm|layers\.[12])|lm_head",
        r"model\.layers\.1",
        r"model\.norm",
        r"lm_head",
        r"model\.embed_tokens",
        r".*layernorm",
    ],
)
@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_frozen_parameters(trained: str, head: str) -> None:
    reference = build("llama")
    for name, param in reference.named_parameters():
        param.requires_grad_(re.match(trained, name) is not None)
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head=head, check_recompute=True)
    expected, got = plain_step(reference, batch()), streamed_step(model, batch())
    assert torch.equal(got.loss, expected.loss)
    assert_close_gradients(model, reference)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_hidden_states_and_embeddings_as_input() -> None:
    reference = build("qwen3")
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE)
    embeds = torch.randn(2, 6, 32, requires_grad=True)
    same = embeds.detach().clone().requires_grad_()
    expected = reference(inputs_embeds=embeds, labels=torch.ones(2, 6, dtype=torch.long), output_hidden_states=True)
    got = model(inputs_embeds=same, labels=torch.ones(2, 6, dtype=torch.long), output_hidden_states=True)
    assert all(torch.equal(a, b) for a, b in zip(got.hidden_states, expected.hidden_states, strict=True))
    expected.loss.backward()
    got.loss.backward()
    assert torch.equal(same.grad, embeds.grad)
    assert_equal_gradients(model, reference)


def test_a_model_that_has_run_before_is_streamed() -> None:
    """Its tower returns the outputs of its layers through hooks of transformers, which the first call installs."""
    reference = census.build("llava", "image_text")
    images = image_batch(reference)
    expected = reference(**images, use_cache=False)
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE, allow_unproven_model=True)
    got = model(**images, use_cache=False)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(
        reference(**images, use_cache=False).logits, expected.logits
    )  # the copy has taken no hook from it


def test_loss_on_a_middle_layer() -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE)
    for each in (reference, model):
        each(**batch(), output_hidden_states=True, use_cache=False).hidden_states[2].square().mean().backward()
    assert_equal_gradients(model, reference)


def test_a_corrupted_slab_changes_logits_and_gradients() -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), **WHOLE)
    slab = model._horizon.engine.store.units[block(1)].plain.weights
    slab.view(torch.int32)[100] ^= 1 << 20
    expected, got = plain_step(reference, batch()), streamed_step(model, batch())
    assert not torch.equal(got.logits, expected.logits)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_equal_gradients(model, reference)
