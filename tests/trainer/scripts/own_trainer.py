"""Train with a subclass of Trainer that has a constructor, a loss and an optimizer of its own."""

import sys

import torch
from rows import TRAINER, tokenized, write_history
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments


class WeightedTrainer(Trainer):
    def __init__(self, *args, weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = weight

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        return (loss[0] * self.weight, loss[1]) if return_outputs else loss * self.weight

    def create_optimizer(self, *args):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer


_, name, _, output = sys.argv
tokenizer = AutoTokenizer.from_pretrained(name)
trainer = WeightedTrainer(
    model=AutoModelForCausalLM.from_pretrained(name),
    args=TrainingArguments(output, **TRAINER),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    train_dataset=tokenized(tokenizer),
    weight=2.0,
)
trainer.train()
trainer.save_model(f"{output}/model")
write_history(output, trainer)
