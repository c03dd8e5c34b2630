"""NaN and infinity are preserved wherever fp32 bits are split or rounded, and no checkpoint with them is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.memory.kernels.bits import kernel, nearest, stochastic
from horizon_lm.memory.kernels.formats import _read_split, _write_split
from horizon_lm.memory.precision import join_master, split_master
from tests.support import tiny_models

NANS = (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FFF8000, 0xFFFF7FFF, 0x7FC00000, 0xFFC00000)
INFINITIES = (0x7F800000, 0xFF800000)
NOISE = (0, 1, 0x7FFF, 0x8000, 0xFFFF)  # 16 random bits


def from_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def _widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


@kernel
def _rounded(values: Any, noise: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = stochastic(values[i], noise)


@kernel
def _to_nearest(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = nearest(values[i])


@kernel
def _split(values: Any, high: Any, low: Any, back: Any) -> None:
    for i in range(len(values)):
        _write_split(high, low, i, values[i], np.uint32(0))
        back[i] = _read_split(high, low, i)


def by_store(values: np.ndarray) -> list[np.ndarray]:
    high, low = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    split_master(torch.from_numpy(values.copy()), high, low)
    return [high.float().numpy(), join_master(high, low).numpy()]


def by_kernel(values: np.ndarray) -> list[np.ndarray]:
    high, low, back = np.zeros(len(values), np.uint16), np.zeros(len(values), np.int16), np.zeros_like(values)
    _split(values, high, low, back)
    return [_widened(high), back]


def by_rounding(values: np.ndarray) -> list[np.ndarray]:
    halves = [np.zeros(len(values), np.uint16) for _ in NOISE]
    for noise, out in zip(NOISE, halves, strict=True):
        _rounded(values, np.uint32(noise), out)
    return [_widened(out) for out in halves]


def to_nearest(values: np.ndarray) -> list[np.ndarray]:
    out = np.zeros(len(values), np.uint16)
    _to_nearest(values, out)
    return [_widened(out)]


def by_streaming(values: np.ndarray) -> list[np.ndarray]:
    """Return the weights seen by the forward pass of a model in memory, and the exported weights."""
    found = []
    for precision in ("fp32_master", "bf16", "float32"):
        plain = tiny_models.build("llama")
        plain.model.layers[1].mlp.up_proj.weight.data[0, : len(values)] = torch.from_numpy(values.copy())
        model = horizon_lm.stream(plain, precision=precision)
        weight = model.model.layers[1].mlp.up_proj.weight
        name = "model.layers.1.mlp.up_proj.weight"
        for kept in (weight.data.float(), model._horizon.engine.store.master(name)):
            found.append(kept[0, : len(values)].numpy())
    return found


PLACES: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "store": by_store, "kernel": by_kernel, "stochastic": by_rounding, "nearest": to_nearest, "stream": by_streaming,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bits", NANS, ids=hex)
def test_nan_stays_nan(bits: int, place: str) -> None:
    for found in PLACES[place](from_bits(*[bits] * 8)):
        assert np.isnan(found).all()


@pytest.mark.parametrize("place", PLACES)
def test_infinity_stays_infinity(place: str) -> None:
    values = from_bits(*INFINITIES)
    for found in PLACES[place](values):
        assert np.array_equal(found, values)


def test_other_values_are_split_and_rounded_as_before() -> None:
    """Test all 16 high bits that are not NaN, with the low bits around which rounding changes."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low).reshape(-1)
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
    values = bits.view(np.float32)
    away_from_zero = _widened(((bits + np.uint32(0x8000)) >> 16).astype(np.uint16))
    for place in (by_store, by_kernel):
        high, back = place(values)
        assert high.tobytes() == away_from_zero.tobytes()
        assert back.tobytes() == values.tobytes()
    for noise, found in zip(NOISE, by_rounding(values), strict=True):
        assert found.tobytes() == _widened(((bits + np.uint32(noise)) >> 16).astype(np.uint16)).tobytes()
    assert to_nearest(values)[0].tobytes() == torch.from_numpy(values).bfloat16().float().numpy().tobytes()


# Checkpoints


def spoil(folder: Path, values: dict[str, float], dtype: torch.dtype = torch.float32) -> None:
    """Write a value at two places in each of these tensors."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, value in values.items():
        tensors[name].view(-1)[3:5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.embed_tokens.weight"), ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight")],
)
def test_a_checkpoint_with_non_finite_weights_is_rejected(
    family: str, name: str, value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_models.build(family).save_pretrained(tmp_path)
    spoil(tmp_path, {name: value}, dtype)
    with pytest.raises(ConfigError, match=f"{name}.* 2 .*model.safetensors") as raised:
        horizon_lm.from_pretrained(tmp_path)
    assert "download" in str(raised.value)


def test_a_checkpoint_with_finite_weights_is_loaded(tmp_path: Path) -> None:
    """The largest and smallest numbers are finite."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    spoil(tmp_path, {"model.embed_tokens.weight": 3e38})
    model = horizon_lm.from_pretrained(tmp_path)
    assert model.get_input_embeddings().weight.data.float().abs().max() > 2.9e38
