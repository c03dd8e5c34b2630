"""Add a token and resize the embeddings between loading and training, in the function that makes the model."""

import sys

from rows import TRAINER, tokenized, write_history
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

_, name, _, output = sys.argv
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.add_tokens(["<think>"])


def make_model():
    model = AutoModelForCausalLM.from_pretrained(name)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.get_input_embeddings().weight.data[-1] = 0.01
    return model


trainer = Trainer(
    model_init=make_model,
    args=TrainingArguments(output, **TRAINER),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    train_dataset=tokenized(tokenizer),
)
trainer.train()
trainer.save_model(f"{output}/model")
write_history(output, trainer)
