"""Evaluation, samples and the DPO reference do not change the steps of a run, even with dropout."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, get_scheduler, set_seed

import horizon_lm
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.loader import Sampler, collate
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.objective.base import evaluation_mode
from horizon_lm.runs.training.train import train
from tests.e2e import tiny
from tests.support import tiny_models


@pytest.fixture(scope="module")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with dropout everywhere."""
    folder, tokenizer = tmp_path_factory.mktemp("gpt2"), tiny.build_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0.2, embd_pdrop=0.2,
        attn_pdrop=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, folder: Path, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and return the loss of each step and the final weights."""
    folder.mkdir()
    config = {
        "model_name_or_path": str(model), "output_dir": str(folder / "run"), "device": "cpu", "max_steps": 4,
        "per_device_train_batch_size": 4, "device_micro_batch_size": 1, "learning_rate": 1e-2, "logging_steps": 1,
        "precision": "float32", "save_strategy": "no", **settings,
    }  # fmt: skip
    result = train(config, print_fn=lambda text: None)
    lines = map(json.loads, (result.output_dir / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    return losses, AutoModelForCausalLM.from_pretrained(result.model_dir).state_dict()


def assert_same(one: tuple[list[float], dict[str, torch.Tensor]], two: Any) -> None:
    assert one[0] == two[0]
    assert all(torch.equal(tensor, two[1][name]) for name, tensor in one[1].items())


EXTRAS: dict[str, dict[str, Any]] = {
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_datasets": "held_out"},
    "samples": {"sample_prompts": ["Who?"], "sample_steps": 1, "sample_max_new_tokens": 3},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_work_between_steps_does_not_change_them(extra: str, dropout_model: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", [{"text": "The dome opens at dusk."}] * 3)
    settings = {name: str(held_out) if value == "held_out" else value for name, value in EXTRAS[extra].items()}
    plain = run(dropout_model, tmp_path / "plain", datasets=str(rows))
    assert_same(plain, run(dropout_model, tmp_path / "more", datasets=str(rows), **settings))


def test_seed_controls_dropout(dropout_model: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    one, two = (run(dropout_model, tmp_path / str(n), datasets=str(rows), seed=n, data_seed=42) for n in (1, 2))
    assert one[0] != two[0]


def test_cached_reference_changes_nothing(dropout_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs = [{"prompt": f"Night {n}? ", "chosen": "Stars. " * (n + 1), "rejected": "Rain."} for n in range(8)]
    rows = tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    settings = {"objective": "dpo", "datasets": str(rows), "disable_dropout": False}
    computed = run(dropout_model, tmp_path / "computed", **settings)
    assert_same(computed, run(dropout_model, tmp_path / "found", **settings))


def test_one_micro_batch_equals_hugging_face_with_step_seeds(dropout_model: Path, tmp_path: Path) -> None:
    from horizon_lm.runs.training.loop import step_seed

    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    settings = {"device_micro_batch_size": 4, "head": "whole", "max_grad_norm": 0.0, "seed": 7}
    losses, weights = run(dropout_model, tmp_path / "ours", datasets=str(rows), **settings)
    model = AutoModelForCausalLM.from_pretrained(dropout_model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    scheduler = get_scheduler("linear", optimizer, 0, 4)
    dataset = DatasetConfig(path=str(rows), columns=None)
    table = prepare(
        [dataset], AutoTokenizer.from_pretrained(dropout_model), PreprocessConfig("sft", max_length=1024)
    ).rows
    sampler = Sampler((len(table),), 4, 7, (1.0,))
    for step in range(4):
        batch = collate([table[index] for index in sampler.rows(step)])
        set_seed(step_seed(7, step + 1))
        loss = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels,
            num_items_in_batch=batch.num_trained,
        ).loss  # fmt: skip
        assert losses[step] == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        got = weights[name]
        if name.endswith("c_attn.bias"):
            # The bias of the keys has no gradient but rounding, which AdamW scales to full steps: it is left out.
            got, tensor = (torch.cat([each.chunk(3)[0], each.chunk(3)[2]]) for each in (got, tensor))
        # AdamW amplifies rounding, which differs between CPUs.
        assert (got - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_evaluation_restores_all_generators() -> None:
    model = horizon_lm.stream(tiny_models.build("gpt2"), device_micro_batch_size=1)

    def drawn() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    set_seed(0)
    expected = drawn()
    set_seed(0)
    with evaluation_mode(model):
        drawn()
        model(**tiny_models.batch())
    assert drawn() == expected
