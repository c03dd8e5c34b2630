"""Compare values of a plain model with those of a streamed model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def difference(expected: Any, got: Any, tolerance: float, place: str = "") -> str | None:
    """Describe the first place where two values differ; None if they are equal up to ``tolerance``, relative."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        if expected.keys() != got.keys():
            return f"{place or 'names'}: {sorted(map(str, expected.keys() ^ got.keys()))[:4]} are on one side only"
        pairs = [(f"{place}.{key}".lstrip("."), expected[key], got[key]) for key in expected]
        return next((found for at, a, b in pairs if (found := difference(a, b, tolerance, at))), None)
    if isinstance(expected, Sequence) and isinstance(got, Sequence) and not isinstance(expected, str):
        if len(expected) != len(got):
            return f"{place}: {len(got)} values instead of {len(expected)}"
        pairs = [(f"{place}[{number}]", a, b) for number, (a, b) in enumerate(zip(expected, got, strict=True))]
        return next((found for at, a, b in pairs if (found := difference(a, b, tolerance, at))), None)
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_difference(expected, got, tolerance, place)
    if isinstance(expected, float) and isinstance(got, float):
        return _tensor_difference(torch.tensor(expected), torch.tensor(got), tolerance, place)
    if type(expected) is type(got) and not isinstance(got, torch.Tensor) and expected == got:
        return None
    return f"{place}: {_short(got)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _tensor_difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float, place: str) -> str | None:
    if expected.shape != got.shape:
        return f"{place}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if expected.is_meta or got.is_meta:
        return f"{place}: without values, on the meta device"
    if not expected.is_floating_point():
        return None if torch.equal(expected, got) else f"{place}: {got.tolist()} instead of {expected.tolist()}"
    a, b = expected.detach().double(), got.detach().double()
    if not torch.equal(a.isnan(), b.isnan()):
        return f"{place}: {int(b.isnan().sum())} NaN instead of {int(a.isnan().sum())}"
    gap, norm = float((a - b).nan_to_num().norm()), float(a.nan_to_num().norm())
    if gap <= tolerance * norm + 1e-7 * min(1.0, tolerance * 1e6) * a.numel() ** 0.5:
        return None
    if a.numel() == 1:
        return f"{place}: {float(b):.6g} instead of {float(a):.6g}"
    return f"{place}: off by {gap / max(norm, 1e-30):.2g} of its norm"
