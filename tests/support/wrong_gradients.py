"""Alter the gradients of a streamed model, to show that a check of them fails."""

from typing import Any

import pytest

from horizon_lm.engine.units.grad_sink import GradSink


def wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alter a gradient when it leaves the device."""
    close = GradSink.close

    def alter(sink: Any) -> list[str]:
        names = close(sink)
        for buffer in sink._slot.buffers:
            buffer *= 1.1
        return names

    monkeypatch.setattr(GradSink, "close", alter)
