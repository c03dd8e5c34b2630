"""The training loop equals a loop written by hand with transformers and torch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

pytest.importorskip("datasets", reason="needs the whole installation")

from horizon_lm.runs.config import DatasetConfig, SftConfig
from horizon_lm.runs.data.loader import Sampler, collate
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.training.train import train
from tests.e2e import tiny


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "weight_decay": 0.1},
        {"head": "whole", "activation_checkpoints": "host", "lr_scheduler_type": "cosine"},
    ],
    ids=["plain", "accumulation and decay", "whole head, host boundaries"],
)
def test_equals_a_loop_in_plain_torch(tmp_path: Path, settings: dict[str, object]) -> None:
    folder = tiny.save_model(tmp_path / "model")
    rows_file = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(10))
    dataset = DatasetConfig(path=str(rows_file), columns=None)
    config = SftConfig(
        **{
            "model_name_or_path": str(folder), "datasets": [dataset], "output_dir": str(tmp_path / "run"),
            "device": "cpu", "precision": "float32", "per_device_train_batch_size": 4, "learning_rate": 1e-2,
            "warmup_steps": 2, "max_grad_norm": 0.5,
            **settings,
        }
    )  # fmt: skip
    result = train(config, print_fn=lambda text: None)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n not in norms], "weight_decay": config.weight_decay},
            {"params": [p for n, p in model.named_parameters() if n in norms], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    rows = prepare([dataset], AutoTokenizer.from_pretrained(folder), PreprocessConfig("sft", max_length=1024)).rows
    sampler = Sampler((len(rows),), 4, 42, (1.0,))
    assert result.num_steps == 9
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, 2, 9)
    for step in range(9):
        batch = collate([rows[index] for index in sampler.rows(step)])
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    trained = AutoModelForCausalLM.from_pretrained(result.model_dir, dtype=torch.float32)
    for name, param in model.named_parameters():
        difference = (trained.get_parameter(name) - param).norm() / (param - start[name]).norm()
        assert difference < 1e-3, (name, difference)
