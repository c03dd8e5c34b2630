"""Rows and results of the scripts beside this file, which imports it as scripts do: from the folder of the script."""

import json
from pathlib import Path

import datasets

QUESTIONS = ["What does the keeper do?", "Who counts the stars?", "Why does the rain come?"]
TRAINER = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-3,
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
}  # fmt: skip


def texts():
    return [f"{QUESTIONS[n % 3]} " * (1 + n % 3) + str(n) for n in range(16)]


def tokenized(tokenizer):
    ids = tokenizer(texts())["input_ids"]
    return datasets.Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(each) for each in ids]}
    )


def conversations():
    answers = [{"role": "assistant", "content": "The keeper waits. "}, {"role": "assistant", "content": "Stars."}]
    return [([{"role": "user", "content": text}], answers) for text in texts()]


def write_losses(output, losses):
    Path(output).mkdir(parents=True, exist_ok=True)
    Path(output, "losses.json").write_text(json.dumps(losses))


def write_history(output, trainer):
    write_losses(output, [line["loss"] for line in trainer.state.log_history if "loss" in line])
