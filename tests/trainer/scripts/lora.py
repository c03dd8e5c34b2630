"""Train adapters of PEFT with transformers' Trainer."""

import sys

from peft import LoraConfig, get_peft_model
from rows import TRAINER, tokenized, write_history
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

_, name, _, output = sys.argv
set_seed(3)
tokenizer = AutoTokenizer.from_pretrained(name)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(r=4, task_type="CAUSAL_LM"))
model.print_trainable_parameters()
trainer = Trainer(
    model, TrainingArguments(output, **TRAINER), DataCollatorForSeq2Seq(tokenizer), train_dataset=tokenized(tokenizer)
)
trainer.train()
model.save_pretrained(f"{output}/model")
write_history(output, trainer)
