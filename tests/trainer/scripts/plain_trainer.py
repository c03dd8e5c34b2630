"""Train with transformers' Trainer."""

import argparse

from rows import TRAINER, tokenized, write_history
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, device_map={"": "cpu"}, low_cpu_mem_usage=True)
    trainer = Trainer(
        model,
        TrainingArguments(args.output, **TRAINER),
        DataCollatorForSeq2Seq(tokenizer),
        train_dataset=tokenized(tokenizer),
    )
    trainer.train()
    trainer.save_model(f"{args.output}/model")
    write_history(args.output, trainer)
