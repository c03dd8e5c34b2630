"""Answers to the sample prompts of a run, and the prompts of the command line."""

from collections.abc import Sequence
from typing import Any

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.generation import end_tokens, generation_settings
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.chat_template import dated
from horizon_lm.runs.data.conversations import Message
from horizon_lm.runs.data.template_contents import TemplateContents, as_parts
from horizon_lm.runs.objective.base import evaluation_mode


class SamplePrompts:
    """The sample prompts of a run as tokens, rendered with the chat template if the tokenizer has one.

    Args:
        config: settings of the run.
        tokenizer: the model's tokenizer.
        day: the date that the chat template prints.

    Raises:
        ConfigError: the chat template rejects a prompt, or a prompt has no tokens.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, day: str) -> None:
        self._prompts, self._tokenizer = config.sample_prompts or [], tokenizer
        self._max_new_tokens = config.sample_max_new_tokens
        try:
            system = config.sample_system_prompt
            self._inputs = [prompt_inputs(tokenizer, prompt, system, day) for prompt in self._prompts]
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
                prompt_length = inputs["input_ids"].shape[1]
                with generation_settings(model, self._max_new_tokens, padding_id(self._tokenizer)):
                    output = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
                answer = self._tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True)
                samples.append({"prompt": prompt, "answer": answer})
        return {"step": step, "samples": samples}


def prompt_inputs(tokenizer: Any, prompt: str, system: str | None = None, day: str | None = None) -> Any:
    """Return the model inputs of a prompt, rendered with the chat template if the tokenizer has one.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the user's message.
        system: the system prompt, or None.
        day: the date that the chat template prints; None for that of the clock.

    Raises:
        ConfigError: the chat template rejects the messages or drops the system prompt, or there is a system prompt and no chat
            template.
    """
    messages = prompt_messages(tokenizer, prompt, system)
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    try:
        options = {"add_generation_prompt": True, **dated(tokenizer, day)}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        if prompt.strip() not in text and TemplateContents(tokenizer, options, vision=None).drops_texts:
            messages = [{**each, "content": as_parts(each["content"], has_images=False)} for each in messages]
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **options)
    except Exception as error:  # a template is a program and may raise any exception
        raise ConfigError(f"the chat template rejects the prompt: {first_line(error)}") from error
    require_system(system, text)
    return inputs


def prompt_messages(tokenizer: Any, prompt: str, system: str | None) -> list[Message]:
    """Return the messages of a prompt; raise ConfigError if there is a system prompt and no chat template."""
    if system is not None and tokenizer.chat_template is None:
        raise ConfigError("a system prompt needs a chat template, which the tokenizer does not have")
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def require_system(system: str | None, text: str) -> None:
    """Raise ConfigError if a rendered text lacks the system prompt."""
    if system is not None and system.strip() not in text:
        raise ConfigError("the chat template drops the system prompt; remove it, or put it into the prompt")


def end_line(tokenizer: Any, generation_config: Any, trained: Sequence[int]) -> str:
    """Return a line about the end tokens of trained answers (``trained``) that a generation config lacks; empty without any."""
    known = end_tokens(generation_config)
    lacking_texts, known_texts = (
        ", ".join(map(str, tokenizer.convert_ids_to_tokens(tokens)))
        for tokens in ([token for token in trained if token not in known], known)
    )
    if not lacking_texts:
        return ""
    so_far = f"; the model's own: {known_texts}" if known_texts else ""
    return f"answers end at {lacking_texts}, as those that are trained on do (generation_config.json{so_far})"


def padding_id(tokenizer: Any) -> int | None:
    """Return the padding token of a tokenizer, otherwise its end-of-sequence token."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
