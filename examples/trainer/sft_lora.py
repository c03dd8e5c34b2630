"""Train LoRA adapters on conversations with TRL's SFTTrainer. The lines marked 1 and 2 stream the frozen model from host memory.

python examples/trainer/sft_lora.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/Capybara --output_dir lora \
    --use_peft --lora_target_modules all-linear --learning_rate 2e-4
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import horizon_lm

script_args, training_args, model_args = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

model = horizon_lm.from_pretrained(model_args.model_name_or_path)  # 1
trainer = horizon_lm.trainer(SFTTrainer)(  # 2
    model=model,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
    peft_config=get_peft_config(model_args),
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
