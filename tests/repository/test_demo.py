"""Test the texts of examples/demo.py and the rows behind them; `make demo FAST=1` runs it."""

import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from horizon_lm import errors
from horizon_lm.training.run import RunResult

ROOT = Path(__file__).parents[2]
RESULT = RunResult(Path("runs/demo"), Path("runs/demo/model"), 60, 4.6, 0.9, 0)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "console", Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True))
    monkeypatch.chdir(ROOT)
    return module


def printed(demo: ModuleType) -> str:
    return demo.console.file.getvalue()


def rows(demo: ModuleType, name: str) -> dict[str, str]:
    """Return the answers of a file of rows by question."""
    lines = (ROOT / "examples" / "data" / name).read_text(encoding="utf-8").splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    return {question["content"]: reply["content"] for question, reply in messages}


def test_questions_are_held_out(demo: ModuleType) -> None:
    """No question is trained on. The held-out rows have the answers, and those of kept facts contain the right word."""
    train, held_out = rows(demo, "tarrow_train.jsonl"), rows(demo, "tarrow_held_out.jsonl")
    assert not train.keys() & held_out.keys()
    assert held_out.keys() >= {*demo.TAUGHT, *demo.KEPT}
    assert all(word in held_out[question] for question, word in demo.KEPT.items())
    assert not any("France" in question or "Paris" in reply for question, reply in train.items())


def test_introduction_names_limit_duration_and_short_form(demo: ModuleType) -> None:
    demo.show_introduction(300 * 2**20, fast=False)
    text = printed(demo)
    assert "300.00 MiB" in text
    assert demo.DURATION in text
    assert f"`make demo FAST=1` takes {demo.FAST_DURATION}" in text


def test_result_counts_what_was_learned_and_kept(demo: ModuleType) -> None:
    held_out = rows(demo, "tarrow_held_out.jsonl")
    questions = [*demo.TAUGHT, *demo.KEPT]
    after = [held_out[question] for question in questions]
    after[0], after[-1] = "I am a chatbot.", "A year has twelve days."
    demo.show_result(RESULT, questions, ["before"] * len(questions), after)
    assert "learned, word for word: 4 of 5 answers; still known: 1 of 2 facts" in printed(demo)


@pytest.mark.parametrize("created", [True, False])
def test_next_steps_begin_with_the_environment_that_was_created(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv" if created else "/usr"))
    demo.show_next_steps(RESULT)
    lines = [line.strip() for line in printed(demo).split("Next:\n")[1].splitlines()]
    assert (lines[0] == "source .venv/bin/activate") is created
    assert any(line.startswith("horizon-lm generate runs/demo/model") for line in lines)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.InterruptedRunError("interrupted after step 1 of 60 by SIGTERM"), "The demo was interrupted."),
        (KeyboardInterrupt(), "The demo was interrupted."),
        (errors.ConfigError("the folder is full"), "error: the folder is full"),
    ],
)
def test_an_ended_demo_shows_no_traceback(monkeypatch: pytest.MonkeyPatch, error: BaseException, text: str) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setattr(os, "chdir", fail)  # called before the model is looked for, which may be missing here
    with pytest.raises(SystemExit, match=text):
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
