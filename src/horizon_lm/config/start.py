"""What ``horizon-lm init`` sets in a file to begin with: what a run of its kind usually says."""

from typing import Any

_USUAL: dict[str, Any] = {
    "max_length": 1024, "per_device_train_batch_size": 8, "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 10,
}  # fmt: skip

START_VALUES: dict[str, dict[str, Any]] = {
    "sft": {
        "objective": "sft", "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "datasets": ["data/train.jsonl"],
        "test_split_size": 0.05, "output_dir": "runs/sft", "learning_rate": 1e-5, **_USUAL,
    },
    "pretrain": {
        "objective": "pretrain", "model_name_or_path": "Qwen/Qwen2.5-7B", "datasets": ["data/texts"],
        "test_split_size": 0.01, "output_dir": "runs/pretrain", "learning_rate": 1e-5, **_USUAL, "num_train_epochs": 1.0, "packing": True,
        "packing_strategy": "bfd_split", "max_length": 4096,
    },
    "dpo": {
        "objective": "dpo", "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "datasets": ["data/preferences.jsonl"],
        "test_split_size": 0.05, "output_dir": "runs/dpo", "learning_rate": 1e-6, "beta": 0.1, **_USUAL, "num_train_epochs": 1.0,
    },
}  # fmt: skip

_STEPS = """
  horizon-lm plan FILE       will it fit, and how long will it take?
  horizon-lm inspect FILE    what will be trained on, token by token
  horizon-lm train FILE      any setting: --learning_rate 2e-5

Settings that are commented out have the value that is written there."""

START_HEADING = {
    "sft": f"""Supervised fine-tuning: the model learns to answer as the rows do.

Rows: {{"messages": [{{"role": "user", "content": ...}}, {{"role": "assistant", "content": ...}}]}}, or alpaca (instruction,
input, output), sharegpt (conversations), prompt and completion, text. JSON, JSONL, Parquet, CSV, a folder, or a data set of
the hub.
{_STEPS}""",
    "pretrain": f"""Continued pre-training: the model learns text, every token of it.

Rows: {{"text": ...}} in JSON, JSONL, Parquet or CSV, text files, a folder of them, or a data set of the hub.
{_STEPS}""",
    "dpo": f"""Direct preference optimisation: of two answers the model learns to prefer one.

Rows: {{"prompt": ..., "chosen": ..., "rejected": ...}}, as text or as lists of messages; or conversations that begin alike.
{_STEPS}""",
}
