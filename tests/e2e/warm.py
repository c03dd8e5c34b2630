"""Imported by the process that `processes` forks runs from: train once, so that they need not compile and import again."""

import gc
import tempfile
from pathlib import Path

import torch

import horizon_lm
from tests.e2e import tiny

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(4))
    settings = {
        "model_name_or_path": str(tiny.save_model(folder / "model")),
        "datasets": str(rows),
        "eval_datasets": str(rows),
    }
    horizon_lm.train(
        {**settings, "output_dir": str(folder / "run"), "device": "cpu", "max_steps": 2},
        print_fn=lambda text: None,
    )
gc.collect()
gc.freeze()  # so that no collection in a run visits, and copies, what all of them share
