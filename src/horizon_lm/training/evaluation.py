"""Evaluate held-out rows and sample prompts by forward passes alone."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.data.loader import in_order
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.errors import ConfigError, NonFiniteError, first_line
from horizon_lm.objective.base import Objective, evaluation_mode


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
        with evaluation_mode(model):
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


def evaluate_rows(
    model: Any,
    objectives: Mapping[str, Objective],
    held_out: Mapping[str, TokenTable],
    batch_size: int,
    step: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any] | None:
    """Mean losses over held-out rows, as a line of metrics; None without rows. ``advance`` is told of how many rows are done.

    Returns:
        ``eval_loss`` over all rows, and what else the objective measures, under ``eval_``; with several data sets also
        under ``eval_NAME_``. Where the loss is that of tokens, ``eval_perplexity`` and ``eval_tokens``.

    Raises:
        NonFiniteError: a loss is NaN or infinite.
    """
    if not held_out:
        return None
    totals, done, number = {name: _Total() for name in held_out}, 0, sum(map(len, held_out.values()))
    for name, rows in held_out.items():
        for num_rows in _evaluate_part(totals[name], model, objectives[name], rows, batch_size):
            done += num_rows
            advance(done, number)
    line: dict[str, Any] = {"step": step, **_means(totals.values(), "eval_")}
    if len(totals) > 1:
        for name, total in totals.items():
            line |= _means([total], f"eval_{name}_")
    if not math.isfinite(line["eval_loss"]):
        raise NonFiniteError(f"after step {step}: the held-out loss is {line['eval_loss']}")
    return line


class _Total:
    """Sums over the rows of a data set."""

    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.metrics: dict[str, float] = {}
        self.of_tokens = True

    def add(self, loss: float, weight: float, metrics: Mapping[str, float], num_trained: int) -> None:
        self.loss += loss * weight
        self.weight += weight
        self.of_tokens &= weight == num_trained
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


def _evaluate_part(total: _Total, model: Any, objective: Objective, rows: TokenTable, batch_size: int) -> Iterator[int]:
    """Adds up, batch by batch; the rows of each."""
    with evaluation_mode(model):
        for batch in in_order(rows, batch_size):
            loss = objective(model, batch)
            total.add(float(loss.value), loss.weight, loss.metrics, batch.num_trained)
            yield len(batch.places)


def _means(totals: Any, prefix: str) -> dict[str, float]:
    totals = list(totals)
    weight = sum(total.weight for total in totals)
    loss = sum(total.loss for total in totals) / weight
    line = {f"{prefix}loss": loss}
    if all(total.of_tokens for total in totals):
        line |= {f"{prefix}perplexity": math.exp(min(loss, 700.0)), f"{prefix}tokens": int(weight)}
    for name in totals[0].metrics:
        line[f"{prefix}{name}"] = sum(total.metrics[name] for total in totals) / weight
    return line
