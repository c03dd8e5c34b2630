"""Over 2,000 steps with a hundred checkpoints, a run holds no more memory, files or threads than after a fifth of them."""

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import TrainerCallback

import horizon_lm
from tests.e2e import tiny

NUM_STEPS, WARM_UP = 2000, 400
MIB = 1 << 20
WATCHDOG = "horizon-watchdog"  # a timer, which is there now and then


class Usage(TrainerCallback):
    """Notes what the process holds, between two checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.noted = folder, dict[int, dict[str, Any]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % (WARM_UP // 2) == WARM_UP // 2 - 1:
            process = psutil.Process()
            self.noted[state.global_step + 1] = {
                "resident MiB": process.memory_info().rss // MIB,
                "files": process.num_fds(),
                "threads": sorted(thread.name for thread in threading.enumerate() if thread.name != WATCHDOG),
                "temporary files": len(os.listdir(tempfile.gettempdir())),
                "files of the run": sum(1 for _ in self.folder.rglob("*")),
            }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_run_holds_nothing_more(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -s, the figures are printed."""
    (own := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(14))
    usage = Usage(tmp_path / "run")
    settings = {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(usage.folder), "device": "cpu",
        "per_device_train_batch_size": 2, "max_steps": NUM_STEPS, "save_steps": 20, "eval_strategy": "steps", "eval_steps": 100,
        "test_split_size": 2, "sample_prompts": ["Why?"], "sample_steps": 100, "sample_max_new_tokens": 2,
    }  # fmt: skip
    horizon_lm.train(settings, callbacks=[usage], print_fn=lambda line: None)
    for step, figures in usage.noted.items():
        print(step, figures)
    warm, end = usage.noted[WARM_UP], usage.noted[NUM_STEPS]
    assert end.pop("resident MiB") <= warm.pop("resident MiB") + 8
    assert end == warm
