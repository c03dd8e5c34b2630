"""Compiled blocks: one graph for all blocks of a structure, results equal to eager, and a recompute equal to the
forward.
"""

import copy
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.model import compiling
from horizon_lm.model.block_template import structure_key
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.threaded_device import ThreadedDevice

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
    # torch.compile reads a chunk's gradient; the warning is hidden unless warnings are errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*cannot be compiled as one graph .*torch.compiler.disable:UserWarning"
    ),  # the chunks
]


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


COUNTING = "aot_eager"  # a backend that makes the graphs, and generates no code
CHUNKED = {"attn_implementation": "varlen", "mlp_chunk_tokens": 21}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("llama", CHUNKED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equal_to_eager_and_compiled_once(family: str, settings: dict[str, Any]) -> None:
    """Rows are padded, so that ``varlen`` computes them by segment."""
    plain = tiny_models.build(family)
    settings = {"precision": "float32", "check_recompute": True} | settings
    eager = horizon_lm.stream(copy.deepcopy(plain), **settings)
    compiled = horizon_lm.stream(plain, compile=True, **settings)
    torch._dynamo.reset()
    counters.clear()
    for seed in (0, 1):
        expected, got = (gradients(m, tiny_models.batch(seed=seed)) for m in (eager, compiled))
        torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
        for a, b in zip(got[1], expected[1], strict=True):
            assert (a - b).norm() <= 3e-6 * b.norm().clamp(min=1e-3)  # another order of summation: 1.2e-6 on some CPUs
    structures = {structure_key(block.module) for block in compiled._horizon.blocks.blocks}
    parts = 3 if "mlp_chunk_tokens" in settings else 1  # before the chunks, one chunk, and after them
    # Three blocks, forward and backward pass, and the loss.
    assert 2 <= counters["stats"]["unique_graphs"] <= parts * len(structures) + 1
    assert bool(counters["graph_break"]) == (parts > 1)


SHAPES = [(2, 12), (3, 12), (3, 17), (4, 20), (2, 31), (5, 9), (2, 23), (6, 15)]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {  # family, its sizes, settings, graphs
    "packed": ("llama", {}, {"attn_implementation": "varlen"}, 1),
    "plain": ("llama", {}, {}, 1),
    "padded": ("llama", {}, {"attn_implementation": "varlen"}, 1),
    "padded, with a window": ("mistral", {"sliding_window": 6}, {"attn_implementation": "varlen"}, 1),
    "chunked": ("llama", {}, {"mlp_chunk_tokens": 20}, 3),  # before the chunks, one chunk, and after them
}


def shaped(kind: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, tiny_models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    batch = {"input_ids": ids, "labels": ids}
    if kind.startswith("padded"):
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(length - 5)])[None].expand(rows, -1)
    return batch


@pytest.mark.parametrize(
    "kind", [kind if kind == "chunked" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_one_graph_for_batches_of_all_shapes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_BACKEND", COUNTING)
    family, sizes, settings, graphs = KINDS[kind]
    model = horizon_lm.stream(tiny_models.build(family, **sizes), precision="float32", compile=True, **settings)
    torch._dynamo.reset()
    counters.clear()

    def num_graphs() -> int:
        return counters["stats"]["unique_graphs"]

    for rows, length in SHAPES:
        gradients(model, shaped(kind, rows, length))
    assert num_graphs() == graphs + 1  # and that of the loss
    gradients(model, shaped(kind, 1, 29))  # torch.compile treats sizes of 1 as constants
    gradients(model, shaped(kind, 1, 23))
    assert num_graphs() == 2 * graphs + 1
    model.eval()
    with torch.no_grad():
        for rows, length in SHAPES[:4]:
            model(**shaped(kind, rows, length))
    assert num_graphs() == 3 * graphs + 2
    ids = shaped("plain", 2, 8)["input_ids"]
    model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids[:1, :5], max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert num_graphs() == 3 * graphs + 2


@pytest.mark.parametrize(
    "settings",
    [
        {"device_micro_batch_size": 2},
        {"resident_blocks": 2, "resident_graphs": 1},
        {"attn_implementation": "varlen", "device_micro_batch_size": 3},
    ],
)
@pytest.mark.slow
def test_recompute_equals_the_compiled_forward(settings: dict[str, Any]) -> None:
    """With dropout, micro-batches of two sizes, and kept graphs, the engine compares every bit."""
    model = tiny_models.build("gpt2")
    assert model.config.attn_pdrop > 0
    streamed = horizon_lm.stream(model, precision="float32", compile=True, check_recompute=True, **settings)
    for seed in (0, 1):
        loss, grads = gradients(streamed, tiny_models.batch(rows=5, seed=seed))
        assert torch.isfinite(loss)
        assert all(g.isfinite().all() for g in grads)


class Measured(ThreadedDevice):
    """A device that reports memory without intercepting operations, which would prevent their compilation."""

    def meter(self) -> Any:
        return nullcontext(SimpleNamespace(current=10_000, peak=20_000))


@pytest.mark.parametrize("padding", thinned(["right", "none"], every=2))
def test_planning_causes_no_extra_compilation(padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_BACKEND", COUNTING)
    device = Measured(1, spare=400_000)
    model = horizon_lm.stream(
        tiny_models.build("llama"), device, precision="float32", compile=True, head_chunk_tokens=64
    )
    torch._dynamo.reset()
    counters.clear()
    for seed in (0, 1):
        gradients(model, tiny_models.batch(seed=seed, padding=padding))
    assert model._horizon.planner.plan is not None
    assert counters["stats"]["unique_graphs"] == 2  # of blocks, and of the loss


def test_settings() -> None:
    model = tiny_models.build("llama")
    with pytest.raises(ConfigError, match="compile is 'yes'"):
        horizon_lm.stream(model, compile="yes")
    assert not horizon_lm.stream(model)._horizon.engine.options.compile  # auto, on the CPU
