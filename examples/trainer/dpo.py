"""Align a model by preference pairs with TRL's DPOTrainer. The lines marked 1 and 2 stream it from host memory.

python examples/trainer/dpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/ultrafeedback_binarized --output_dir dpo
"""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser

import horizon_lm

script_args, training_args, model_args = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

model = horizon_lm.from_pretrained(model_args.model_name_or_path)  # 1
trainer = horizon_lm.trainer(DPOTrainer)(  # 2
    model=model,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
