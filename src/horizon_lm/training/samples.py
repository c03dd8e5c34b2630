"""Answers to sample prompts while a model is trained."""

from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.objective.base import judging


class Prompts:
    """A run's sample prompts as tokens, through the chat template, if there is one.

    Raises:
        ConfigError: the chat template refuses a prompt, or one has no token.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._prompts, self._tokenizer = config.sample_prompts or [], tokenizer
        self._max_new_tokens = config.sample_max_new_tokens
        try:
            self._inputs = [prompt_inputs(tokenizer, prompt) for prompt in self._prompts]
        except Exception as error:  # of the template, which is a program
            raise ConfigError(f"sample_prompts: the chat template refuses them: {first_line(error)}") from error

        for prompt, inputs in zip(self._prompts, self._inputs, strict=True):
            if not inputs["input_ids"].shape[1]:
                raise ConfigError(
                    f"sample_prompts: {prompt!r} has no token to go on from; remove it, or write something"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest one; 0 if there is none."""
        return max((inputs["input_ids"].shape[1] for inputs in self._inputs), default=0)

    def answer(self, model: Any, step: int) -> dict[str, Any]:
        """What the model says to each after a step, greedily, as a line of ``samples.jsonl``."""
        samples = []
        with judging(model):
            for prompt, inputs in zip(self._prompts, self._inputs, strict=True):
                length = inputs["input_ids"].shape[1]
                output = model.generate(
                    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
                    max_new_tokens=self._max_new_tokens, pad_token_id=padding_id(self._tokenizer),
                )  # fmt: skip
                answer = self._tokenizer.decode(output[0, length:], skip_special_tokens=True)
                samples.append({"prompt": prompt, "answer": answer})
        return {"step": step, "samples": samples}


def prompt_inputs(tokenizer: Any, prompt: str) -> Any:
    """A prompt as a model is given it: through the chat template, if there is one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def padding_id(tokenizer: Any) -> int | None:
    """The token that fills up answers."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
