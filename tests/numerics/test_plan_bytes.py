"""Planned bytes compared with the bytes counted in a real step, for every family and many settings."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import HEAD
from horizon_lm.model.opening import kept_in_float32
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.request import ForwardBatch, Request
from horizon_lm.planning.measure import meta_recorder
from horizon_lm.planning.measure.model_outline import outline_model
from horizon_lm.schedule.ops import Kind
from tests.census.tiny_models import build
from tests.support import tiny_models
from tests.support.planned_bytes import (
    DEFAULTS,
    HERE,
    LENGTH,
    Case,
    outline_of,
    train,
)
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned


@pytest.mark.parametrize(
    ("model_type", "head"), thinned(itertools.product(["hy_v4", "deepseek_v4"], ["whole", "chunked"]), every=4)
)
def test_weights_that_are_computed_with_in_float32_match_plan(model_type: str, head: str) -> None:
    model = build(model_type)
    for name, parameter in model.named_parameters():
        is_kept = name in kept_in_float32(model, [name], torch.bfloat16)
        parameter.data = parameter.data.bfloat16().to(torch.float32 if is_kept else torch.bfloat16)
    options = DEFAULTS | {"precision": "bf16", "head": head, "head_chunk_tokens": 64 if head == "chunked" else None}
    case = Case(2, options, "float32", False, frozenset())
    source = ModelSource(model.config, "tiny", dtype=torch.bfloat16)
    step = choose(outline_model(source, length=LENGTH, dtype=torch.bfloat16), case.request, HERE).step
    streamed = horizon_lm.stream(model, compute_dtype=torch.bfloat16, **case.options)
    with StorageMeter() as counted:
        train(streamed, case)
    engine = streamed._horizon.engine
    assert {kind: n for kind, n in engine.device.counters.allocated.items() if n} == device_use(step).buffers
    print(f"{model_type} {head}: counted {counted.peak:,}, planned {device_use(step).total:,}")


WIDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_inner": 256},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
SETTINGS: list[dict[str, Any]] = [
    {"activation_checkpoints": "host", "device_micro_batch_size": 1, "precision": "fp32_master"},
    {"head": "whole", "resident_blocks": 2, "resident_graphs": 2},
    {},
    {"device_micro_batch_size": 2},
    {"resident_blocks": 1, "resident_graphs": 1, "device_micro_batch_size": 3},
]
LONG = {"shape": (2, 480), "device_micro_batch_size": 1}  # longer than any window, with large masks


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *thinned(itertools.product(tiny_models.FAMILIES, SETTINGS[:2]), every=15),
        *thinned(
            itertools.product(("llama", "gpt2", "gemma2", "mixtral", "qwen3_next", "deepseek_v3"), SETTINGS[2:]),
            every=25,
        ),
        *thinned(((family, LONG) for family in ("gemma2", "gpt_oss", "gemma3_text", "cohere2", "llama")), every=5),
    ],
    ids=str,
)
def test_activations_match_plan(family: str, options: dict[str, Any]) -> None:
    """The reference counter shares no code with device, engine or plan."""
    wide = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "vocab_size": 600,
    } | WIDER.get(family, {})
    model = tiny_models.build(family, **wide, output_router_logits=False)
    rows, length = options.get("shape", (4, 96))
    options = {name: value for name, value in options.items() if name != "shape"}
    options = {"precision": "float32", "head_chunk_tokens": None, "grad_dtype": None} | options
    case = Case(rows, {**DEFAULTS, **options}, "float32", False, frozenset())
    outline = outline_model(
        ModelSource(model.config, "tiny", attn_implementation=model.config._attn_implementation),
        length=length,
        dtype=torch.float32,
    )
    step = choose(outline, case.request, HERE).step
    streamed = horizon_lm.stream(model, **options)
    optimizer = horizon_lm.AdamW(streamed, lr=1e-4)
    ids = torch.randint(3, 600, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    with StorageMeter() as counted:
        for _ in range(2):
            streamed(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    horizon_lm.synchronize(streamed)
    print(
        f"{family} {options}: counted {counted.peak:,}, planned {device_use(step).total:,}, {counted.peak / device_use(step).total:.3f}"
    )
    assert counted.peak == pytest.approx(device_use(step).total, rel=0.05)


def test_frozen_blocks_have_no_boundaries() -> None:
    """Only blocks with a gradient keep a boundary, which moves to the host and back."""
    model = tiny_models.build("llama", num_hidden_layers=5)
    outline = outline_model(
        ModelSource(model.config, "tiny"), length=LENGTH, dtype=torch.float32, trainable="layers.3.*|layers.4.*"
    )
    options = {**DEFAULTS, "activation_checkpoints": 1}
    step = choose(outline, Case(2, options, "float32", False, frozenset()).request, HERE).step
    kinds = [op.kind for each in step.passes() for op in each.ops if op.kind in (Kind.OFFLOAD, Kind.FETCH)]
    assert kinds == [Kind.OFFLOAD, Kind.FETCH]
    assert (step.waiting, step.staying) == ([3], [4])


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_head_has_no_gradients(tied: bool) -> None:
    source = ModelSource(tiny_models.build("llama", tie_word_embeddings=tied).config, "tiny")
    trained, frozen = (
        outline_model(source, length=64, dtype=torch.float32, trainable=trainable) for trainable in (None, "layers")
    )
    of_head = 2 * 64 * trained.layout.numel(HEAD)
    assert trained.heads["whole"].backward.at(64).products == 2 * of_head
    assert frozen.heads["whole"].backward.at(64).products == of_head
    assert trained.heads["whole"].peak.at(64) - frozen.heads["whole"].peak.at(64) >= 4 * trained.layout.numel(HEAD)


def test_eager_scores_are_planned_quadratically() -> None:
    config = tiny_models.build("gpt_oss").config
    source = ModelSource(config, "tiny", attn_implementation="eager")
    short, long = (outline_model(source, length=n, dtype=torch.float32) for n in (64, 512))
    batch = ForwardBatch(1, 512)
    settings = {"per_device_train_batch_size": 1, "forwards": (batch,)}
    planned, exact = (choose(each, Request(**settings), HERE).step for each in (short, long))
    assert device_use(planned).activations >= max(kind.forward_peak.at(1) for kind in exact.outline.kinds)


def test_shapes_that_are_remembered_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = tiny_models.build("gpt_oss"), dict[Any, Any]()
    monkeypatch.setattr(meta_recorder, "_results", made)
    first = outline_of(model)
    assert made
    assert replace(outline_of(model), layout=first.layout) == first
    monkeypatch.setattr(meta_recorder, "_run", lambda func, args, kwargs: func(*args, **kwargs))
    assert replace(outline_of(model), layout=first.layout) == first


_FLEX = pytest.mark.filterwarnings(
    "ignore:_compile flag"
)  # torch's, of how transformers makes the masks of flex_attention


@_FLEX
def test_planning_compiles_nothing() -> None:
    """The masks of flex_attention are compiled when a model is called, which takes half a minute."""
    torch.compiler.reset()
    source = ModelSource(tiny_models.build("llama").config, "tiny", attn_implementation="flex_attention")
    with torch.compiler.set_stance("fail_on_recompile"):
        outline = outline_model(source, length=32, dtype=torch.bfloat16, on_accelerator=True)
    assert not outline.unknown


@_FLEX
def test_fused_attention_with_sinks_is_planned_linearly() -> None:
    """With masks, without them, and with flex_attention, whose masks are no tensors."""
    config = tiny_models.build("gpt_oss").config

    def peak(name: str, length: int) -> float:
        source = ModelSource(config, "tiny", attn_implementation=name)
        outline = outline_model(source, length=length, dtype=torch.bfloat16, on_accelerator=True)
        assert not outline.unknown
        assert all(kind.forward.at(1).attention for kind in outline.kinds) == (name != "eager")
        return max(kind.footprint.at(1).peak for kind in outline.kinds)

    for name, growth in (("sinks", 8), ("varlen", 8), ("flex_attention", 8), ("eager", 60)):
        assert peak(name, 2048) / peak(name, 256) == pytest.approx(growth, rel=0.1), name


@pytest.mark.parametrize(
    ("head", "values"), thinned(itertools.product(("chunked", "whole"), (("logprobs",), ("logprobs", "mean"))))
)
def test_heads_of_other_losses_match_plan(head: str, values: tuple[str, ...]) -> None:
    """The vocabulary is so large that the loss determines the peak."""
    model = tiny_models.build("llama", vocab_size=20_000, max_position_embeddings=128)
    outline = outline_model(ModelSource(model.config, "tiny"), length=96, dtype=torch.float32, head_values=values)
    options = {**DEFAULTS, "head": head, "head_chunk_tokens": 128 if head == "chunked" else None}
    step = choose(outline, Case(4, options, "float32", False, frozenset()).request, HERE).step
    streamed = horizon_lm.stream(model, **options)
    ids = torch.randint(3, 20_000, (4, 96))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    with StorageMeter() as counted:
        for _ in range(2):
            found = horizon_lm.token_logprobs(
                streamed, input_ids=ids, attention_mask=mask, labels=ids, statistics=values[1:]
            )
            (found.logprobs.sum() if found.mean is None else found.logprobs.sum() + found.mean.sum()).backward()
    horizon_lm.synchronize(streamed)
    print(f"{head} {values}: counted {counted.peak:,}, planned {device_use(step).total:,}")
    assert counted.peak == pytest.approx(device_use(step).total, rel=0.05)
