"""Attention with sinks through fused kernels: equal to eager attention in float64, in every type of transformers that has sinks."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import horizon_lm
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import attention, attention_with_sinks, sink_attention
from horizon_lm.model.attention import Segments
from horizon_lm.model.sink_attention import _attend, _differentiate
from tests.census.inputs import text_batch
from tests.census.tiny_models import build
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

EXACT = ("gpt_oss", "mimo_v2_flash", "deepseek_v4", "hy_v4")
IN_FLOAT32 = ("flint", "granite_swa", "granitemoe_swa")  # their eager attention has scores in float32
WITHOUT_VARLEN = ("deepseek_v4", "hy_v4")  # they change their masks
OTHERS = (
    "openai_privacy_filter",
    "hy_v4_vl",
)  # a token classifier, and a model of images whose decoder is that of hy_v4
WINDOW, HIDDEN = 3, torch.finfo(torch.float64).min
LENGTHS = [[5, 4], [2, 7]]
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "a window": {"window": WINDOW},
    "segments": {"rows": LENGTHS},
    "segments, a window": {"rows": LENGTHS, "window": WINDOW},
    "a scale of its own": {"scaling": 0.9},
    "keys of a cache": {"keys": 14},
    "keys of a cache, a window": {"keys": 14, "window": WINDOW},
    "left padding": {"mask": "boolean"},
    "left padding, an additive mask": {"mask": "additive"},
    "not causal": {"causal": False},
    "fewer heads": {"kv_heads": 1},
    "wider queries": {"width": 12},
    "wider values": {"width": 4},
}


def tensors(dtype: torch.dtype = torch.float64, keys: int = 9, kv_heads: int = 2, width: int = 8) -> list[torch.Tensor]:
    """Return queries of four heads, keys, values of head dimension 8, and sinks."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 9, width), (2, kv_heads, keys, width), (2, kv_heads, keys, 8), (4,)]
    return [torch.randn(size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def split(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `tensors` and those of attention."""
    options = dict(CASES[case])
    return {name: options.pop(name) for name in ("keys", "kv_heads", "width") if name in options}, options


def mask_of(kind: str | None) -> torch.Tensor | None:
    """Return a causal mask (2, 1, 9, 9) that hides four tokens of padding, so that some queries see nothing."""
    if kind is None:
        return None
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    mask[0, ..., :4] = False
    return mask if kind == "boolean" else torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~mask, HIDDEN)


def ours(inputs: list[torch.Tensor], rows: Any = None, mask: str | None = None, **options: Any) -> torch.Tensor:
    offsets = None if rows is None else Segments(rows, torch.device("cpu")).offsets(0, 2)
    return sink_attention.sink_attention(*inputs, mask=mask_of(mask), rows=offsets, **options)


def eager(
    inputs: list[torch.Tensor], rows: Any = None, mask: str | None = None, scaling: float | None = None,
    causal: bool = True, window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what ours should, with all scores in memory."""
    query, key, value, sinks = inputs
    key, value = (t.repeat_interleave(4 // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    length, keys = scores.shape[-2:]
    distance = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys)) if causal else torch.ones(length, keys, dtype=torch.bool)
    seen = seen.expand(scores.shape)
    if rows is not None:
        owners = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(each)) for each in rows])
        seen = seen & (owners[:, None, :, None] == owners[:, None, None])
    if mask is not None:
        seen = mask_of("boolean").expand(scores.shape)
    scores = torch.cat([scores.masked_fill(~seen, HIDDEN), sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2)


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    grad = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(output, inputs, grad.to(output.dtype)))


def worst(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative error of several tensors."""
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30)) for a, b in pairs)


def errors(case: str) -> tuple[float, float]:
    """Return the relative errors of output and gradients."""
    shapes, options = split(case)
    inputs = tensors(**shapes)
    got, expected = ours(inputs, **options), eager(inputs, **options)
    assert got.is_contiguous()
    return worst([got], [expected]), worst(gradients(got, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("case", CASES)
def test_equal_to_eager_attention(case: str) -> None:
    assert max(errors(case)) < 1e-13


def test_a_missing_gradient_of_the_sinks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_attention, "grad_of_sinks", lambda *args: torch.zeros_like(args[3]))
    assert errors("causal")[1] > 1e-2


def test_log_sum_exps_without_sinks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = sink_attention.add_sinks
    monkeypatch.setattr(sink_attention, "add_sinks", lambda *args: (scaled(*args)[0], args[1].clone()))
    assert errors("causal")[0] < 1e-13
    assert errors("causal")[1] > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_and_gradients_of_sinks_are_in_float32(dtype: torch.dtype) -> None:
    inputs = tensors(dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = gradients(eager(exact), exact)
    assert _attend(*inputs[:3], inputs[3].float(), None, None, None, 0.3, True, None, False)[1].dtype == torch.float32
    inputs[3] = inputs[3].detach().float().requires_grad_()
    again, got = (gradients(ours(inputs), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
    assert got[3].dtype == torch.float32
    assert worst([g.double() for g in got], expected) < 8 * torch.finfo(dtype).eps


# On a GPU: the calls of torch's kernels, by its schemas, with the arithmetic written out


def efficient(
    query: Any, key: Any, value: Any, bias: Any, sums: bool, dropout: float, causal: bool, *, scale: float
) -> Any:
    """Do what torch's memory-efficient kernel does, and demand what it demands."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(t.shape[-1] % 8 == 0 for t in (query, key, value))
    assert bias is None or (bias.stride(-2) % 8 == 0 and bias.shape == (*query.shape[:-1], key.shape[2]))
    scores = _scores(query, key, bias, causal, scale)
    found = scores.logsumexp(-1)
    assert sums
    assert dropout == 0.0
    padded = torch.nn.functional.pad(found, (0, -found.shape[-1] % 32), value=float("inf"))
    return scores.softmax(-1) @ value, padded, torch.zeros(()), torch.zeros(())


def efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any, dropout: float,
    wanted: list[bool], causal: bool, *, scale: float,
) -> Any:  # fmt: skip
    assert sums.shape[-1] % 32 == 0
    assert wanted == [True, True, True, False]
    weights = (_scores(query, key, bias, causal, scale) - sums[..., : query.shape[2], None]).exp()
    of_scores = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad, None


def _scores(query: Any, key: Any, bias: Any, causal: bool, scale: float) -> Any:
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), HIDDEN) if causal else scores


@pytest.mark.parametrize("case", CASES)
def test_calls_of_the_memory_efficient_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(torch.ops.aten, name, kernel)
    monkeypatch.setattr(sink_attention, "_is_on_cpu", lambda _: False)
    assert max(errors(case)) < 1e-13


def flash(query: Any, key: Any, value: Any, offsets: Any, ends: Any, scaling: float, window: int | None) -> Any:
    """Do what torch's flash kernel for segments does."""
    sums = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scaling
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        scores = scores.masked_fill((distance < 0) | (distance >= (window or q.shape[2])), HIDDEN)
        sums.append(scores.logsumexp(-1)[0])  # (heads, length)
        return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    rows, length = query.shape[0], query.shape[2]
    borders = [length * i for i in range(rows + 1)] if ends is None else ends.tolist()
    pieces = [attend(*each)[0].transpose(0, 1) for each in sink_attention.cut((query, key, value), borders)]
    return torch.cat(pieces).unflatten(0, (rows, length)), torch.cat(sums, -1)


def flash_backward(
    grad: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, offsets: Any, ends: Any, *options: Any
) -> Any:
    """Do what the kernel's backward pass does: with the log-sum-exps (heads, B·T) that it is given."""
    assert sums.is_contiguous()
    rows, length = query.shape[0], query.shape[2]
    borders = [length * i for i in range(rows + 1)] if ends is None else ends.tolist()
    tensors = (
        query,
        key,
        value,
        output.transpose(1, 2),
        grad.transpose(1, 2),
        sums.t().unflatten(0, (rows, length)).transpose(1, 2)[..., None],
    )
    grads = []
    for q, k, v, out, of_out, found in sink_attention.cut(tensors, borders):
        groups = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        bias = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(
            (distance < 0) | (distance >= (options[1] or q.shape[2])), HIDDEN
        )
        padded = torch.nn.functional.pad(found[..., 0], (0, -found.shape[2] % 32))
        of_query, *shared, _ = efficient_backward(
            of_out,
            q,
            keys,
            values,
            bias,
            out,
            padded,
            None,
            None,
            0.0,
            [True, True, True, False],
            False,
            scale=options[0],
        )
        grads.append(
            [t[0].transpose(0, 1) for t in (of_query, *(s.unflatten(1, (k.shape[1], groups)).sum(2) for s in shared))]
        )
    return tuple(torch.cat(parts).unflatten(0, (rows, length)) for parts in zip(*grads, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if not {"keys", "mask", "causal"} & CASES[case].keys()])
def test_calls_of_the_flash_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_attention.segment_attention, "has_kernel", lambda *_args, **_: True)
    monkeypatch.setattr(sink_attention, "flash_forward", flash)
    monkeypatch.setattr(sink_attention, "flash_backward", flash_backward)
    assert max(errors(case)) < 1e-13


@pytest.mark.parametrize("case", thinned(["segments, a window", "causal", "left padding", "wider queries"]))
def test_the_operation_passes_opcheck(case: str) -> None:
    """The operation returns shapes without data and no aliases, and its backward pass can be traced."""
    shapes, options = split(case)
    rows, window = options.get("rows"), options.get("window")
    offsets = (None, None) if rows is None else Segments(rows, torch.device("cpu")).offsets(0, 2)
    arguments = (*tensors(torch.float32, **shapes), mask_of(options.get("mask")), *offsets, 0.3, True, window, False)
    torch.library.opcheck(_attend, arguments)
    with torch.no_grad():
        output, total = _attend(*arguments)
    arguments = (output, *arguments[:3], output, total, *arguments[4:])
    torch.library.opcheck(_differentiate, arguments, test_utils=("test_schema", "test_faketensor"))


# Models


def test_every_type_of_transformers_with_sinks_is_tested() -> None:
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {path.parent.name for path in sources if "s_aux=" in path.read_text(encoding="utf-8")}
    assert found <= {*EXACT, *IN_FLOAT32, *OTHERS}


def model_of(kind: str, implementation: str = "eager") -> Any:
    """Return a tiny model, in float64 if its eager attention is, whose sinks are as large as scores."""
    attention.register()
    model = build(kind, "causal").to(torch.float64 if kind in EXACT else torch.float32)
    model.set_experts_implementation("eager")  # grouped products have no float64
    for module in model.modules():
        if isinstance(sinks := getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(sinks, generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation(implementation)
    return model


def trained(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the loss, and the gradients of all parameters that have one."""
    segments = attention.find_segments(batch["attention_mask"], None, torch.device("cpu"))
    with attention.attending(segments if used(model) == "varlen" else None, 0, len(batch["input_ids"])):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("kind", [*EXACT, *IN_FLOAT32])
def test_models_equal_eager_ones(kind: str, padding: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no such type")
    batch = text_batch(kind)
    if padding == "left":
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
        first = batch["attention_mask"].argmax(1)
        batch["labels"][torch.arange(len(first)), first] = -100  # it is predicted only from padding
    assert (batch["attention_mask"] == 0).any()
    expected = trained(model_of(kind), batch)
    for name in ("sinks", "varlen"):
        if name == "varlen" and kind in WITHOUT_VARLEN:
            assert not attention.can_varlen(model_of(kind))
            continue
        got = trained(model_of(kind, name), batch)
        assert worst(got, expected) < (1e-12 if kind in EXACT else 1e-5), name


def test_a_token_classifier_equals_an_eager_one() -> None:
    attention.register()
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids % 2}
    batch["attention_mask"][0, 9:] = 0
    config = transformers.AutoConfig.for_model(
        OTHERS[0], hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=3, vocab_size=97, pad_token_id=0,
    )  # fmt: skip
    losses = []
    for name in ("eager", "sinks"):
        torch.manual_seed(0)
        model = transformers.AutoModelForTokenClassification.from_config(config).double()
        model.set_experts_implementation("eager")
        model.set_attn_implementation(name)
        loss = model(**batch).loss
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert worst(losses[1], losses[0]) < 1e-5  # it multiplies by its rotary tables in float32


def streamed(plain: Any, **settings: Any) -> Any:
    return horizon_lm.stream(copy.deepcopy(plain), precision="float32", head="whole", **settings)


def used(model: Any) -> str:
    return model.config.get_text_config()._attn_implementation


def test_eager_attention_is_replaced_unless_it_is_wanted() -> None:
    plain = tiny_models.build("gpt_oss", attn_implementation="eager")
    assert used(streamed(plain)) == "sinks"
    assert used(streamed(plain, attn_implementation="varlen")) == "varlen"
    assert used(streamed(plain, attn_implementation="eager")) == "eager"
    # No other model is changed.
    assert used(streamed(tiny_models.build("gemma2"))) == "eager"
    assert used(streamed(tiny_models.build("llama"))) == "sdpa"


def test_streamed_models_have_the_bits_of_plain_ones() -> None:
    for name in ("eager", "sinks", "varlen"):
        plain = tiny_models.build("gpt_oss", attn_implementation=name)
        batch = tiny_models.batch(padding="none")
        got, expected = (trained(m, batch) for m in (streamed(plain, attn_implementation=name), plain))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name


@pytest.mark.parametrize("name", ["sinks", "varlen"])
def test_adapters_and_packed_rows(name: str) -> None:
    """LoRA on packed documents equals eager attention to each document alone."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    plain = tiny_models.build("gpt_oss", attn_implementation="eager", output_router_logits=False)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    plain = peft.get_peft_model(plain, config)
    model = streamed(plain, attn_implementation=name)
    ids = tiny_models.batch(rows=2, length=12, padding="none")["input_ids"]
    if name == "varlen":
        positions = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(2, -1)
        got = model(input_ids=ids, position_ids=positions).logits
        expected = torch.cat([plain(input_ids=part).logits for part in ids.split([7, 5], 1)], 1)
    else:
        got, expected = (m(input_ids=ids).logits for m in (model, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for logits in (got, expected):
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    trained_pairs = [(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if q.grad is not None]
    assert len(trained_pairs) == 4 * 4
    for ours, theirs in trained_pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_bf16_is_reproducible() -> None:
    batch = tiny_models.batch()
    plain = tiny_models.build("gpt_oss").bfloat16()
    first, second = (trained(horizon_lm.stream(copy.deepcopy(plain), precision="bf16"), batch) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_generation_with_and_without_padding() -> None:
    plain = tiny_models.build("gpt_oss", attn_implementation="eager", output_router_logits=False).eval()
    batch = {name: t for name, t in tiny_models.batch(rows=2, length=9, padding="left").items() if name != "labels"}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(streamed(plain).eval().generate(**batch, **options), plain.generate(**batch, **options))
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    varlen = streamed(plain, attn_implementation="varlen").eval()
    assert torch.equal(varlen.generate(**batch, **options), plain.generate(**batch, **options))


def test_dropout_keeps_eager_attention_and_is_rejected_otherwise() -> None:
    plain = tiny_models.build("gpt_oss", attn_implementation="eager", attention_dropout=0.1)
    assert used(streamed(plain)) == "eager"
    for name in ("sinks", "varlen"):
        model = streamed(plain, attn_implementation=name)
        with pytest.raises(ModelNotSupportedError, match=f"{name}.*attention_dropout"):
            model(**tiny_models.batch(), use_cache=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 20.0}, "softcap"),
        ({"s_aux": None}, "sinks that are not passed"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4, requires_grad=True)}, "a mask that is trained"),
    ],
)
def test_other_arguments_are_rejected(change: dict[str, Any], reason: str) -> None:
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.zeros(2))
    call: dict[str, Any] = {name: torch.ones(1, 2, 4, 8) for name in ("query", "key", "value")}
    call |= {"attention_mask": None, "s_aux": module.sinks}
    attention_with_sinks.attention_with_sinks(module, **call)
    with pytest.raises(ModelNotSupportedError, match=re.escape(reason)):
        attention_with_sinks.attention_with_sinks(module, **call | change)
