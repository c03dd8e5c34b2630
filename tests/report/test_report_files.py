"""The files of a run as read by the report, and the errors for invalid files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.run_files import load_run, read_metrics, read_plan, read_samples, read_trace
from horizon_lm.tools.report.steps import busy_shares, step_views
from horizon_lm.tools.report.summary import median_step
from tests.report import report_run
from tests.report.report_run import metrics_file, span, step, taken, trace_file, training


def test_read_metrics(tmp_path: Path) -> None:
    found = read_metrics(
        metrics_file(
            tmp_path, report_run.evaluation(0, 5.0), training(1), training(3, loss=None), report_run.evaluation(3, 2.0)
        )
    )
    assert [(line.step, line.loss) for line in found.training] == [(1, 3.0), (3, None)]
    assert found.losses == [(1, 3.0)]
    assert [(each.step, each.eval_loss) for each in found.evaluations] == [(0, 5.0), (3, 2.0)]
    assert found.step_seconds == 400 / 203  # from its tokens, because a step excludes evaluations


@pytest.mark.parametrize("length", [1, 10, 100])
def test_truncated_last_line_is_skipped(tmp_path: Path, length: int) -> None:
    path = metrics_file(tmp_path, training(1), training(2))
    with path.open("a") as file:
        file.write(json.dumps(training(3))[:length])
    assert [line.step for line in read_metrics(path).training] == [1, 2]


def test_unused_fields_may_have_any_value(tmp_path: Path) -> None:
    lines = training(1, grad_norm=float("nan")), training(2, grad_norm=None, more="in a later version")
    assert len(read_metrics(metrics_file(tmp_path, *lines)).training) == 2


def test_last_line_without_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(training(1)))
    assert [line.step for line in read_metrics(path).training] == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1, "lo\n{good}\n', r"metrics.jsonl:1: Invalid JSON.*remove the line"),
        ("{good}\n\x00\x01\n{good}\n", r"metrics.jsonl:2: Invalid JSON"),
        ('{good}\n{"step": 2}\n', r"metrics.jsonl:2: loss: Field required"),
        ('{good}\n{"step": "2", "eval_loss": 1}\n', r"metrics.jsonl:2: step: Input should be a valid integer"),
        ("{good}\n[1, 2]\n", r"metrics.jsonl:2: "),
        (
            '{good}\n{good}\n{"step": 3, "lo\n',
            r"metrics.jsonl:3: Invalid JSON",
        ),  # a complete line is not left by a killed run
    ],
)
def test_invalid_metrics(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content.replace("{good}", json.dumps(training(1))))
    with pytest.raises(ConfigError, match=message):
        read_metrics(path)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets a value in a plan; arguments are the keys, then the value."""

    def change(plan: dict[str, Any]) -> None:
        *keys, last, value = path
        for key in keys:
            plan = plan[key]
        plan[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", 2), r"plan.json: version: "),
        (_set("host", "items", 1, "bytes", "1 GiB"), r"plan.json: host.items.1.bytes: Input should be a valid integer"),
        (_set("device", {}), r"plan.json: device.items: Field required"),
        (_set("memory", {"seconds": [0.0, 1.0], "device": [1.0], "host": [1.0, 2.0]}), r"the same number of values"),
    ],
)
def test_invalid_plan(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    plan = report_run.plan()
    change(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (span("knitting", "block0", 1, 0, 1), r"trace.json: traceEvents\[2\] .*'knitting' is not a valid Kind"),
        (span("forward", "block0", 5, 0, 1), r"traceEvents\[2\] is invalid"),
        ({"ph": "X", "name": "forward", "cat": "forward", "tid": 1, "ts": 0}, r"traceEvents\[2\] .*dur"),
        ({"ph": "C", "name": "device bytes", "ts": 0, "args": []}, r"traceEvents\[2\]"),
        ({"ph": "M", "name": "thread_name", "tid": 3, "args": {"name": "loom"}}, r"'loom' is not a valid Stream"),
    ],
)
def test_invalid_trace(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(trace_file(tmp_path, event))


def test_invalid_steps_of_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"otherData.steps .* ends before it begins"):
        read_trace(trace_file(tmp_path, steps=[step(1, 5, 5)]))
    assert median_step(read_trace(trace_file(tmp_path))) is None
    (tmp_path / "trace.json").write_text('{"traceEvents": [')
    with pytest.raises(ConfigError, match=r"trace.json: Invalid JSON"):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", r"config.yaml:2:2: not valid YAML"),
        ("- 1", "must have one setting per line"),
        ("a: 1\na: 2", "not valid YAML"),
    ],
)
def test_invalid_settings(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path)


def test_invalid_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1, "samples": []}\n{"step": 2, "samples": [{"prompt": 3}]}\n')
    with pytest.raises(ConfigError, match=r"samples\.jsonl:2: samples\.0\.prompt"):
        read_samples(path)


def test_median_step_and_its_operations(tmp_path: Path) -> None:
    trace_file(
        tmp_path,
        span("stream_in", "block0", 7, 8, 6),  # starts before the second step
        span("forward", "block0", 1, 14, 10),
        span("backward", "block0", 1, 26, 8),  # ends after it
        span("forward", "block0", 1, 40, 1),
        taken("device bytes", 2, 100), taken("device bytes", 20, 300), taken("device bytes", 31, 50),
        taken("other", 21, 7),
        steps=[step(1, 0, 10), step(2, 10, 30), step(3, 30, 100)],
    )  # fmt: skip
    (middle,) = step_views(load_run(tmp_path))
    assert (middle.title, middle.seconds) == ("Measured: 20 ms, step 2, the median of 3", pytest.approx(0.02))
    parts = middle.parts
    assert [str(part.span.op) for part in parts] == ["stream_in block0", "forward block0", "backward block0"]
    assert [(part.span.start, part.span.end) for part in parts] == [
        (0, pytest.approx(0.004)), (pytest.approx(0.004), pytest.approx(0.014)), (pytest.approx(0.016), pytest.approx(0.02)),
    ]  # fmt: skip
    assert [part.seconds for part in parts] == [pytest.approx(s) for s in (0.006, 0.010, 0.008)]
    shares = busy_shares([part.span for part in parts], middle.seconds)
    assert shares == pytest.approx({"copy_in": 0.2, "compute": 0.7, "copy_out": 0.0, "host": 0.0})
    assert middle.memory["device"] == [
        (0.0, 100), (pytest.approx(0.01), 300), (pytest.approx(0.02), 300),
    ]  # fmt: skip
    assert middle.memory["host"] == []


def test_trace_without_steps_is_one_step(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, span("forward", "head", 1, 5, 3), span("backward", "head", 1, 9, 2)))
    assert median_step(trace) == (1, pytest.approx(0.005), pytest.approx(0.011))


def test_median_of_two_steps_is_the_shorter(tmp_path: Path) -> None:
    trace = read_trace(trace_file(tmp_path, steps=[step(1, 0, 30), step(2, 30, 40)]))
    assert median_step(trace) == trace.steps[1]
