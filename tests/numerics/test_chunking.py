"""Feed-forward layers and losses in chunks of tokens: the same numbers with less memory."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, MambaConfig

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.compiling import chunk_mlps
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.planning.measure.block_probe import run_on_meta
from tests.support import tiny_models
from tests.support.gradients import assert_close_gradients, without_dropout
from tests.support.thinned_cases import thinned


@pytest.mark.parametrize(
    ("settings", "family"),
    thinned(
        itertools.product(
            [
                {},
                {"device_micro_batch_size": 1},
                {"resident_blocks": 3, "resident_graphs": 3},
                {"activation_checkpoints": "host"},
            ],
            ("llama", "gemma2", "phi3", "gpt_neox"),
        )
    ),
)
def test_the_same_numbers(family: str, settings: dict[str, Any]) -> None:
    plain = tiny_models.build(family)
    settings = {"precision": "float32", "check_recompute": True} | settings
    whole = horizon_lm.stream(copy.deepcopy(plain), **settings)
    chunked = horizon_lm.stream(plain, mlp_chunk_tokens=5, **settings)
    batch = tiny_models.batch()
    assert batch["input_ids"].shape[1] % 5  # the last chunk is shorter
    losses = [m(**batch).loss for m in (whole, chunked)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    sum(losses).backward()
    for (name, p), q in zip(whole.named_parameters(), chunked.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_single_row_with_adapters_is_recomputed_exactly(family: str) -> None:
    """Chunks of a single row seem contiguous, but matmul goes by their strides where a weight needs no gradient."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_models.build(family), config)
    model = horizon_lm.stream(adapted, precision="float32", mlp_chunk_tokens=5, check_recompute=True)
    model(**tiny_models.batch(rows=1, length=16)).loss.backward()  # an output that differs in a bit raises


def test_chunks_reduce_peak_memory() -> None:
    block = meta_copy(tiny_models.build("llama", hidden_size=64, intermediate_size=512).model.layers[0])
    chunked = meta_copy(block)
    assert chunk_mlps(chunked, 16) == 1
    hidden = torch.empty(1, 512, 64, dtype=torch.bfloat16)
    rope = torch.empty(1, 512, 16, dtype=torch.bfloat16)
    args, kwargs = (hidden,), {"position_embeddings": (rope, rope), "attention_mask": None}
    before, after = (run_on_meta(b, args, kwargs, torch.bfloat16).footprint for b in (block, chunked))
    wide = 512 * 512 * 2  # one activation of the feed-forward layer
    assert before.graph - after.graph > 2.5 * wide
    assert before.peak - after.peak > 2.5 * wide


def test_models_without_a_feed_forward_layer_are_rejected() -> None:
    with pytest.raises(ModelNotSupportedError, match="mlp_chunk_tokens"):
        horizon_lm.stream(tiny_models.build("mixtral"), mlp_chunk_tokens=8)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_loss_of_a_model_that_reads_the_dtype_of_its_head_is_chunked(precision: str) -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=90, hidden_size=16, state_size=4, num_hidden_layers=2), dtype=torch.float32
    )
    assert horizon_lm.stream(model, precision=precision)._horizon.engine.options.head == "chunked"


class WithoutGradient(torch.autograd.Function):
    """The identity, with None as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("head", ["whole", "chunked"])
@pytest.mark.parametrize(
    ("family", "settings"),
    # A head of its own, a tied one, and experts in tiles.
    [("llama", {}), ("gpt2", {}), ("qwen3_moe", {"expert_tile": 2})],
)
def test_other_code_may_return_no_gradient(family: str, settings: dict[str, Any], head: str) -> None:
    plain, batch = without_dropout(tiny_models.build(family)), tiny_models.batch()
    model = horizon_lm.stream(plain, precision="float32", head=head, **settings)
    model(**batch).loss.backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    for values in (model(**batch).loss, horizon_lm.token_logprobs(model, **batch).logprobs.sum()):
        WithoutGradient.apply(values).backward()
        assert all(param.grad is None for param in model.parameters())
    model(**batch).loss.backward()
    assert all(torch.equal(param.grad, expected[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_without_a_gradient_are_not_decayed_in_the_backward_pass(family: str) -> None:
    model, batch = horizon_lm.stream(tiny_models.build(family), precision="float32"), tiny_models.batch()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = horizon_lm.AdamW(model, lr=1e-2, weight_decay=0.1, update_in_backward=True)
    WithoutGradient.apply(model(**batch).loss).backward()
    optimizer.step()
    assert all(torch.equal(param.detach(), before[name]) for name, param in model.named_parameters())
    model(**batch).loss.backward()
    optimizer.step()
    assert not any(torch.equal(param.detach(), before[name]) for name, param in model.named_parameters())


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None, weights: torch.Tensor | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the mean loss of the targets, each multiplied by the weight of its row; ``weights`` has shape (B, 1)."""
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # (B, T)
    total = losses.sum() if weights is None else (losses * weights).sum()
    return total / (num_items_in_batch or (targets != -100).sum())


def test_an_argument_of_the_loss_function_is_for_whole_rows() -> None:
    plain, batch = tiny_models.build("llama"), tiny_models.batch()
    plain.loss_function = weighted_loss
    model = horizon_lm.stream(copy.deepcopy(plain), precision="float32")
    assert model._horizon.engine.options.head == "chunked"
    for arguments in ({}, {"weights": torch.tensor([[1.0], [0.0], [3.0]])}):
        plain.zero_grad()
        model.zero_grad()
        expected, got = plain(**batch, **arguments, use_cache=False).loss, model(**batch, **arguments).loss
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        expected.backward()
        got.backward()
        assert_close_gradients(model, plain)
