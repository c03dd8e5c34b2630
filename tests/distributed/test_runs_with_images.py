"""Runs of two ranks on rows of which some have images: the losses and weights of one process, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import horizon_lm
from horizon_lm.runs.data.loader import Loader
from tests.distributed.pool import Pool
from tests.distributed.runs import assert_same, interrupted, lines_of, run_as_rank
from tests.e2e.tiny import write_jsonl
from tests.support import image_models

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
ADAPTERS = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen tower": ("llava", {}),
    "trained tower": ("llava", ALL),
    "micro-batches": ("qwen2_5_vl", ALL | {"per_device_train_batch_size": 2, "device_micro_batch_size": 1}),
    "adapters": ("qwen3_5", ALL | ADAPTERS),
    "dpo": ("gemma3", ALL | {"objective": "dpo"}),
}


def settings(folder: Path, name: str) -> dict[str, Any]:
    """Write a model and its rows, and return the settings of a run of each rank."""
    kind, changes = CASES[name]
    texts = [{"prompt": f"Night {number}? ", "completion": f"{number} stars."} for number in range(9)]
    rows = [image_models.write_rows(folder, 9), write_jsonl(folder / "texts.jsonl", texts)]
    model = getattr(image_models, f"save_{kind}")(folder / "model")
    given: dict[str, Any] = {
        "objective": "sft", "model_name_or_path": str(model), "datasets": [*map(str, rows)],
        "device": "cpu", "precision": "float32", "per_device_train_batch_size": 1, "learning_rate": 3e-3, "logging_steps": 1,
        "max_steps": 7, "test_split_size": 3, "eval_strategy": "steps", "eval_steps": 3, "output_dir": str(folder / "ranks"),
    }  # fmt: skip
    return given | changes | (pairs(folder) if changes.get("objective") == "dpo" else {})


def pairs(folder: Path) -> dict[str, Any]:
    """Return settings for rows of preferences, of which every second has an image."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{'<image>' * (n % 2)}Night {n}? ", "chosen": "The keeper counts.", "rejected": "Rain.", "images": ["0.png"] * (n % 2)}
        for n in range(11)
    ]  # fmt: skip
    return {"datasets": [str(write_jsonl(folder / "pairs.jsonl", rows))], "learning_rate": 1e-3}


def with_images(rank: int, given: dict[str, Any]) -> dict[int, bool]:
    """Train as one of two ranks, and return for each step whether the batch of this rank has images."""
    seen: dict[int, bool] = {}
    build = Loader.batch

    def watched(self: Loader, step: int) -> Any:
        batch = build(self, step)
        seen[step] = bool(batch.image_inputs)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "batch", watched)
        run_as_rank(rank, 2, given)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_losses_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    """In some steps one rank has images and the other has none."""
    given = settings(tmp_path, name)
    seen = pool.run(2, with_images, given)
    assert {(seen[0][step], seen[1][step]) for step in range(given["max_steps"])} >= {(True, False), (False, True)}
    rows = 2 * given["per_device_train_batch_size"]
    alone = given | {"per_device_train_batch_size": rows, "output_dir": str(tmp_path / "one")}
    horizon_lm.train(alone, print_fn=lambda line: None)
    assert_same(tmp_path / "ranks", tmp_path / "one")


def test_a_resume_is_exact(pool: Pool, tmp_path: Path) -> None:
    """Two ranks that a signal has ended go on with the bits of two that were not interrupted; one process goes on from them, too."""
    given = settings(tmp_path, "trained tower") | {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    pool.run(2, run_as_rank, 2, given | {"output_dir": str(tmp_path / "whole")})
    for error in pool.run(2, interrupted, 2, given, 3):
        assert "by SIGTERM" in error
    checkpoint = tmp_path / "ranks" / "checkpoint-3"
    assert (checkpoint / "manifest.json").is_file()
    alone = given | {
        "per_device_train_batch_size": 2,
        "output_dir": str(tmp_path / "one"),
        "resume_from_checkpoint": str(checkpoint),
    }
    horizon_lm.train(alone, print_fn=lambda line: None)
    pool.run(2, run_as_rank, 2, given)
    whole, ranks, one = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "ranks", "one")
    )
    assert all(torch.equal(ranks[name], value) for name, value in whole.items())
    assert all(torch.allclose(one[name], value, atol=3e-4) for name, value in whole.items())
    losses, expected = (
        [line["loss"] for line in lines_of(tmp_path / each) if "loss" in line] for each in ("ranks", "whole")
    )
    assert losses == expected
