"""Noise on embeddings is that of transformers, from the same random numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler, set_seed
from transformers.integrations import activate_neftune

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.loader import Sampler, collate
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.training.loop import step_seed
from horizon_lm.runs.training.train import train
from tests.e2e import tiny
from tests.support.thinned_cases import thinned

NOISE = {"neftune_noise_alpha": 5.0}


def losses_of(model: Path, rows: Path, folder: Path, **settings: Any) -> dict[str, list[float]]:
    """Train for four steps and return the losses of steps and of evaluations."""
    config = {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(folder), "device": "cpu", "max_steps": 4, "head": "whole",
        "per_device_train_batch_size": 4, "device_micro_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 7,
        "precision": "float32", "save_strategy": "no", "max_grad_norm": 0.0, **settings,
    }  # fmt: skip
    train(config, print_fn=lambda text: None)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in ("loss", "eval_loss")}


@pytest.mark.parametrize("adapters", thinned([True, False], every=2))
def test_steps_equal_those_of_transformers(model: Path, tmp_path: Path, adapters: bool) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    lora = {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": "all-linear"} if adapters else {}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_datasets": str(rows)}
    ours = losses_of(model, rows, tmp_path / "noise", **NOISE, **lora, **evaluated)
    still = losses_of(model, rows, tmp_path / "still", **lora, **evaluated)
    assert ours["eval_loss"][0] == still["eval_loss"][0]  # evaluated without noise
    assert all(one != other for one, other in zip(ours["loss"], still["loss"], strict=True))

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    activate_neftune(plain, 5.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    scheduler = get_scheduler("linear", optimizer, 0, 4)
    dataset, tokenizer = DatasetConfig(path=str(rows), columns=None), AutoTokenizer.from_pretrained(model)
    table = prepare([dataset], tokenizer, PreprocessConfig("sft", max_length=1024)).rows
    sampler = Sampler((len(table),), 4, 7, (1.0,))
    for step in range(1 if adapters else 4):  # new adapters change nothing in the first step
        batch = collate([table[index] for index in sampler.rows(step)])
        set_seed(step_seed(7, step + 1))
        loss = plain(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels, num_items_in_batch=batch.num_trained
        ).loss  # fmt: skip
        assert ours["loss"][step] == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_kept_and_recomputed_blocks_see_the_same_noise(model: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    kept = losses_of(model, rows, tmp_path / "kept", **NOISE, resident_blocks=2, resident_graphs=2)
    recomputed = losses_of(model, rows, tmp_path / "recomputed", **NOISE, resident_blocks=0, resident_graphs=0)
    assert kept == recomputed
