"""What a signal does in each phase of a run. Whole commands are interrupted in tests/e2e/test_signals.py."""

import signal

import pytest

from horizon_lm.runs.training.interrupts import Interrupts, _Phase


@pytest.mark.parametrize(
    ("phase", "raised_by", "next_phase"),
    [
        (_Phase.STARTING, {"SIGINT", "SIGTERM", "SIGHUP"}, _Phase.CUT_OFF),
        (_Phase.CUT_OFF, {"SIGINT", "SIGTERM", "SIGHUP"}, _Phase.CUT_OFF),
        (_Phase.STEPPING, set(), _Phase.STOPPING),
        (_Phase.STOPPING, {"SIGINT", "SIGTERM"}, _Phase.STOPPING),
        (_Phase.LEAVING, set(), _Phase.LEAVING),
    ],
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_each_phase(phase: _Phase, raised_by: set[str], next_phase: _Phase, name: str) -> None:
    interrupts = Interrupts()
    interrupts._phase = phase
    raised = False
    try:
        interrupts._handle(signal.Signals[name], None)
    except KeyboardInterrupt:
        raised = True
    assert raised == (name in raised_by)
    assert interrupts._phase is next_phase
    assert interrupts.requested == ("" if phase is _Phase.LEAVING else name)
    if raised:
        interrupts._handle(signal.Signals[name], None)  # raises once only
