"""What a plan says would make a step faster is what a plan with these settings says."""

import re
from dataclasses import replace
from typing import Any

import pytest

from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.request import Limit, Machine, Request
from tests.support.handmade_outlines import dense, machine

GIB = 2**30
OUTLINE = dense(length=1024)
SLOW_HOST = machine(host_bandwidth={"16": 120e9})


def plan(hardware: Any = SLOW_HOST, room: int | None = None, **request: Any) -> Plan:
    limits = [] if room is None else [Limit("the device", room)]
    wanted = {"per_device_train_batch_size": 16, "activation_checkpoints": "host", "clips_gradients": True, **request}
    return make_plan(OUTLINE, Request(**wanted), Machine("here", False, hardware, device_limits=limits))


def rate(made: Plan) -> float:
    assert made.time is not None
    return made.time.tokens_per_second


def said(made: Plan, name: str) -> list[str]:
    return [reason for reason in made.reasons if name in reason]


def instead(sentence: str) -> list[int]:
    """Return the two rates of a sentence."""
    found = re.search(r"would give ([\d,]+) tokens/s instead of ([\d,]+)", sentence)
    assert found is not None
    return [int(each.replace(",", "")) for each in found.groups()]


def test_more_tokens() -> None:
    """The smallest batch with which the updates are hidden, at the rate that its own plan has."""
    made = plan()
    (sentence,) = said(made, "per_device_train_batch_size")
    rows, tokens = re.search(r"per_device_train_batch_size: (\d+), ([\d,]+) tokens a step", sentence).groups()
    larger = plan(per_device_train_batch_size=int(rows))
    assert instead(sentence) == [round(rate(larger)), round(rate(made))]
    assert int(tokens.replace(",", "")) == larger.step.tokens
    threshold = made.time.hidden_from_tokens["update"]
    assert larger.step.tokens - made.step.tokens < threshold <= larger.step.tokens
    assert "optimizer fully overlapped" in sentence
    assert not said(larger, "would give")


def test_padded_tokens_are_not_counted() -> None:
    """Real rows are shorter than the longest: both rates are theirs."""
    made = plan(tokens_per_step=12_000.0)
    (sentence,) = said(made, "per_device_train_batch_size")
    whole = instead(said(plan(), "per_device_train_batch_size")[0])
    assert instead(sentence) == pytest.approx([each * 12_000 / 16_384 for each in whole], abs=1)


def test_as_many_tokens_as_fit() -> None:
    """A batch that does not fit is not named, and one that hides only a part is not said to hide it all."""
    settings = {"activation_checkpoints": "device", "device_micro_batch_size": 1}
    made = plan(room=20 * GIB, **settings)
    assert not made.memory_deficit
    (sentence,) = said(made, "per_device_train_batch_size")
    rows = int(re.search(r"per_device_train_batch_size: (\d+),", sentence)[1])
    assert "fully overlapped" not in sentence
    assert not plan(room=20 * GIB, **settings | {"per_device_train_batch_size": rows}).memory_deficit
    assert plan(room=20 * GIB, **settings | {"per_device_train_batch_size": 2 * rows}).memory_deficit


def test_updates_in_the_backward_pass() -> None:
    made = plan()
    (sentence,) = said(made, "update_in_backward")
    assert instead(sentence) == [round(rate(plan(update_in_backward=True))), round(rate(made))]
    assert sentence.endswith(", but gradients could not be clipped (max_grad_norm: 0)")
    (unclipped,) = said(plan(clips_gradients=False), "update_in_backward")
    assert unclipped == sentence.partition(", but gradients")[0]


@pytest.mark.parametrize(
    "request_", [{"update_in_backward": True}, {"skips_steps": True}, {"optimizer": OPTIMIZERS["muon"]}], ids=str
)
def test_updates_that_cannot_move_into_the_backward_pass(request_: dict[str, Any]) -> None:
    assert not said(plan(**request_), "update_in_backward: true would")


def test_nothing_is_said_of_a_step_that_computes() -> None:
    made = plan(machine(host_bandwidth={"16": 4000e9}), per_device_train_batch_size=32)
    assert made.time.limited_by == "compute"
    assert not said(made, "would")


def test_a_batch_that_no_run_has_is_not_named() -> None:
    """With a host that takes minutes for its updates, 64 times the rows are the most."""
    made = plan(replace(SLOW_HOST, host_bandwidth={"16": 0.2e9}, link_both=0.1e9))
    (sentence,) = said(made, "per_device_train_batch_size")
    assert "per_device_train_batch_size: 1024," in sentence
    assert "fully overlapped" not in sentence
