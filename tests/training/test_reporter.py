"""Lines of metrics as text."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from horizon_lm.runs.training import reporter
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.metrics_text import format_line

LINE: dict[str, Any] = {
    "step": 4, "epoch": 0.5, "loss": 1.25, "grad_norm": 2.0, "learning_rate": 1e-5, "trained_tokens_per_second": 10.0,
    "tokens_per_second": 20.0, "device_bytes_peak": 2**20, "host_bytes": 2**30, "eta_seconds": 60.0, "of_planned_speed": 1.0,
}  # fmt: skip


def test_training_line() -> None:
    line = format_line(LINE, 8)
    assert line.startswith("step 4/8  epoch 0.50  loss 1.2500  grad norm 2.00  lr 1.00e-05  ")
    assert "planned speed" not in line


def test_metrics_of_tokens_and_of_pairs() -> None:
    """Preferences show the metrics of pairs only, to keep lines short."""
    tokens = {"mean_token_accuracy": 0.5, "entropy": 2.125}
    assert "  loss 1.2500  token accuracy 0.500  entropy 2.125  grad norm" in format_line(LINE | tokens, 8)
    pairs = {"rewards/margins": 0.25, "rewards/accuracies": 0.75}
    assert "  loss 1.2500  margin 0.250  accuracy 0.750  grad norm" in format_line(LINE | tokens | pairs, 8)
    evaluation = {"step": 4, "eval_loss": 1.25, **{f"eval_{name}": value for name, value in tokens.items()}}
    assert format_line(evaluation, 8) == "step 4/8  eval loss 1.2500  token accuracy 0.500  entropy 2.125"


@pytest.mark.parametrize(("of_planned", "reported"), [(0.14, True), (0.5, False), (None, False)])
def test_steps_much_slower_than_planned_are_reported(of_planned: float | None, reported: bool) -> None:
    line = format_line({**LINE, "of_planned_speed": of_planned}, 8)
    assert line.endswith("  (14% of the planned speed)") == reported


def test_energy_where_it_is_known() -> None:
    assert "J/token" not in format_line(LINE | {"host_joules_per_token": None, "device_joules_per_token": None}, 8)
    assert "  0.25 J/token  device buffers " in format_line(
        LINE | {"host_joules_per_token": 0.05, "device_joules_per_token": 0.2}, 8
    )


def test_skipped_step_has_no_loss() -> None:
    assert "loss none" in format_line({**LINE, "loss": None}, 8)


@pytest.mark.parametrize(("rate", "text"), [(0.42, "0.4"), (10.0, "10.0"), (99.96, "100"), (12345.6, "12,346")])
def test_slow_rates_have_decimals(rate: float, text: str) -> None:
    line = {**LINE, "tokens_per_second": rate, "trained_tokens_per_second": rate / 2}
    assert f"tokens/s {text} (" in format_line(line, 8)


def test_steps_show_where_no_line_was_printed_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = {"seconds": 100.0}
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now["seconds"])
    with reporter.Reporter(lines.append) as shown:
        shown.begin(LineFile(tmp_path / "metrics.jsonl"), 50, lambda line: None)
        for step, seconds in ((1, 129.0), (2, 131.0), (3, 140.0), (4, 162.0)):
            now["seconds"] = seconds
            shown.advance(step, 1.5)
    assert lines == ["step 2/50  loss 1.5000", "step 4/50  loss 1.5000"]


@pytest.mark.parametrize("width", [70, 80, 100, 120, 200])
def test_a_line_fits_a_terminal(width: int) -> None:
    """What matters most stays: the losses, the speed and the remaining time."""
    training = LINE | {
        "step": 12_000, "epoch": 12.5, "mean_token_accuracy": 0.512, "entropy": 1.25, "tokens_per_second": 12345.0,
        "trained_tokens_per_second": 1234.0, "host_joules_per_token": 0.05, "device_joules_per_token": 0.2,
        "host_bytes": 100 * 2**30, "eta_seconds": 36000.0,
    }  # fmt: skip
    evaluation = {"step": 12_000, "eval_loss": 1.25, "eval_tokens": 123_456, "eval_perplexity": 3.49} | {
        "eval_mean_token_accuracy": 0.512, "eval_entropy": 1.25,
    }  # fmt: skip
    for line, kept in (
        (training, ("step 12000/24000", "loss 1.2500", "tokens/s 12,345", "ETA 10 h")),
        (evaluation, ("loss 1.2500",)),
    ):
        text = format_line(line, 24_000, width)
        assert len(text) <= width
        assert all(each in text for each in kept)
        assert text == format_line(line, 24_000) or len(text) > width - 24  # no more is left out than has to be


def test_lines_are_shortened_on_terminals_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for is_terminal in (False, True):
        monkeypatch.setattr("rich.console.Console.is_terminal", is_terminal)
        with reporter.Reporter() as shown:
            shown.begin(LineFile(tmp_path / "metrics.jsonl"), 50, lambda line: None)
            shown.show(LINE)
        text = capsys.readouterr().out
        line = next(each for each in text.splitlines() if "loss 1.2500" in each)
        assert ("host 1.00 GiB" in line, "ETA 1 min" in line) == (not is_terminal, True)


@pytest.mark.parametrize("width", [80, 100])
def test_the_progress_bar_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with reporter.Reporter() as shown:
        shown.begin(LineFile(tmp_path / "metrics.jsonl"), 10_000, lambda line: None)
        shown.advance(1234, 1.5)
        shown.note(1235, "backward, 101 of 128 blocks", "")
        drawn = io.StringIO()
        Console(file=drawn, width=width).print(shown._bar.get_renderable())
    assert len(drawn.getvalue().splitlines()) == 1
    assert all(each in drawn.getvalue() for each in ("1234/10000", "loss 1.5000", "backward, 101 of 128"))


def test_the_progress_bar_of_a_resumed_run_begins_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not FORCE_COLOR: rich ignores it where TTY_COMPATIBLE is 0, and in notebooks.
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with reporter.Reporter() as shown:
        shown.begin(LineFile(tmp_path / "metrics.jsonl"), 50, lambda line: None)
        shown.advance(41, 1.5)
        assert shown._bar.tasks[0].completed == 41


@pytest.mark.parametrize(
    ("seconds", "calls", "expected"),
    [
        (-1.0, (8, 16, 18), ["eval set: 8 of 18", "eval set: 16 of 18", "eval set: 18 of 18"]),
        (-1.0, (8, 16), ["eval set: 8 of 18", "eval set: 16 of 18", "eval set: 18 of 18"]),  # the rest was known
        (1e9, (8, 16, 18), []),
    ],
)
def test_lines_of_progress_reach_the_end(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: tuple[int, ...], expected: list[str]
) -> None:
    monkeypatch.setattr(reporter, "_PROGRESS_SECONDS", seconds)
    said: list[str] = []
    with reporter.Reporter(said.append) as shown, shown.progress("eval set") as advance:
        for done in calls:
            advance(done, 18)
    assert said == expected


def test_the_last_line_of_progress_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that ends soon after a line has one more, and work that is interrupted has none."""
    clock = iter([0.0, 11.0, 11.0, 12.0, 0.0, 11.0, 11.0])
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: next(clock))
    said: list[str] = []
    with reporter.Reporter(said.append) as shown:
        with shown.progress("reference") as advance:
            advance(8, 10)
            advance(10, 10)
        with suppress(KeyboardInterrupt), shown.progress("eval set") as advance:
            advance(8, 10)
            raise KeyboardInterrupt
    assert said == ["reference: 8 of 10", "reference: 10 of 10", "eval set: 8 of 10"]
