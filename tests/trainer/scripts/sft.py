"""Train with TRL's SFTTrainer, which is given the name of a model."""

import sys

import datasets
from rows import TRAINER, conversations, write_history
from trl import SFTConfig, SFTTrainer

_, model, _, output = sys.argv
rows = [{"messages": prompt + answers[:1]} for prompt, answers in conversations()]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output, bf16=False, model_init_kwargs={"attn_implementation": "eager"}, **TRAINER),
    train_dataset=datasets.Dataset.from_list(rows),
)
trainer.train()
trainer.save_model(f"{output}/model")
write_history(output, trainer)
