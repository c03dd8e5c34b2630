"""The rate that README states for a measured run stands with the run's tokens per step, on which it depends."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_measured_rate_can_be_compared_with_a_plan() -> None:
    result = (ROOT / "benchmarks/results/gpu_7b_h100_2026-11-26.md").read_text(encoding="utf-8")
    row = re.search(r"\| qwen2\.5-7b \| \w+ \((\d+) x (\d+)\) \| horizon \|[^|]+\| ([\d,]+) \|", result)
    assert row is not None
    rows, length, rate = row.groups()
    status = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("**Status.**")[2].split())
    assert f"Qwen2.5-7B at {rate} tokens a second with {int(rows) * int(length):,} tokens a step" in status
    assert f"--max_length {length} --per_device_train_batch_size {rows}`" in status
