"""Compiled blocks: one graph for all blocks of a structure, equal to eager, and the recomputation to the forward."""

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
from horizon_lm.model.block import structure_key
from tests import families
from tests.threaded import ThreadedDevice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_equal_to_eager_and_compiled_once(family: str) -> None:
    plain = families.build(family)
    settings = {"precision": "float32", "check_recompute": True}
    eager = horizon_lm.stream(copy.deepcopy(plain), **settings)
    compiled = horizon_lm.stream(plain, compile=True, **settings)
    torch._dynamo.reset()
    counters.clear()
    for seed in (0, 1):
        expected, got = (gradients(m, families.batch(seed=seed)) for m in (eager, compiled))
        torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
        for a, b in zip(got[1], expected[1], strict=True):
            assert (a - b).norm() <= 3e-6 * b.norm().clamp(min=1e-3)  # sums in another order: 1.2e-6 on some CPUs
    structures = {structure_key(block.module) for block in compiled._horizon.blocks.blocks}
    assert 1 <= counters["stats"]["unique_graphs"] <= len(structures)  # three blocks, forward and backward
    assert not counters["graph_break"]


@pytest.mark.parametrize("settings", [{"device_micro_batch_size": 2}, {"held_blocks": 2, "held_graphs": 1}])
def test_recomputed_as_before(settings: dict[str, Any]) -> None:
    """With dropout, micro-batches of two sizes, and graphs that are kept; checked to the last bit by the engine."""
    model = families.build("gpt2")
    assert model.config.attn_pdrop > 0
    streamed = horizon_lm.stream(model, precision="float32", compile=True, check_recompute=True, **settings)
    for seed in (0, 1):
        loss, grads = gradients(streamed, families.batch(rows=3, seed=seed))
        assert torch.isfinite(loss)
        assert all(g.isfinite().all() for g in grads)


class Measured(ThreadedDevice):
    """Says something about memory without watching operations, which would keep them from being compiled."""

    def meter(self) -> Any:
        return nullcontext(SimpleNamespace(current=10_000, peak=20_000))


@pytest.mark.parametrize("padding", ["none", "right"])
def test_planning_compiles_nothing_of_its_own(padding: str) -> None:
    device = Measured(1, spare=400_000)
    model = horizon_lm.stream(families.build("llama"), device, precision="float32", compile=True, head_chunk_tokens=64)
    torch._dynamo.reset()
    counters.clear()
    for seed in (0, 1):
        gradients(model, families.batch(seed=seed, padding=padding))
    assert model._horizon.engine.plan is not None
    assert counters["stats"]["unique_graphs"] == 1


def test_settings() -> None:
    model = families.build("llama")
    with pytest.raises(ConfigError, match="compile is 'yes'"):
        horizon_lm.stream(model, compile="yes")
    assert not horizon_lm.stream(model)._horizon.engine.options.compile  # auto, on the CPU
