"""Train a reward model on preference pairs with TRL's RewardTrainer. The lines marked 1 and 2 stream it from host memory.

python examples/trainer/reward.py --model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/ultrafeedback_binarized --output_dir reward
"""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser

import horizon_lm

script_args, training_args, model_args = TrlParser((ScriptArguments, RewardConfig, ModelConfig)).parse_args_and_config()
dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

model = horizon_lm.from_pretrained(  # 1
    model_args.model_name_or_path, model_class=AutoModelForSequenceClassification, num_labels=1
)
trainer = horizon_lm.trainer(RewardTrainer)(  # 2
    model=model,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
