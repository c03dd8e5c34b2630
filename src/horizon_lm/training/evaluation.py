"""Forward passes between steps: evaluation of the eval sets, and answers to the sample prompts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.data.loader import batch_from
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.errors import ConfigError, NonFiniteError, first_line
from horizon_lm.model.generation import generation_settings
from horizon_lm.objective.base import Loss, Objective, evaluation_mode
from horizon_lm.training.ranks import Ranks


class SamplePrompts:
    """The sample prompts of a run as tokens, rendered with the chat template if the tokenizer has one.

    Raises:
        ConfigError: the chat template rejects a prompt, or a prompt has no tokens.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._prompts, self._tokenizer = config.sample_prompts or [], tokenizer
        self._max_new_tokens = config.sample_max_new_tokens
        try:
            self._inputs = [prompt_inputs(tokenizer, prompt, config.sample_system_prompt) for prompt in self._prompts]
        except ConfigError as error:
            raise ConfigError(f"sample_prompts: {error}") from error
        for prompt, inputs in zip(self._prompts, self._inputs, strict=True):
            if not inputs["input_ids"].shape[1]:
                raise ConfigError(f"sample_prompts: {prompt!r} has no tokens; remove it, or write a longer prompt")

    @property
    def longest(self) -> int:
        """The number of tokens in the longest prompt; 0 without prompts."""
        return max((inputs["input_ids"].shape[1] for inputs in self._inputs), default=0)

    def answer(self, model: Any, step: int) -> dict[str, Any]:
        """Answer all prompts by greedy decoding and return them as a line of ``samples.jsonl``."""
        samples = []
        with evaluation_mode(model):
            for prompt, inputs in zip(self._prompts, self._inputs, strict=True):
                length = inputs["input_ids"].shape[1]
                with generation_settings(model, self._max_new_tokens, padding_id(self._tokenizer)):
                    output = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
                answer = self._tokenizer.decode(output[0, length:], skip_special_tokens=True)
                samples.append({"prompt": prompt, "answer": answer})
        return {"step": step, "samples": samples}


def prompt_inputs(tokenizer: Any, prompt: str, system: str | None = None) -> Any:
    """Return the model inputs of a prompt, rendered with the chat template if the tokenizer has one.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the user's message.
        system: the system prompt, or None.

    Raises:
        ConfigError: the chat template rejects the messages, drops the system prompt, or is missing although there is
            one.
    """
    if tokenizer.chat_template is None:
        if system is not None:
            raise ConfigError("a system prompt needs a chat template, which the tokenizer does not have")
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template is a program and may raise any exception
        raise ConfigError(f"the chat template rejects the prompt: {first_line(error)}") from error
    if system is not None and system.strip() not in text:
        raise ConfigError("the chat template drops the system prompt; remove it, or put it into the prompt")
    return inputs


def padding_id(tokenizer: Any) -> int | None:
    """Return the padding token of a tokenizer, otherwise its end-of-sequence token."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def evaluate_rows(
    model: Any,
    objectives: Mapping[str, Objective],
    eval_sets: Mapping[str, TokenTable],
    batch_size: int,
    step: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks | None = None,
) -> dict[str, Any] | None:
    """Evaluate all eval sets and return their mean losses as a line of metrics, or None without eval sets.

    Args:
        model: the streamed model.
        objectives: the objective of each eval set, by name.
        eval_sets: the rows of each eval set, by name.
        batch_size: rows of one forward pass.
        step: steps trained so far.
        advance: called with the number of finished rows and the number of all rows.
        ranks: the ranks that share the rows; None for one.

    Returns:
        ``eval_loss`` over all rows and the objective's other metrics, prefixed with ``eval_``; with several eval sets
        also the same for each set, prefixed with ``eval_NAME_``. A loss per token adds ``eval_perplexity`` and
        ``eval_tokens``. Token metrics are means of the means of batches, as in TRL.

    Raises:
        NonFiniteError: a loss is NaN or infinite.
    """
    if not eval_sets:
        return None
    totals, done, num_rows = {name: _Total() for name in eval_sets}, 0, sum(map(len, eval_sets.values()))
    for name, rows in eval_sets.items():
        for batch_rows in _evaluate_set(totals[name], model, objectives[name], rows, batch_size, ranks or Ranks()):
            done += batch_rows
            advance(done, num_rows)
        if ranks is not None and ranks.mesh is not None:
            totals[name].join(ranks.mesh.exchange("an evaluation", totals[name].plain()))
    line: dict[str, Any] = {"step": step, **_means([*totals.values()], "eval_")}
    if len(totals) > 1:
        for name, total in totals.items():
            line |= _means([total], f"eval_{name}_")
    if not math.isfinite(line["eval_loss"]):
        raise NonFiniteError(f"after step {step}: the eval loss is {line['eval_loss']}")
    return line


class _Total:
    """Weighted sums over the rows of an eval set."""

    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.metrics: dict[str, float] = {}
        self.token_means: dict[str, list[float]] = {}  # of each batch
        self.per_token = True

    def plain(self) -> list[Any]:
        """Return the sums as plain data."""
        return [self.loss, self.weight, self.metrics, self.token_means, self.per_token]

    def join(self, totals: Sequence[Sequence[Any]]) -> None:
        """Replace the sums by those of all ranks."""
        losses, weights, metrics, token_means, per_token = zip(*totals, strict=True)
        self.loss, self.weight, self.per_token = sum(losses), sum(weights), all(per_token)
        self.metrics, self.token_means = {}, {}
        for each in metrics:
            for name, value in each.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
        for each in token_means:
            for name, means in each.items():
                self.token_means.setdefault(name, []).extend(means)

    def add(self, loss: Loss, num_trained: int) -> None:
        self.loss += float(loss.value) * loss.weight
        self.weight += loss.weight
        self.per_token &= loss.weight == num_trained
        for name, value in loss.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, sums in loss.token_metrics.items():
            self.token_means.setdefault(name, []).extend(sums.means(len(sums.counts)))


def _evaluate_set(
    total: _Total, model: Any, objective: Objective, rows: TokenTable, batch_size: int, ranks: Ranks
) -> Iterator[int]:
    """Add the losses of an eval set to its total, batch by batch; yield the number of rows of each batch.

    Ranks take turns. In the last turn, those without a batch compute one again, because all take part in every pass.
    """
    batches = -(-len(rows) // batch_size)
    with evaluation_mode(model):
        for first in range(0, batches, ranks.size):
            number = min(first + ranks.rank, batches - 1)
            batch = batch_from(rows, number * batch_size, batch_size)
            loss = objective(model, batch)
            if first + ranks.rank < batches:
                total.add(loss, batch.num_trained)
            yield min((first + ranks.size) * batch_size, len(rows)) - first * batch_size


def _means(totals: Sequence[_Total], prefix: str) -> dict[str, float]:
    weight = sum(total.weight for total in totals)
    loss = sum(total.loss for total in totals) / weight
    line = {f"{prefix}loss": loss}
    if all(total.per_token for total in totals):
        line |= {f"{prefix}perplexity": math.exp(min(loss, 700.0)), f"{prefix}tokens": int(weight)}
    for name in totals[0].metrics:
        line[f"{prefix}{name}"] = sum(total.metrics[name] for total in totals) / weight
    for name in totals[0].token_means:
        means = [mean for total in totals for mean in total.token_means[name]]
        line[f"{prefix}{name}"] = sum(means) / len(means)
    return line
