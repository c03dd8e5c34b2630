"""The examples run with a tiny model and a few steps."""

from pathlib import Path

import pytest

from tests.e2e.command import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["sft", "pretrain", "dpo", "full_32b"])
def test_example(name: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ["--model_name_or_path", model, "--output_dir", tmp_path / "run", "--max_steps", "2", "--device", "cpu"]
    inspected = run("inspect", f"examples/{name}.yaml", "--model_name_or_path", model)
    assert inspected.exit_code == 0, inspected.stderr
    assert "batch 1" in inspected.stdout
    result = run("train", f"examples/{name}.yaml", *small)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_every_example_is_covered() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.yaml")) == ["dpo", "full_32b", "pretrain", "sft"]
