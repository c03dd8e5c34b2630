"""Tokenize examples and mask the tokens to train on."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

import numpy as np

from horizon_lm.data.chat_template import ChatRenderer, reaches_behind, stripping_ids, with_offsets
from horizon_lm.data.conversations import (
    Completion,
    Conversation,
    Example,
    Preference,
    RowError,
    Text,
    has_content,
    has_text,
)


class RowFlag(IntFlag):
    """Facts about a row that are counted and reported. Cached tables have their numbers."""

    TRUNCATED = 1
    MISSING_EOS = 2  # no end-of-turn token follows an answer
    LOST_TARGETS = 4  # by truncation
    DROPPED_BY_TEMPLATE = 8  # messages, reasoning or tools
    UNTEMPLATED = 16  # prompt and completion as text, although the tokenizer has a chat template
    SPECIAL_TEXT = 32  # a special token in a message of another than the assistant
    ASSISTANT_FIRST = 64  # before any turn of the user
    UNANSWERED = 128  # the last turn is not the assistant's
    BLANK = 256  # a text, a question or an answer without a character but whitespace


_NONE = RowFlag(0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized sequence.

    Attributes:
        ids: token ids, int32 (T,).
        trained: mask of the targets, bool (T,). The first token is never a target, since nothing predicts it.
        flags: facts to report.
    """

    ids: np.ndarray
    trained: np.ndarray
    flags: RowFlag = _NONE

    @property
    def num_targets(self) -> int:
        """The number of tokens to train on."""
        return int(self.trained[1:].sum())

    def truncate(self, length: int | None) -> "Tokens":
        """Return the first ``length`` tokens, or all tokens if ``length`` is None."""
        if length is None or len(self.ids) <= length:
            return self
        flags = self.flags | RowFlag.TRUNCATED | _flag(RowFlag.LOST_TARGETS, self.trained[length:].any())
        return replace(self, ids=self.ids[:length], trained=self.trained[:length], flags=flags)


def _flag(flag: RowFlag, is_set: object) -> RowFlag:
    return flag if is_set else _NONE


def _turn_flags(example: Conversation | Completion) -> RowFlag:
    """Return the flags of the first and the last turn of a conversation, which has a turn of the assistant; none of a completion."""
    if isinstance(example, Completion):
        return _NONE
    turns = [each["role"] for each in example.messages if each["role"] not in ("system", "developer")]
    first = _flag(RowFlag.ASSISTANT_FIRST, turns[0] == "assistant")
    return first | _flag(RowFlag.UNANSWERED, turns[-1] != "assistant")


def _blank_flag(example: Example) -> RowFlag:
    """Return the flag of a blank text, question or answer. A system prompt or a tool's result may be empty."""
    if isinstance(example, Preference):
        return _blank_flag(example.chosen) | _blank_flag(example.rejected)
    if isinstance(example, Text):
        return _flag(RowFlag.BLANK, not has_text(example.text))
    if isinstance(example, Completion):
        return _flag(RowFlag.BLANK, not (has_text(example.prompt) and has_text(example.completion)))
    turns = (message for message in example.messages if message["role"] in ("user", "assistant"))
    return _flag(RowFlag.BLANK, not all(map(has_content, turns)))


class ExampleTokenizer:
    """A tokenizer of examples, with a mask of the tokens to train on.

    Args:
        tokenizer: a tokenizer of transformers.
        train_on: ``assistant``, ``completion`` or ``all``; None for the assistant's tokens of a conversation, the completion
            of a prompt, and all tokens of a text.
        max_length: length to which sequences are truncated, or None.
    """

    def __init__(self, tokenizer: Any, train_on: str | None, max_length: int | None) -> None:
        self._tokenizer, self._train_on, self._max_length = with_offsets(tokenizer), train_on, max_length
        self._renderer: ChatRenderer | None = None
        self._stripping = stripping_ids(tokenizer)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {
            *tokenizer.all_special_tokens
        }
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def tokenize(self, example: Example) -> list[Tokens]:
        """Return the sequence of an example, or both sequences of a preference; raise RowError if it cannot be rendered
        or masked.
        """
        blank = _blank_flag(example)
        return [replace(tokens, flags=tokens.flags | blank) for tokens in self._sequences(example)]

    def _sequences(self, example: Example) -> list[Tokens]:
        """Return the truncated sequences of an example, with all flags except for `RowFlag.BLANK`."""
        if isinstance(example, Preference):
            return [
                self._tokenize_answer(answer, "completion").truncate(self._max_length)
                for answer in (example.chosen, example.rejected)
            ]
        if isinstance(example, Text):
            return [self._tokenize_text(example).truncate(self._max_length)]
        tokens = self._tokenize_answer(example, self._train_on).truncate(self._max_length)
        return [replace(tokens, flags=tokens.flags | _turn_flags(example))]

    def _tokenize_text(self, example: Text) -> Tokens:
        """Return the tokens of a text, all of which are trained; raise RowError if ``train_on`` asks for a part of it."""
        if self._train_on in ("assistant", "completion"):
            raise RowError(f"a text has no prompt or assistant for train_on: {self._train_on}; remove train_on")
        ids = np.array(self._tokenizer(self._with_eos(example.text))["input_ids"], dtype=np.int32)
        return Tokens(ids, np.ones(len(ids), dtype=bool), _flag(RowFlag.MISSING_EOS, self._tokenizer.eos_token is None))

    def _tokenize_answer(self, example: Conversation | Completion, train_on: str | None) -> Tokens:
        """Return the tokens of a prompt and its answer. Without ``train_on`` a completion is trained, or else the assistant's tokens."""
        if isinstance(example, Completion):
            return self._tokenize_completion(example, train_on)
        rendered = self.renderer.render(example)
        default = "assistant" if example.num_prompt is None else "completion"
        trained = _TARGET_MASKS[train_on or default](rendered.assistant, example)
        flags = (
            _flag(RowFlag.MISSING_EOS, not rendered.has_end)
            | _flag(RowFlag.DROPPED_BY_TEMPLATE, not rendered.is_complete)
            | _flag(RowFlag.SPECIAL_TEXT, self._has_special_text(example))
        )
        return Tokens(rendered.ids.astype(np.int32), trained, flags)

    def _has_special_text(self, example: Conversation) -> bool:
        """Return whether a message of another than the assistant has a special token, which the model reads as such."""
        if self._special is None or self._tokenizer.split_special_tokens:
            return False
        texts = (message["content"] for message in example.messages if message["role"] != "assistant")
        return any(map(self._special.search, texts))

    @property
    def renderer(self) -> ChatRenderer:
        """The conversation renderer, created on first use because not all rows need a chat template."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer)
        return self._renderer

    def _tokenize_completion(self, example: Completion, train_on: str | None) -> Tokens:
        """Return the tokens of a prompt and a completion that are plain text, which no template renders."""
        if train_on == "assistant":
            raise RowError("a prompt and completion in text have no assistant tokens; use train_on: completion")
        text = self._with_eos(example.prompt + example.completion)
        encoded = self._tokenizer(text, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        # A token that spans both belongs to the completion, and so do all after it, such as those that the tokenizer appends.
        offsets = np.array(encoded["offset_mapping"])
        completion = np.cumsum(reaches_behind(len(example.prompt), ids, offsets, self._stripping)) > 0
        trained = np.ones(len(ids), dtype=bool) if train_on == "all" else completion
        flags = _flag(RowFlag.MISSING_EOS, self._tokenizer.eos_token is None)
        return Tokens(ids, trained, flags | _flag(RowFlag.UNTEMPLATED, self._tokenizer.chat_template is not None))

    def _with_eos(self, text: str) -> str:
        """Return a text that ends with the tokenizer's end-of-sequence token, if it has one."""
        end = self._tokenizer.eos_token
        return text if end is None or text.endswith(end) else text + end


def _completion_mask(assistant: np.ndarray, example: Conversation) -> np.ndarray:
    """Return the mask of all tokens from the first answer after the prompt on; without a prompt, of the assistant's in the last answer.
    Raise RowError if the assistant's tokens are in more or fewer parts than the conversation has answers.
    """
    starts = np.flatnonzero(assistant & ~np.insert(assistant[:-1], 0, False))
    answers = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
    non_empty = [index for index in answers if has_content(example.messages[index])]  # empty answers have no tokens
    if len(starts) != len(non_empty):
        raise RowError(
            f"the row has {len(non_empty)} answers, but the chat template renders {len(starts)}, so the start of the completion is "
            "ambiguous; use train_on: assistant, or another template"
        )
    if example.num_prompt is not None:
        first = sum(index < example.num_prompt for index in non_empty)  # there is one: completions have no empty answer
        return np.arange(len(assistant)) >= starts[first]
    if answers[-1] not in non_empty:
        return np.zeros(len(assistant), dtype=bool)
    return assistant & (np.arange(len(assistant)) >= starts[-1])


_TARGET_MASKS: dict[str, Callable[[np.ndarray, Conversation], np.ndarray]] = {
    "assistant": lambda assistant, example: assistant,
    "completion": _completion_mask,
    "all": lambda assistant, example: np.ones(len(assistant), dtype=bool),
}
