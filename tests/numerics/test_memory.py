"""Bytes moved and allocated; activations are counted by a meter that shares no code with the device's counters."""

from collections import Counter
from typing import Any

import pytest
import torch

import horizon_lm
from tests.support import tiny_models
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned


def test_the_storage_meter_counts_live_bytes() -> None:
    with StorageMeter() as meter:
        a = torch.ones(1000)
        b = a.view(10, 100)
        c = b * 2
        assert meter.current == 8000
        del c
        assert meter.current == 4000
    assert meter.peak == 8000


def _streamed(num_blocks: int, micro_batch_size: int | None, **options: Any) -> Any:
    model = tiny_models.build("llama", num_hidden_layers=num_blocks, hidden_size=64, intermediate_size=128)
    return horizon_lm.stream(model, device_micro_batch_size=micro_batch_size, activation_checkpoints="host", **options)


@pytest.mark.parametrize(
    ("precision", "micro_batch_size"),
    thinned(
        [("float32", 8), ("fp32_master", 8), ("float32", 1), ("fp32_master", 1), ("fp32_master", 4)],
        every=5,
        keep=[("fp32_master", 4)],
    ),
)
def test_device_peak_does_not_depend_on_depth(precision: str, micro_batch_size: int) -> None:
    peaks, counted = {}, {}
    for num_blocks in (4, 24):
        meter = StorageMeter()
        model = _streamed(num_blocks, micro_batch_size, precision=precision)
        with meter:
            for _ in range(2):
                model(**tiny_models.batch(rows=8, length=32)).loss.backward()
        peaks[num_blocks], counted[num_blocks] = meter.peak, horizon_lm.stats(model)["device_bytes_peak"]
    print(f"{precision}, {8 // micro_batch_size} micro-batches: {peaks}, buffers {counted}")
    assert counted[4] == counted[24]
    assert peaks[4] == peaks[24]


def test_device_peak_grows_when_boundaries_stay_on_the_device() -> None:
    peaks = []
    for num_blocks in (4, 64):
        model = tiny_models.build("llama", num_hidden_layers=num_blocks)
        streamed = horizon_lm.stream(model, precision="float32")
        with StorageMeter() as meter:
            streamed(**tiny_models.batch(rows=8, length=32)).loss.backward()
        peaks.append(meter.peak)
    assert peaks[1] > peaks[0] + 50 * 8 * 32 * 32 * 4  # one additional hidden state per block


@pytest.mark.parametrize("micro_batch_size", [None, 3, 1])
@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_bytes_moved_per_step(head: str, micro_batch_size: int | None) -> None:
    rows, num_blocks = 6, 5
    model = _streamed(num_blocks, micro_batch_size, precision="fp32_master", head=head)
    model(**tiny_models.batch(rows=rows)).loss.backward()
    stats, store = horizon_lm.stats(model), model._horizon.engine.store
    slab = {str(unit): slabs.plain.weights.numel() * 2 for unit, slabs in store.units.items()}

    moved: Counter[str] = Counter(stats["moved_bytes"])
    unique = tiny_models.batch(rows=rows)["input_ids"].unique().numel()
    for u in range(num_blocks):
        assert moved[f"stream_in:block{u}"] == 2 * slab[f"block{u}"]
        assert moved[f"stream_out:block{u}"] == slab[f"block{u}"]
    # At most twice: a chunked head computes gradients in the forward pass; rows and outer parameters are not needed
    # again.
    assert moved["stream_in:head"] == (2 if head == "whole" else 1) * slab["head"]
    assert moved["stream_in:outer"] == slab["outer"]
    assert moved["stream_in:embed"] == moved["stream_out:embed"] == unique * 64 * 2
    assert moved["stream_out:head"] == slab["head"]
    assert moved["stream_out:outer"] == slab["outer"]
    assert stats["block_forward_rows"] == 2 * rows * num_blocks


def test_frozen_parameters_cost_only_their_weights() -> None:
    model = tiny_models.build("llama", hidden_size=128, intermediate_size=256, vocab_size=1024)
    for name, param in model.named_parameters():
        param.requires_grad_("layers.2" in name)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    streamed = horizon_lm.stream(model, precision="bf16")
    horizon_lm.AdamW(streamed)
    assert horizon_lm.stats(streamed)["host_bytes"] == pytest.approx(2 * total + 10 * trainable, rel=0.05)
