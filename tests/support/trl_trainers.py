"""Make TRL's trainers, in the settings that people choose."""

from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from accelerate.state import AcceleratorState

from tests.e2e import tiny
from tests.trainer import rows

GENERATE = {"num_generations": 2, "max_completion_length": 6, "max_steps": 4}
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft packed": (trl.SFTTrainer, trl.SFTConfig, {"packing": True, "max_length": 64}),
    "sft assistant only": (trl.SFTTrainer, trl.SFTConfig, {"assistant_only_loss": True}),
    "sft neftune": (trl.SFTTrainer, trl.SFTConfig, {"neftune_noise_alpha": 5.0}),
    "dpo with a reference": (trl.DPOTrainer, trl.DPOConfig, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, GENERATE),
    "grpo with a reference": (trl.GRPOTrainer, trl.GRPOConfig, GENERATE | {"beta": 0.1, "temperature": 0.9}),
}


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, str(each))) % 7) for each in completions]


def make(name: str, cls: Any, model: Any, output: Path, **more: Any) -> Any:
    """Return a trainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    _, config, settings = TRAINERS[name]
    kind = name.split()[0]
    given = {
        "output_dir": str(output), "max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 7,
        "gradient_accumulation_steps": 4, "save_strategy": "no", "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    extra = {
        key: more.pop(key)
        for key in ("callbacks", "ref_model", "peft_config", "optimizers", "eval_dataset", "train_dataset")
        if key in more
    }
    if kind in ("grpo", "rloo"):
        extra["reward_funcs"] = length_reward
    marks = tiny.CHATML_WITH_MARKS if "assistant" in name else tiny.CHATML
    torch.manual_seed(0)
    return cls(
        model=model, args=config(**(given | settings | more)), processing_class=tiny.build_tokenizer(marks),
        **({"train_dataset": datasets.Dataset.from_list(rows.of_kind(kind))} | extra),
    )  # fmt: skip
