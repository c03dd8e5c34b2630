"""The table can fail: rows that misbehave are found."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizon_lm.errors import ScheduleMismatchError, StreamingError
from tests.seams import seam
from tests.seams.compare import difference
from tests.seams.use import evaluated, is_streamed


def _other_number(model: Any) -> float:
    return evaluated(model) * (1.001 if is_streamed(model) else 1.0)


def _foreign_error(model: Any) -> None:
    if is_streamed(model):
        raise TypeError("something in the engine")


def _warns(model: Any) -> None:
    if is_streamed(model):
        warnings.warn("of something", stacklevel=1)


def _half_done(model: Any) -> None:
    if is_streamed(model):
        model.model.norm.weight.data.mul_(2)
        raise StreamingError("this is not possible")


def _left_unusable(model: Any) -> None:
    if is_streamed(model):
        model.model.norm = nn.Identity()
        raise StreamingError("this is not possible")


def _internal(model: Any) -> None:
    if is_streamed(model):
        raise ScheduleMismatchError("forward block1", "forward block2")


def _where_plain_raises(model: Any) -> None:
    if not is_streamed(model):
        raise RuntimeError("torch does not do that")


def _rejected(model: Any) -> None:
    if is_streamed(model):
        raise StreamingError("this is not possible at 0x7f00: do that instead")


def _outcome(monkeypatch: pytest.MonkeyPatch, body: Callable[[Any], Any], **settings: Any) -> seam.Outcome:
    monkeypatch.setitem(
        seam.ROWS, "control", seam.Row("control", "", "", seam.REJECTED, body, {"": seam.Case()}, **settings)
    )
    monkeypatch.setattr(seam, "_KNOWN", {})
    return seam.run.__wrapped__("control", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_other_number, "instead of"),
        (_foreign_error, "TypeError: something in the engine"),
        (_half_done, "the weights have changed"),
        (_left_unusable, "afterwards the"),
        (_internal, "nobody outside knows the schedule"),
        (_where_plain_raises, "a plain model raises RuntimeError"),
    ],
)
def test_bad_behaviour_is_found(body: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _outcome(monkeypatch, body)
    assert outcome.kind == seam.WRONG
    assert message in outcome.message


def test_a_rejection_has_the_expected_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _outcome(monkeypatch, _rejected) == seam.Outcome(
        seam.REJECTED, "StreamingError: this is not possible at 0x...: do that instead"
    )
    assert _outcome(monkeypatch, _rejected, says="stream\\(").kind == seam.WRONG


def test_an_expected_warning_is_required_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for expected in (True, False):
        assert _outcome(monkeypatch, _warns, warns=expected) == seam.Outcome(seam.WORKS, "of something")
    assert _outcome(monkeypatch, evaluated, warns=True).kind == seam.WRONG


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.001), (1, 2), ("a", "b"), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, torch.zeros(1)),
        (torch.zeros(2), torch.zeros(3)), (torch.ones(2), torch.ones(2) * 1.001), (torch.zeros(2), torch.full((2,), torch.nan)),
        (True, False), (torch.tensor([1]), torch.tensor([2])), (torch.zeros(4), torch.full((4,), 1e-5)),
    ],
)  # fmt: skip
def test_differences_are_found(one: Any, other: Any) -> None:
    assert difference(one, other, 1e-5) is not None
    assert difference(one, one, 1e-5) is None
    assert difference([{"x": one}], [{"x": other}], 1e-5) is not None
