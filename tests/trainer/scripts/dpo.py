"""Train with TRL's DPOTrainer, and a reference of its own."""

import sys

import datasets
from rows import TRAINER, conversations, write_history
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

_, name, _, output = sys.argv
model, ref_model = (AutoModelForCausalLM.from_pretrained(name) for _ in range(2))
rows = [{"prompt": prompt, "chosen": [first], "rejected": [second]} for prompt, (first, second) in conversations()]
trainer = DPOTrainer(
    model,
    ref_model=ref_model,
    args=DPOConfig(output, bf16=False, **TRAINER),
    train_dataset=datasets.Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(name),
)
trainer.train()
trainer.save_model(f"{output}/model")
write_history(output, trainer)
