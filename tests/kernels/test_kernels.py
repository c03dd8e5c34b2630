"""Compare the compiled kernels with numpy and torch, for each mode."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from horizon_lm.common.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.kernels.bits import F32, U32, kernel, mix, nearest, stochastic
from horizon_lm.memory.kernels.formats import _decode_signed, _decode_unsigned, _encode_signed, _encode_unsigned
from horizon_lm.memory.kernels.gradients import landing_kernel, squared_norm_kernel
from horizon_lm.memory.kernels.gradients import rows_kernel as landing_rows_kernel
from horizon_lm.memory.kernels.updates import Scalars, rows_kernel, update_kernel
from horizon_lm.optim.adamw import AdamW
from horizon_lm.optim.update_tasks import step_scalars
from tests.support.thinned_cases import thinned

WEIGHTS, MOMENTS, GRADS = ("float32", "bf16", "fp32_master"), ("float32", "bfloat16", "8bit"), ("float32", "bfloat16")
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
RULE = AdamW.rule


class Slabs:
    """The arrays of an update of ``n`` elements."""

    def __init__(self, weights: str, moments: str, grads: str, n: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = (0.02 * torch.randn(n, generator=generator)).bfloat16()
        self.modes, self.n = (weights, moments, grads), n
        self.weights = as_array(start.float() if weights == "float32" else start.clone())
        self.low = np.zeros(n if weights == "fp32_master" else 0, np.int16)
        self.grads = np.zeros(n, np.float32 if grads == "float32" else np.uint16)
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "8bit": np.uint8}[moments]
        self.first, self.second = np.zeros(n, dtype), np.zeros(n, dtype)
        self.scale1, self.scale2 = (np.zeros(-(-n // BLOCK) if moments == "8bit" else 0, np.float32) for _ in range(2))

    def set_grads(self, grad: torch.Tensor) -> None:
        self.grads[:] = as_array(grad if self.modes[2] == "float32" else grad.bfloat16())

    def update(self, scalars: Scalars, start: int = 0, stop: int | None = None) -> None:
        stop = self.n if stop is None else stop
        part = slice(start, stop)
        scales = slice(start // BLOCK, -(-stop // BLOCK)) if len(self.scale1) else slice(0, 0)
        update_kernel(RULE, *self.modes)(
            self.weights[part], self.low[part], self.grads[part], self.first[part], self.second[part],
            self.scale1[scales], self.scale2[scales], np.uint32(start), scalars,
        )  # fmt: skip

    def masters(self) -> np.ndarray:
        bits = self.weights.astype(np.uint32)
        if self.modes[0] == "float32":
            return self.weights
        low = self.low.astype(np.uint32) if self.modes[0] == "fp32_master" else np.uint32(0)
        return ((bits << 16) + low).astype(np.uint32).view(np.float32)

    def arrays(self) -> list[np.ndarray]:
        return [self.weights, self.low, self.first, self.second, self.scale1, self.scale2]


def grads(n: int, step: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 + step)) * 10.0 ** (step % 3 - 3)


def scalars(step: int, clip: float = 0.7) -> Scalars:
    return step_scalars(RULE, HYPER, step, clip, key=1234 + step)


def reference(n: int, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights after AdamW in fp64 on bf16 gradients, and the initial weights."""
    start = (0.02 * torch.randn(n, generator=torch.Generator().manual_seed(0))).bfloat16().double().numpy()
    w, m, v = start.copy(), np.zeros(n), np.zeros(n)
    lr, (beta1, beta2), eps, weight_decay = HYPER.values()
    for step in range(1, num_steps + 1):
        g = grads(n, step).bfloat16().double().numpy() * 0.7
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w *= 1 - lr * weight_decay
        w -= lr / (1 - beta1**step) * m / (np.sqrt(v / (1 - beta2**step)) + eps)
    return w, start


@pytest.mark.parametrize(("weights", "moments", "grad_mode"), thinned(product(WEIGHTS, MOMENTS, GRADS), every=5))
def test_update_follows_fp64(weights: str, moments: str, grad_mode: str) -> None:
    n, num_steps = 10_000, 12
    expected, start = reference(n, num_steps)
    slabs = Slabs(weights, moments, grad_mode, n)
    for step in range(1, num_steps + 1):
        slabs.set_grads(grads(n, step).bfloat16().float())
        slabs.update(scalars(step))
    moved = slabs.masters().astype(np.float64) - start
    wanted = expected - start
    error = np.sqrt(np.mean((moved - wanted) ** 2) / np.mean(wanted**2))
    # With everything in fp32, only rounding differs. A bf16 weight is off by part of a step, and moments by their
    # rounding.
    limit = {"float32": 1e-5, "bfloat16": 0.02, "8bit": 0.15}[moments] if weights != "bf16" else 0.6
    assert error < limit
    slope = moved @ wanted / (wanted @ wanted)
    assert abs(slope - 1) < {"float32": 1e-5, "bfloat16": 2e-3, "8bit": 0.05}[moments] + (
        0.03 if weights == "bf16" else 0
    )


@pytest.mark.parametrize(("weights", "moments", "grad_mode"), thinned(product(WEIGHTS, MOMENTS, GRADS), every=5))
def test_result_does_not_depend_on_pieces_or_threads(weights: str, moments: str, grad_mode: str) -> None:
    n = 40 * BLOCK + 32
    whole, cut = (Slabs(weights, moments, grad_mode, n) for _ in range(2))
    order = random.Random(0)
    with ThreadPoolExecutor(4) as pool:
        for step in range(1, 4):
            for slabs in (whole, cut):
                slabs.set_grads(grads(n, step))
            whole.update(scalars(step))
            size = BLOCK * order.choice([1, 3, 7])
            starts = list(range(0, n, size))
            order.shuffle(starts)
            list(pool.map(lambda a, size=size, step=step: cut.update(scalars(step), a, min(a + size, n)), starts))
    for a, b in zip(whole.arrays(), cut.arrays(), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("moments", MOMENTS)
def test_split_weights_are_an_exact_fp32_master(moments: str) -> None:
    n = 5000
    split, plain = Slabs("fp32_master", moments, "bfloat16", n), Slabs("float32", moments, "bfloat16", n)
    for step in range(1, 21):
        for slabs in (split, plain):
            slabs.set_grads(grads(n, step) * 10.0 ** (step - 10))  # from denormal moments to huge ones
            slabs.update(scalars(step))
        assert split.masters().tobytes() == plain.masters().tobytes()
        assert split.weights.tobytes() == as_array(torch.from_numpy(_away_from_zero(plain.weights))).tobytes()


def _away_from_zero(master: np.ndarray) -> np.ndarray:
    return ((master.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize(("weights", "moments"), thinned(product(WEIGHTS, MOMENTS), every=4))
def test_updating_rows_equals_updating_spans(weights: str, moments: str) -> None:
    num_rows, width = 37, 2 * BLOCK  # rows of whole blocks, so that rows and spans have the same scales
    spans, rows = (Slabs(weights, moments, "bfloat16", num_rows * width) for _ in range(2))
    present = np.arange(0, num_rows, 3)
    grad = torch.zeros(num_rows, width)
    grad[present] = grads(len(present) * width, 1).view(len(present), width)
    spans.set_grads(grad.view(-1))
    spans.update(scalars(1))
    sparse = as_array(torch.cat([grad[present], torch.zeros(1, width)]).bfloat16()).reshape(-1)
    grad_rows = np.full(num_rows, len(present))
    grad_rows[present] = np.arange(len(present))
    blocks = width // BLOCK if moments == "8bit" else 0
    for part in (np.arange(20, 37), np.arange(0, 20)):
        rows_kernel(RULE, weights, moments, "bfloat16")(
            rows.weights, rows.low, sparse, rows.first, rows.second, rows.scale1, rows.scale2, width, blocks, part,
            grad_rows[part], scalars(1),
        )  # fmt: skip
    for a, b in zip(spans.arrays(), rows.arrays(), strict=True):
        assert a.tobytes() == b.tobytes()


# Rounding


@kernel
def _round(values: Any, out: Any, key: Any, exact: Any) -> None:
    for i in range(len(values)):
        noise = U32(mix(U32(U32(i) ^ key)) & U32(0xFFFF))
        out[i] = nearest(values[i]) if exact else stochastic(values[i], noise)


def mean_error(values: np.ndarray, exact: bool) -> float:
    """Return the mean error of rounding to bf16, in standard deviations of an unbiased rounding."""
    out = np.zeros(len(values), np.uint16)
    _round(values, out, U32(7), exact)
    step = 2.0**-7 * 2 ** np.floor(np.log2(np.abs(values.astype(np.float64))))
    low = np.floor(values / step) * step
    fraction = (values - low) / step
    error = (out.astype(np.uint32) << 16).view(np.float32).astype(np.float64) - values
    return float(error.sum() / np.sqrt((step**2 * fraction * (1 - fraction)).sum()))


@pytest.mark.parametrize("value", [1 + 2**-10, 1 + 3 * 2**-10, -(1 + 2**-9), 0.3, 1e-30])
def test_stochastic_rounding_is_unbiased(value: float) -> None:
    values = np.full(200_000, value, np.float32)
    assert abs(mean_error(values, exact=False)) < 5
    assert abs(mean_error(values, exact=True)) > 50  # negative control: rounding to nearest is biased


def test_noise_is_uniform_and_differs_by_key() -> None:
    @kernel
    def draw(out: Any, key: Any) -> None:
        for i in range(len(out)):
            out[i] = mix(U32(U32(i) ^ key))

    draws = [np.zeros(1 << 18, np.uint32) for _ in range(2)]
    for out, key in zip(draws, (U32(1), U32(2)), strict=True):
        draw(out, key)
        for shift in (0, 16):
            counts = np.bincount((out >> shift) & 0xFF, minlength=256)
            chi2 = ((counts - 1024.0) ** 2 / 1024).sum()
            assert 255 - 6 * 22.6 < chi2 < 255 + 6 * 22.6
    assert (draws[0] == draws[1]).mean() < 1e-3


@kernel
def _round_trip_signed(values: Any, codes: Any, out: Any, key: Any) -> None:
    for i in range(len(values)):
        _encode_signed(codes, i, values[i], U32(mix(U32(U32(i) ^ key)) & U32(0xFFFF)))
        out[i] = _decode_signed(codes, i, F32(1))


@kernel
def _round_trip_unsigned(values: Any, codes: Any, out: Any, key: Any) -> None:
    for i in range(len(values)):
        _encode_unsigned(codes, i, values[i], U32(mix(U32(U32(i) ^ key)) & U32(0xFFFF)))
        out[i] = _decode_unsigned(codes, i, F32(1))


@pytest.mark.parametrize("codec", [_round_trip_signed, _round_trip_unsigned])
@pytest.mark.parametrize("size", [1.0, 0.3, 1e-2, 1e-4, 2**-15.5])
def test_8bit_moments_are_unbiased(codec: Any, size: float) -> None:
    values = np.full(100_000, size, np.float32)
    out, codes = np.zeros_like(values), np.zeros(len(values), np.uint8)
    codec(values, codes, out, U32(3))
    assert np.abs(out / size - 1).max() <= 1 if size < 2**-14 else np.abs(out / size - 1).max() < 0.13
    assert abs(out.mean() / size - 1) < 5 * 0.13 / np.sqrt(len(values)) * (8 if size < 2**-14 else 1)
    if codec is _round_trip_signed:
        codec(-values, codes, out, U32(3))
        assert abs(out.mean() / -size - 1) < 0.02


def test_unsigned_8bit_moment_is_zero_only_for_zero() -> None:
    values = np.array([0, 1e-30, 2**-40, 1], np.float32)
    out, codes = np.zeros_like(values), np.zeros(4, np.uint8)
    _round_trip_unsigned(values, codes, out, U32(0))
    assert out[0] == 0
    assert (out[1:] > 0).all()
    assert out[3] == 1


# Landing


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_landing_equals_torch(target: str, source: str, add: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    here, there = (torch.randn(1000, generator=generator).to(getattr(torch, d)) for d in (target, source))
    there[3], there[5] = float("inf"), float("nan")
    expected = there.to(here.dtype) if not add else (here.float() + there.float()).to(here.dtype)
    sum_of_squares = landing_kernel(target, source, add)(as_array(here), as_array(there))
    assert np.isnan(sum_of_squares)
    torch.testing.assert_close(here, expected, rtol=0, atol=0, equal_nan=True)
    here[3] = here[5] = 0
    again = squared_norm_kernel(target)(as_array(here))
    assert again == pytest.approx(float(here.double().square().sum()), rel=1e-14)


def test_sum_of_squares_neither_overflows_nor_loses_digits() -> None:
    values = np.full(3_000_000, 1e30, np.float32)
    assert squared_norm_kernel("float32")(values) == pytest.approx(3e66, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_landing_rows_equals_index_add(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 64, generator=generator).to(getattr(torch, dtype))
    source = torch.randn(20, 64, generator=generator).to(table.dtype)
    rows = torch.randperm(50, generator=generator)[:20]
    expected = table.clone()
    expected[rows] = (table[rows].float() + source.float()).to(table.dtype)
    before = float(table.double().square().sum())
    change = landing_rows_kernel(dtype, True)(as_array(table), as_array(source), rows.numpy())
    assert torch.equal(table, expected)
    assert before + change == pytest.approx(float(table.double().square().sum()), rel=1e-12)
