"""The planned disk space compared with the files of a run, and runs on a disk that is nearly full."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.command import run

KIB, MIB = 2**10, 2**20
SAVES = {"save_steps": 1}
ADAPTERS = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}
# Settings, and the most bytes by which the exported model and all checkpoints may be planned too large.
CASES = {
    "checkpoints": (SAVES, 0, 64 * KIB),
    "8-bit moments": (SAVES | {"moments": "8bit", "precision": "bf16"}, 0, 72 * KIB),
    "exports": (SAVES | {"save_only_model": True}, 0, 0),
    "bfloat16": ({"export_dtype": "bfloat16"}, 0, 0),
    "adapters": (SAVES | ADAPTERS, 16 * KIB, 96 * KIB),
}


def write_run_file(folder: Path, model: Path, **settings: Any) -> Path:
    rows = tiny.write_jsonl(folder / "train.jsonl", tiny.alpaca_rows(12))
    content = {
        "model_name_or_path": str(model), "datasets": [str(rows)], "output_dir": str(folder / "run"), "device": "cpu",
        "per_device_train_batch_size": 2, "max_steps": 2, "max_length": 128, **settings,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def planned_items(content: dict[str, Any]) -> dict[str, int]:
    return {item["name"]: item["bytes"] for item in content["disk"]["items"]}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "8-bit moments" else []) for case in CASES]
)
@pytest.mark.usefixtures("drawn")
def test_every_file_of_a_run_is_planned(case: str, tmp_path: Path, model: Path) -> None:
    settings, of_model, of_checkpoints = CASES[case]
    path = write_run_file(tmp_path, model, **settings)
    before = planned_items(json.loads(run("plan", path, "--json").stdout))
    result = run("train", path)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run"
    planned = planned_items(json.loads((folder / "plan.json").read_text()))
    assert planned == before
    exported = bytes_in(folder / "model")
    saved = sum(map(bytes_in, folder.glob("checkpoint-*")))
    assert 0 <= planned["exported model"] - exported <= of_model
    assert 0 <= planned.get("checkpoints", 0) - saved <= of_checkpoints
    assert bytes_in(folder) - exported - saved <= planned["records"] <= MIB + 8 * KIB


def test_plan_and_run_agree_on_a_nearly_full_disk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one byte less than planned, both reject the run with the same numbers; with all of them, both accept it."""
    path = write_run_file(tmp_path, model, save_steps=1)
    needed = sum(planned_items(json.loads(run("plan", path, "--json").stdout)).values())
    answers = {}
    for free in (needed - 1, needed):
        monkeypatch.setattr("horizon_lm.common.resources.disk_free", lambda place, free=free: free)
        for command in ("plan", "train"):
            result = run(command, path)
            lacks = re.findall(r"disk.* (\S+ \S+) short", result.stdout + result.stderr)
            answers[free, command] = result.exit_code, lacks
    assert answers[needed - 1, "plan"] == answers[needed - 1, "train"] == (3, ["1 B"])
    assert answers[needed, "plan"] == answers[needed, "train"] == (0, [])
    assert bytes_in(tmp_path / "run") <= needed


def test_disk_of_a_model_that_is_not_here_is_an_estimate() -> None:
    content = json.loads(run("plan", "--model", "Qwen2.5-0.5B", "--device", "h200", "--json").stdout)
    beside = planned_items(content)["exported model"] - 2 * content["model"]["parameters"]
    assert 8 * MIB < beside < 32 * MIB  # its tokenizer.json alone has 7
