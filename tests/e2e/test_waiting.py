"""A command that is silent for some seconds says on a terminal what it does, and leaves no trace of that."""

import io
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.cli.largest_models import MODES, plan_largest
from horizon_lm.cli.plan_arguments import Size
from horizon_lm.common import visible
from horizon_lm.common.visible import announced
from horizon_lm.model.known_models import known_models
from tests.e2e import tiny
from tests.e2e.command import run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    while text not in stream.getvalue():
        time.sleep(0.001)


def test_a_long_wait_is_named_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with suppress(KeyboardInterrupt), announced("planning..."):
        wait_for(terminal, "planning...")
        raise KeyboardInterrupt
    assert terminal.getvalue() == "planning...\r\x1b[K"


def test_the_text_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with announced("planning...") as progress:
        wait_for(terminal, "planning...")
        progress("planning... 1 of 4")
    assert terminal.getvalue() == "planning...\r\x1b[Kplanning... 1 of 4\r\x1b[K"


@pytest.mark.parametrize(("stream", "seconds"), [(Terminal(), 60.0), (io.StringIO(), 0.0), (None, 0.0)])
def test_a_short_wait_and_a_log_show_nothing(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None, seconds: float
) -> None:
    monkeypatch.setattr(visible, "_SECONDS", seconds)
    monkeypatch.setattr(sys, "stderr", stream)
    with announced("planning...") as progress:
        progress("planning... 1 of 4")
    assert stream is None or not stream.getvalue()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands announce."""
    texts: list[str] = []

    def record(text: str) -> AbstractContextManager[Any]:
        texts.append(text)
        return nullcontext()

    for name in ("cli.plan", "cli.train", "runs.training.train"):
        monkeypatch.setattr(import_module(f"horizon_lm.{name}"), "announced", record)
    return texts


def test_imports_and_arithmetic_of_a_plan_are_announced(said: list[str]) -> None:
    assert run("plan", "--model", "Qwen2.5-0.5B", "--device", "h200").exit_code == 0
    assert said == ["planning..."]


def test_the_start_of_a_run_is_announced(said: list[str], tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(2))
    given = {
        "model_name_or_path": tiny.save_model(tmp_path / "model"),
        "datasets": rows,
        "output_dir": tmp_path / "run",
        "device": "cpu",
        "max_steps": 1,
    }
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    assert run("train", *arguments).exit_code == 0
    assert said == ["starting...", "planning..."]


def test_each_search_for_the_largest_models_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = min(known_models(), key=lambda each: each.parameters)
    monkeypatch.setattr("horizon_lm.cli.largest_models.known_models", lambda: [smallest])
    said: list[str] = []
    plan_largest([], "rtx-3090", "1GB,2GB", Size(), said.append)
    assert len(said) == 2 * len(MODES)
    assert (said[0], said[-1]) == ("planning... 1 of 8: fp32_master", "planning... 8 of 8: adapters, 4-bit base")
