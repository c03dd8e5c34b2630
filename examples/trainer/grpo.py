"""Train a model by a reward for its own answers with TRL's GRPOTrainer. The lines marked 1 and 2 stream it from host memory.

Each generated token loads the whole model once; the plan, printed at the start, says how long that takes.

python examples/trainer/grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/tldr --output_dir grpo
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

import horizon_lm


def reward_num_unique_chars(completions, **kwargs):
    """Return the number of different characters of each completion."""
    return [
        len(set(completion if isinstance(completion, str) else completion[0]["content"])) for completion in completions
    ]


script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

model = horizon_lm.from_pretrained(model_args.model_name_or_path)  # 1
trainer = horizon_lm.trainer(GRPOTrainer)(  # 2
    model=model,
    reward_funcs=reward_num_unique_chars,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
)
trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.save_model(training_args.output_dir)
