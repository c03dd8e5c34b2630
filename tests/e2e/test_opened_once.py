"""A run opens its model once: from its admission to its first step, one config is read and one skeleton is built."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.model import hf_config, skeletons
from horizon_lm.planning.measure import model_outline
from tests.e2e import tiny
from tests.e2e.command import run

LORA = "use_peft: true\nlora_target_modules: all-linear\n"


@pytest.mark.parametrize(
    ("settings", "objective"), [("", "sft"), (LORA, "sft"), (LORA + "load_in_4bit: true\n", "sft"), ("", "dpo")]
)
def test_a_run_reads_a_config_and_builds_a_skeleton_once(
    settings: str, objective: str, model: Path, tmp_path: Path, outlines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for module, name in ((hf_config, "read_config"), (skeletons, "build_skeleton")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), counts, name))
    monkeypatch.setattr(model_outline, "outline_model", outlines)  # no outline of another test
    pairs = [{"prompt": f"hello {i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", pairs if objective == "dpo" else tiny.alpaca_rows(4))
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\ndatasets: {rows}\noutput_dir: {tmp_path / 'run'}\ndevice: cpu\nobjective: {objective}\n"
        f"per_device_train_batch_size: 2\nmax_length: 64\n{settings}"
    )
    result = run("train", tmp_path / "run.yaml", "--max_steps", 1)
    assert result.exit_code == 0, result.stderr
    assert counts == {"read_config": 1, "build_skeleton": 1}


def counted(function: Any, counts: Counter[str], name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call
