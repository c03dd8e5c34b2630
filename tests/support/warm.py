"""Imported by the processes that others are forked from: import and compile once what all of them would.

A forked process has the imports, the compiled kernels and the outlines of its parent. It is frozen last, so that no garbage
collection of theirs visits, and copies, what they share.
"""

import atexit
import gc
import tempfile
from pathlib import Path

import torch

import horizon_lm
from tests.e2e import tiny
from tests.support import remembered, tiny_models

torch.set_num_threads(1)
remembered.remember_for_good()


def _train_a_run(moments: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(4))
        settings = {
            "model_name_or_path": str(tiny.save_model(folder / "model")),
            "datasets": str(rows),
            "eval_datasets": str(rows),
        }
        horizon_lm.train(
            {**settings, "output_dir": str(folder / "run"), "device": "cpu", "max_steps": 2, "moments": moments},
            print_fn=lambda text: None,
        )


def _compile(precision: str, moments: str) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), device="cpu", precision=precision)
    optimizer = horizon_lm.AdamW(model, moments=moments)
    model(**tiny_models.batch(), use_cache=False).loss.backward()
    optimizer.step()


for each in ("float32", "8bit"):
    _train_a_run(each)
    _compile("float32", each)
_compile("fp32_master", "float32")
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # what is left when the interpreter ends is a leak to triton's nanobind
