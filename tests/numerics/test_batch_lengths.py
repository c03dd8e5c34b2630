"""Batches of many lengths: growing buffers are allocated once, and no step waits until the device is idle."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.planning.arithmetic.residency import ExpectedBatch
from tests.support import tiny_models
from tests.support.emulated_gpu import EmulatedGpu, emulated_gpu
from tests.support.thinned_cases import thinned
from tests.support.threaded_device import ThreadedDevice

ROWS, LONGEST = 2, 40
LENGTHS = list(range(4, LONGEST + 1, 4))  # ten
HIDDEN_BYTES = 32 * 4
ORDERS = {"rising": LENGTHS, "falling": LENGTHS[::-1], "mixed": random.Random(0).sample(LENGTHS, len(LENGTHS))}


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def batch(length: int, distinct: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Return rows of one length with a given number of distinct ids."""
    ids = torch.arange(rows * length).view(rows, length) % distinct + 3
    return {"input_ids": ids, "labels": ids.clone()}


def step(model: Any, optimizer: Any, length: int, distinct: int = 5) -> float:
    loss = model(**batch(length, distinct)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def growing_bytes(model: Any) -> int:
    """Return the host memory that depends on the batch: boundaries, and landing slots for rows of the embedding."""
    kinds = horizon_lm.stats(model)["host_bytes_by_kind"]
    return kinds["boundaries"] + kinds.get("landing", 0)


class Counting(CpuDevice):
    """A device that counts how often the host waits until the device is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.num_synchronizations = 0

    def synchronize(self) -> None:
        self.num_synchronizations += 1
        super().synchronize()


@pytest.mark.parametrize(("in_backward", "order"), thinned(itertools.product((False, True), ORDERS), every=2))
def test_host_memory_is_bounded_by_the_longest_batch(order: str, in_backward: bool) -> None:
    """The buffers of shorter batches take no additional memory."""

    def train(lengths: list[int]) -> tuple[list[int], Any]:
        model = horizon_lm.stream(tiny_models.build("llama"), "cpu", "float32", activation_checkpoints="host")
        optimizer = horizon_lm.AdamW(model, update_in_backward=in_backward)
        seen = []
        for length in lengths:
            step(model, optimizer, length, distinct=ROWS * length)
            seen.append(growing_bytes(model))
        return seen, model

    (longest,), model = train([LONGEST])
    num_blocks = model.config.num_hidden_layers
    assert horizon_lm.stats(model)["host_bytes_by_kind"]["boundaries"] == num_blocks * ROWS * LONGEST * HIDDEN_BYTES
    seen, _ = train(ORDERS[order])
    assert seen[-1] == longest
    assert max(seen) == longest


@pytest.mark.parametrize("expected", thinned([False, True], every=2))
def test_page_locked_memory_is_bounded_by_the_longest_batch(gpu: EmulatedGpu, expected: bool) -> None:
    """Replaced buffers are unlocked; if the largest batch is known in advance, no buffer is replaced."""

    def train(lengths: list[int]) -> tuple[Any, list[int]]:
        model = horizon_lm.stream(
            tiny_models.build("llama"), CudaDevice(), "float32", activation_checkpoints="host", compile=False
        )
        if expected:
            model._horizon.engine.expect_batch(ExpectedBatch(ROWS * LONGEST))
        optimizer = horizon_lm.AdamW(model, update_in_backward=True)
        before, seen = gpu.registered_bytes(), []
        for length in lengths:
            step(model, optimizer, length, distinct=ROWS * length)
            seen.append(gpu.registered_bytes() - before)
        return model, seen

    _kept, (longest,) = train([LONGEST])
    _model, seen = train(LENGTHS)
    assert seen[-1] == longest
    assert set(seen) == {longest} if expected else max(seen) == longest


@pytest.mark.parametrize("in_backward", [False, True], ids=["", "update in backward"])
def test_more_distinct_ids_do_not_synchronize(in_backward: bool) -> None:
    """Buffers are allocated for as many rows as a batch of this size can read."""
    model = horizon_lm.stream(
        tiny_models.build("llama"), device := Counting(), "float32", activation_checkpoints="host"
    )
    optimizer = horizon_lm.AdamW(model, update_in_backward=in_backward)
    step(model, optimizer, LONGEST, distinct=2)
    before = device.num_synchronizations
    for distinct in (3, 10, 40, 60):
        step(model, optimizer, LONGEST, distinct)
    assert device.num_synchronizations == before
    step(model, optimizer, 2 * LONGEST)
    assert device.num_synchronizations > before  # negative control: a larger batch than expected


@pytest.mark.parametrize("in_backward", [False, True], ids=["", "update in backward"])
def test_batches_up_to_the_expected_one_do_not_synchronize(in_backward: bool) -> None:
    model = horizon_lm.stream(
        tiny_models.build("llama"), device := Counting(), "float32", activation_checkpoints="host"
    )
    model._horizon.engine.expect_batch(ExpectedBatch(ROWS * LONGEST))
    optimizer = horizon_lm.AdamW(model, update_in_backward=in_backward)
    step(model, optimizer, LENGTHS[0], distinct=2)
    before, stats = device.num_synchronizations, horizon_lm.stats(model)
    for length in LENGTHS:
        step(model, optimizer, length, distinct=ROWS * length)
    now = horizon_lm.stats(model)
    assert device.num_synchronizations == before
    assert now["host_bytes_by_kind"] == stats["host_bytes_by_kind"]
    assert now["device_bytes_peak"] == stats["device_bytes_peak"]


def test_a_batch_with_more_distinct_ids_than_expected() -> None:
    """The expected number of distinct ids is not a limit."""
    losses = []
    for expected in (None, ExpectedBatch(ROWS * 8, distinct_tokens=3)):
        model = horizon_lm.stream(tiny_models.build("llama"), "simulated", "float32", activation_checkpoints="host")
        if expected is not None:
            model._horizon.engine.expect_batch(expected)
        optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=True)
        losses.append([step(model, optimizer, length, distinct=40) for length in (8, 8, 40, 16)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("in_backward", thinned([False, True], every=2), ids=["", "update in backward"])
def test_batch_lengths_do_not_change_results(in_backward: bool) -> None:
    """With late copies, a buffer that is replaced too early would lose a copy to or from it."""

    def train(device: Any) -> list[float]:
        model = horizon_lm.stream(tiny_models.build("llama"), device, "float32", activation_checkpoints="host")
        optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=in_backward)
        return [step(model, optimizer, length, distinct=ROWS * length) for length in ORDERS["mixed"]]

    expected = train("cpu")
    for seed in range(3):
        assert train(ThreadedDevice(seed, delay=2e-3)) == expected


def test_an_abandoned_forward_pass_of_another_length_frees_its_buffers() -> None:
    """The buffers of an abandoned forward pass return to the pool, are too small there, and are freed."""
    model = horizon_lm.stream(
        tiny_models.build("llama"), device := ThreadedDevice(1), "float32", activation_checkpoints="host"
    )
    optimizer = horizon_lm.AdamW(model)
    abandoned = model(**batch(8, 5)).loss
    step(model, optimizer, LONGEST)
    del abandoned
    for _ in range(2):
        step(model, optimizer, LONGEST)
    device.synchronize()
    boundaries = horizon_lm.stats(model)["host_bytes_by_kind"]["boundaries"]
    assert boundaries == model.config.num_hidden_layers * ROWS * LONGEST * HIDDEN_BYTES
