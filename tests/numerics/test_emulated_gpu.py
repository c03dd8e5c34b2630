"""The CUDA device's own code on an emulated GPU: the same numbers, nothing mixed up, no waiting inside a step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from tests import families
from tests.emulated import EmulatedGpu, OnGpu, emulated_gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "planned": {},
    "boundaries on the host": {"boundaries": "host"},
    "micro-batches": {"boundaries": "host", "device_micro_batch_size": 2},
    "held blocks": {"held_blocks": 2, "held_graphs": 1},
    "whole head": {"head": "whole"},
    "16 bits": {"precision": "fp32_master", "compute_dtype": torch.bfloat16},
}
WAITS = {
    # Hugging Face's own code asks for the largest number of tokens of an expert, and the like.
}


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def _train(model: Any, padding: str, gpu: EmulatedGpu | None = None) -> tuple[list[float], list[str]]:
    """Losses of four steps, and what the host waited for in the last two."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    losses = []
    for seed in range(4):
        if gpu is not None and seed == 2:
            gpu.waits.clear()
        batch = families.batch(seed=seed, padding=padding)
        if padding == "none":
            del batch["attention_mask"]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    waits = list(gpu.waits) if gpu is not None else []
    horizon_lm.synchronize(model)
    return [loss.item() for loss in losses], waits


def _both(family: str, padding: str, gpu: EmulatedGpu, **settings: Any) -> list[str]:
    """Train on the emulated GPU and on the CPU; returns the waits of the former."""
    settings = {"precision": "float32", "compile": False} | settings
    model = horizon_lm.stream(families.build(family), CudaDevice(), **settings)
    attention = model.config._attn_implementation
    losses, waits = _train(model, padding, gpu)
    reference = horizon_lm.stream(families.build(family), "cpu", **settings | {"attn_implementation": attention})
    expected, _ = _train(reference, padding)
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    return waits


@pytest.mark.parametrize("family", families.FAMILIES)
def test_families(gpu: EmulatedGpu, family: str) -> None:
    _both(family, "right", gpu)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_settings(gpu: EmulatedGpu, family: str, settings: str) -> None:
    _both(family, "right", gpu, **SETTINGS[settings])


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_host_never_waits_inside_a_dense_step(gpu: EmulatedGpu, settings: str) -> None:
    waits = _both("llama", "none", gpu, **SETTINGS[settings])
    assert waits == []


@pytest.mark.parametrize("family", families.FAMILIES)
def test_waits_of_families(gpu: EmulatedGpu, family: str) -> None:
    print(family, set(_both(family, "none", gpu)))


def test_the_emulation_sees_mistakes(gpu: EmulatedGpu) -> None:
    """The negative control."""
    there = torch.ones(3, device="cuda")
    assert isinstance(there, OnGpu)
    with pytest.raises(RuntimeError, match="host memory and on the GPU"):
        there + torch.ones(3)
    assert gpu.waits == []
    there.sum().item()
    there[there > 0]
    there.cpu()
    torch.ones(3).copy_(there, non_blocking=True)  # not page-locked
    assert len(gpu.waits) == 4
