"""Ordinary uses of a streamed model work as on a plain model, or are rejected by name."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.errors import ConfigError, IgnoredCastWarning, ModelNotSupportedError, StreamingError
from tests.support import tiny_models


def streamed(**options: Any) -> Any:
    return horizon_lm.stream(tiny_models.build("llama"), precision="float32", **options)


def test_gradient_checkpointing_has_no_effect() -> None:
    """It does not warn either: trainers of TRL enable it by default, and what it asks for is done."""
    model = streamed()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**tiny_models.batch()).loss.backward()
    assert horizon_lm.stats(model)["block_forward_rows"] == 2 * 3 * 3


@pytest.mark.parametrize("method", ["half", "bfloat16", "double", "cuda", "resize_token_embeddings"])
def test_moving_and_casting_are_rejected(method: str) -> None:
    with pytest.raises(StreamingError, match=method):
        getattr(streamed(), method)()


@pytest.mark.filterwarnings("ignore::horizon_lm.errors.SlowProductsWarning")
def test_only_an_exact_cast_of_a_weight_to_float32_is_ignored() -> None:
    """PEFT casts all weights to float32 before it trains on a quantized base."""
    model = horizon_lm.stream(tiny_models.build("llama"), precision="bf16", compute_dtype=torch.bfloat16)
    param = model.model.norm.weight
    before = param.detach().clone()
    with pytest.warns(IgnoredCastWarning, match=r"stay in torch.bfloat16.*stream with compute_dtype=torch.float32"):
        param.data = param.data.to(torch.float32)
    rejected: list[Callable[[], torch.Tensor]] = [
        lambda: param.data.half(), lambda: param.data.float() * (1 + 2**-20), lambda: param.data.float()[:8],
        lambda: param.data.float().to("meta"), lambda: param.data.double(),
    ]  # fmt: skip
    for other in rejected:
        with pytest.raises(
            StreamingError,
            match=r"\.data cannot be replaced|cannot be cast from torch.bfloat16 to torch.float(16|32|64)",
        ):
            param.data = other()
    assert torch.equal(param, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = horizon_lm.stream(tiny_models.build("llama"), precision="bf16", compute_dtype=torch.float32)
        exact.model.norm.weight.data = exact.model.norm.weight.data.float()


def test_hooks_from_before_streaming_are_called_once() -> None:
    model = tiny_models.build("llama")
    weights, seen = list(model.parameters()), []
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm()))) for p in weights]
    horizon_lm.stream(model, precision="float32")(**tiny_models.batch()).loss.backward()
    assert sorted(seen) == sorted(float(p.grad.norm()) for p in weights)
    for handle in handles:
        handle.remove()
    model(**tiny_models.batch()).loss.backward()
    assert len(seen) == len(weights)


def test_a_model_without_values_is_rejected() -> None:
    model = tiny_models.build("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(StreamingError, match=r"gate_proj\.weight has no values"):
        horizon_lm.stream(model, precision="float32")
    assert type(model.lm_head.weight) is nn.Parameter


def test_to_is_rejected_unless_it_changes_nothing() -> None:
    model = streamed()
    for unchanged in (model.to("cpu"), model.to(torch.float32), model.float(), model.cpu()):
        assert unchanged is model
    for target in (torch.float16, "meta"):
        with pytest.raises(StreamingError, match="cannot be moved or cast"):
            model.to(target)


def test_multiplying_by_the_heads_weight_is_rejected() -> None:
    model = streamed()
    hidden = torch.randn(2, 32)
    for product in (
        lambda w: nn.functional.linear(hidden, w),
        lambda w: torch.matmul(w, hidden.t()),
        lambda w: w @ hidden.t(),
    ):
        with pytest.raises(StreamingError, match="head='whole'"):
            product(model.lm_head.weight)
    assert model.lm_head.weight.detach().sum().isfinite()
    assert model.model.layers[0].mlp.up_proj.weight @ hidden.t() is not None


def test_generation_uses_the_cache_and_equals_hugging_face() -> None:
    reference = tiny_models.build("llama").eval()
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32").eval()
    ids = tiny_models.batch(rows=2)["input_ids"]
    expected = reference.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_without_labels_both_heads_return_logits() -> None:
    inputs = {k: v for k, v in tiny_models.batch().items() if k != "labels"}
    expected = tiny_models.build("llama")(**inputs, use_cache=False).logits
    for head in ("whole", "chunked"):
        assert torch.equal(streamed(head=head)(**inputs).logits, expected)


def test_a_cache_in_training_is_rejected() -> None:
    with pytest.raises(StreamingError, match="use_cache"):
        streamed()(**tiny_models.batch(), use_cache=True)


def test_return_dict_false_returns_tuples() -> None:
    loss, *_ = streamed()(**tiny_models.batch(), return_dict=False)
    assert loss.ndim == 0


def test_num_items_in_batch_and_all_labels_masked() -> None:
    reference, model = tiny_models.build("llama"), streamed()
    inputs = tiny_models.batch()
    for num_items in (7, torch.tensor(7)):
        expected = reference(**inputs, num_items_in_batch=num_items).loss
        torch.testing.assert_close(model(**inputs, num_items_in_batch=num_items).loss, expected)
    nothing = inputs | {"labels": torch.full_like(inputs["labels"], -100)}
    assert model(**nothing).loss.isnan() == reference(**nothing).loss.isnan()
    loss = model(**nothing, num_items_in_batch=5).loss
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_zero_grad_in_any_form() -> None:
    model = streamed()
    model(**tiny_models.batch()).loss.backward()
    first = model.lm_head.weight.grad.clone()
    for forget in (
        model.zero_grad,
        lambda: [setattr(p, "grad", None) for p in model.parameters()],
        lambda: [p.grad.zero_() for p in model.parameters()],
        horizon_lm.AdamW(model).zero_grad,
    ):
        forget()
        model(**tiny_models.batch()).loss.backward()
        torch.testing.assert_close(model.lm_head.weight.grad, first)


def test_a_replaced_gradient_is_rejected() -> None:
    model = streamed()
    model(**tiny_models.batch()).loss.backward()
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(StreamingError, match="replaced"):
        model(**tiny_models.batch()).loss.backward()


def test_unfreezing_too_late_is_rejected() -> None:
    model = streamed()
    model.lm_head.weight.requires_grad_(False)
    model(**tiny_models.batch()).loss.backward()
    model.lm_head.weight.requires_grad_()
    with pytest.raises(StreamingError, match="frozen when training began"):
        model(**tiny_models.batch())


def test_calling_a_unit_outside_of_the_model_is_rejected() -> None:
    model, hidden = streamed(), torch.zeros(1, 2, 32)
    for part, call in (
        ("model.layers.1", lambda: model.model.layers[1](hidden)),
        ("the head", lambda: model.lm_head(hidden)),
    ):
        with pytest.raises(StreamingError, match=f"{part} of a streamed model cannot be called on its own"):
            call()
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(StreamingError, match="has no gradient when it is called outside of the model"):
        model.get_input_embeddings()(ids).sum().backward()
    with torch.no_grad():
        assert torch.equal(model.get_input_embeddings()(ids), model.get_input_embeddings().weight[ids])


def test_a_dropped_model_is_freed() -> None:
    model = streamed()
    model(**tiny_models.batch()).loss.backward()
    slab = weakref.ref(model._horizon.engine.store.units[block(0)].plain.weights.untyped_storage())
    engine = weakref.ref(model._horizon.engine)
    del model
    gc.collect()
    assert engine() is None
    assert slab() is None


def test_models_that_share_state_between_layers_are_rejected() -> None:
    config = AutoConfig.for_model(
        "gemma3n_text", hidden_size=32, intermediate_size=[48] * 4, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, vocab_size_per_layer_input=97, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, activation_sparsity_pattern=[0.0] * 4, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    with pytest.raises(ModelNotSupportedError, match=r"shares keys and values|exchange state"):
        horizon_lm.stream(AutoModelForCausalLM.from_config(config))


def test_blocks_that_write_buffers_are_rejected() -> None:
    model = tiny_models.build("llama")
    for layer in model.model.layers:
        layer.register_buffer("calls", torch.zeros(()))
    cls = type(model.model.layers[0])

    class Counting(cls):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().forward(*args, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Counting
    with pytest.raises(ModelNotSupportedError, match="writes the buffer 'calls'"):
        horizon_lm.stream(model)(**tiny_models.batch())


def test_a_rejected_model_is_left_unchanged() -> None:
    model = tiny_models.build("llama")
    model.model.embed_tokens.sparse = True
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ModelNotSupportedError, match="sparse gradients"):
        horizon_lm.stream(model, precision="bf16")
    assert all(torch.equal(before[n], p) and p.dtype == torch.float32 for n, p in model.named_parameters())


def test_quantized_weights_are_rejected() -> None:
    model = tiny_models.build("llama")
    model.lm_head.weight = nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelNotSupportedError, match="quantized"):
        horizon_lm.stream(model)


def test_a_copy_is_rejected() -> None:
    with pytest.raises(StreamingError, match="cannot be copied"):
        copy.deepcopy(streamed())


def test_a_fault_in_an_evaluation_keeps_the_gradients() -> None:
    model = streamed()
    optimizer = horizon_lm.AdamW(model)
    model(**tiny_models.batch()).loss.backward()
    with torch.no_grad(), pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]))
    optimizer.step()


def test_other_ties_and_other_models_are_rejected() -> None:
    model = tiny_models.build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelNotSupportedError, match="one parameter"):
        horizon_lm.stream(model)
    with pytest.raises(ModelNotSupportedError, match="Linear has neither the output embeddings"):
        horizon_lm.stream(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "fp32_master"),
        ({"head": "half"}, "'chunked' or 'whole'"),
        ({"activation_checkpoints": "disk"}, "'device', 'host', or a number"),
        ({"activation_checkpoints": True}, "'device', 'host', or a number"),
        ({"device_micro_batch_size": 0}, "at least 1"),
        ({"device": "tpu"}, "'cpu', 'cuda' or 'simulated'"),
    ],
)
def test_invalid_settings_name_the_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        horizon_lm.stream(tiny_models.build("llama"), **options)


def test_streaming_twice_is_rejected() -> None:
    model = streamed()
    with pytest.raises(StreamingError, match="already"):
        horizon_lm.stream(model)


def test_a_forward_that_writes_a_weight_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed()(**tiny_models.batch())  # what equal blocks of other code write is known, in these tests
    forward = LlamaMLP.forward

    def limited(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        self.down_proj.weight.data.clamp_(-0.01, 0.01)
        return forward(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", limited)
    with pytest.raises(ModelNotSupportedError, match=r"its forward writes the weight 'mlp\.down_proj\.weight'"):
        streamed()(**tiny_models.batch())


def test_a_second_lookup_in_a_forward_pass_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that looks up tokens of images, too. It goes on without them."""
    forward = LlamaModel.forward
    model = streamed()
    expected = model(**tiny_models.batch()).loss

    def twice(self: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
        return forward(self, inputs_embeds=self.embed_tokens(input_ids) + self.embed_tokens(input_ids), **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", twice)
        with pytest.raises(ModelNotSupportedError, match="looks tokens up twice in a forward pass"):
            model(**tiny_models.batch())
    assert torch.equal(model(**tiny_models.batch()).loss, expected)


def test_row_dimensions_are_found_not_guessed() -> None:
    """The batch size equals the sequence length and the number of heads, so shapes do not reveal the batch
    dimension.
    """
    reference = tiny_models.build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", device_micro_batch_size=1)
    inputs = tiny_models.batch(rows=4, length=4, padding="none")
    positions = torch.arange(4).repeat(4, 1)
    for extra in ({}, {"position_ids": positions}):
        for each in (reference, model):
            each.zero_grad()
            each(**inputs, **extra, use_cache=False).loss.backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_no_warnings_in_an_ordinary_step() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = streamed()
        optimizer = horizon_lm.AdamW(model)
        model(**tiny_models.batch()).loss.backward()
        optimizer.step()
    assert caught == []


def test_generate_with_a_static_cache_compiles_nothing() -> None:
    """transformers compiles the call of a model on a GPU that has such a cache; here on any device."""
    compiling = CompileConfig()
    compiling._compile_all_devices = True
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    ids = tiny_models.batch(rows=2, padding="none")["input_ids"]
    expected = tiny_models.build("llama").eval().generate(ids, **settings)
    model = horizon_lm.stream(tiny_models.build("llama"), "cpu", precision="float32").eval()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # those of earlier tests
    assert torch.equal(model.generate(ids, **settings, compile_config=compiling), expected)
    assert not torch._dynamo.utils.counters["frames"]


def test_an_optimizer_takes_the_model_not_its_parameters() -> None:
    with pytest.raises(ConfigError, match="AdamW needs the streamed model itself, not its parameters"):
        horizon_lm.AdamW(streamed().parameters(), lr=1e-3)
