"""Train a model on texts with transformers' Trainer. The lines marked 1 and 2 stream it from host memory.

python examples/trainer/trainer.py --model_name_or_path Qwen/Qwen2.5-7B --dataset_name roneneldan/TinyStories --output_dir texts
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, HfArgumentParser, Trainer, TrainingArguments

import horizon_lm


@dataclass
class ScriptArguments:
    """The arguments of this script."""

    model_name_or_path: str
    dataset_name: str
    max_length: int = 512


script_args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
dataset = load_dataset(script_args.dataset_name, split="train")


def tokenize(rows):
    """Return the token ids of texts."""
    return tokenizer(rows["text"], truncation=True, max_length=script_args.max_length)


model = horizon_lm.from_pretrained(script_args.model_name_or_path)  # 1
trainer = horizon_lm.trainer(Trainer)(  # 2
    model=model,
    args=training_args,
    train_dataset=dataset.map(tokenize, batched=True, remove_columns=dataset.column_names),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
