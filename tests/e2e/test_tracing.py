"""The predicted and measured traces of a run, and their report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.planning.arithmetic.catalog import own_profile_path
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support.handmade_outlines import machine


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of five steps on a machine with a profile."""
    folder = tmp_path_factory.mktemp("traced")
    model = tiny.save_model(folder / "model")
    rows = tiny.write_jsonl(folder / "train.jsonl", tiny.alpaca_rows(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        replace(machine(device="cpu", device_bandwidth=1e10, cores=2), name="measured").save(own_profile_path())
        result = run(
            "train", "--model_name_or_path", model, "--datasets", rows, "--output_dir", folder / "run", "--device", "cpu",
            "--per_device_train_batch_size", 2, "--max_steps", 5, "--trace_steps", 2,
        )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "expected: " in result.stdout
    return folder / "run"


def events(file: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == phase]


def names_within(file: Path, step: dict[str, float]) -> list[str]:
    """Return the operations that start in a step, except updates, which may start earlier, and outer ones, which take
    no time.
    """
    return sorted(
        event["name"]
        for event in events(file, "X")
        if step["start"] <= event["ts"] < step["end"]
        and not event["cat"].startswith("update")
        and not event["name"].endswith("outer")
    )


def steps(file: Path) -> list[dict[str, float]]:
    return json.loads(file.read_text())["otherData"]["steps"]


def test_all_operations_of_traced_steps_are_recorded(traced: Path) -> None:
    measured = steps(traced / "trace.json")
    assert [step["step"] for step in measured] == [3, 4]
    first, second = (names_within(traced / "trace.json", step) for step in measured)
    assert first == second
    for unit in ("block0", "block1", "head", "embed"):
        assert f"forward {unit}" in first
        assert f"backward {unit}" in first
    assert first.count("stream_in block0") == first.count("stream_in block1") == 2
    updated = {event["name"] for event in events(traced / "trace.json", "X") if event["cat"] == "update"}
    assert {"update block0", "update block1", "update embed"} <= updated


def test_predicted_trace_has_the_same_operations_and_format(traced: Path) -> None:
    (predicted,) = steps(traced / "predicted_trace.json")
    (measured, _) = steps(traced / "trace.json")
    simulated, real = (
        set(names_within(traced / name, step))
        for name, step in (("predicted_trace.json", predicted), ("trace.json", measured))
    )
    assert simulated == real
    for phase in ("M", "X", "C"):
        keys = [{frozenset(e) for e in events(traced / n, phase)} for n in ("trace.json", "predicted_trace.json")]
        assert keys[0] == keys[1] != set()
    plan = json.loads((traced / "plan.json").read_text())
    assert predicted["end"] * 1e-6 == pytest.approx(plan["step"]["seconds"], rel=1e-3)


def test_memory_is_counted_along_the_trace(traced: Path) -> None:
    samples = events(traced / "trace.json", "C")
    assert {sample["name"] for sample in samples} == {"device bytes", "host bytes"}
    assert all(sample["args"]["bytes"] > 0 for sample in samples)
    planned = json.loads((traced / "plan.json").read_text())
    buffers = sum(
        item["bytes"] for item in planned["host"]["items"]
        if item["name"].startswith("device: ") and not item["name"].endswith(("activation checkpoints", "workspace", "positions"))
    )  # fmt: skip
    assert max(sample["args"]["bytes"] for sample in samples if sample["name"] == "device bytes") <= buffers


def test_the_report_shows_both(traced: Path) -> None:
    result = run("report", traced)
    assert result.exit_code == 0, result.stderr
    page = (traced / "report.html").read_text(encoding="utf-8")
    assert "Predicted" in page
    assert "Measured" in page
    assert (traced / "loss.png").stat().st_size > 1000


def test_short_run_is_traced_to_its_end(tmp_path: Path, traced: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.alpaca_rows(4))
    result = run(
        "train", "--model_name_or_path", traced / "model", "--datasets", rows, "--output_dir", tmp_path / "run",
        "--device", "cpu", "--max_steps", 2, "--trace_steps", 5,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert [step["step"] for step in steps(tmp_path / "run/trace.json")] == [1, 2]
