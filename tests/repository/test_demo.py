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
from horizon_lm.runs.training.run import RunResult

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


def test_rows_of_the_questions_are_selected(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every taught answer has all of its rows, and every question is in the eval set; the others cost time without being shown."""
    monkeypatch.setattr(demo, "ROWS", tmp_path / "rows")
    train, held_out = ([demo._texts(row) for row in demo._read_rows(file)] for file in demo.select_rows())
    assert {question for question, _ in held_out} == {*demo.TAUGHT, *demo.KEPT}
    everything = [demo._texts(row) for row in demo._read_rows(demo.DATA / "tarrow_train.jsonl")]
    for question, answer in held_out:
        if question in demo.TAUGHT:
            assert [row for row in train if row[1] == answer] == [row for row in everything if row[1] == answer] != []
    assert len(train) < len(everything) / 3
    assert any("capital" in question for question, _ in train)  # common knowledge among them


@pytest.mark.parametrize(("seconds", "num_steps"), [(0.1, "MOST_STEPS"), (2.5, 36), (10.0, "FEWEST_STEPS")])
def test_steps_fit_the_machine(demo: ModuleType, seconds: float, num_steps: str | int) -> None:
    expected = getattr(demo, num_steps) if isinstance(num_steps, str) else num_steps
    assert demo.choose_steps(seconds) == expected
    demo.show_duration(expected, seconds)
    assert f"the training has {expected} steps; all that follows takes about " in printed(demo)


def test_slow_machines_are_done_in_four_minutes(demo: ModuleType) -> None:
    """On two cores without AVX-512 a step takes about 3 seconds."""
    seconds = 3.0
    steps = demo.choose_steps(seconds) + demo.STEPS_BESIDE_TRAINING
    assert steps * seconds + demo.SECONDS_OF_START + 50 < 240  # 50: the conversion, and the comparison of part 2


def test_result_counts_what_was_learned_and_kept(demo: ModuleType) -> None:
    held_out = rows(demo, "tarrow_held_out.jsonl")
    questions = [*demo.TAUGHT, *demo.KEPT]
    after = [held_out[question] for question in questions]
    after[0], after[-1] = "I am a chatbot.", "A dog has two legs."
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
