"""Examples to tokens, and which of them are trained on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.data.chat_template import ChatRenderer, with_offsets
from horizon_lm.data.conversations import Completion, Conversation, Example, Preference, RowError, Text, says_something


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized sequence.

    Attributes:
        ids: int32 (T,).
        trained: bool (T,), whether a token is a target. The first of a sequence never is: nothing predicts it.
        ends: every answer is followed by a token that ends it.
        is_cut: it lost its end.
        lost_targets: and with it tokens that would have been trained on.
        whole: all that the example says is in it.
        without_template: it is a prompt and a completion as text, though the tokenizer has a chat template.
    """

    ids: np.ndarray
    trained: np.ndarray
    ends: bool = True
    is_cut: bool = False
    lost_targets: bool = False
    whole: bool = True
    without_template: bool = False

    @property
    def num_targets(self) -> int:
        return int(self.trained[1:].sum())

    def cut(self, length: int | None) -> "Tokens":
        """Its first ``length`` tokens."""
        if length is None or len(self.ids) <= length:
            return self
        lost = bool(self.trained[length:].any())
        return replace(self, ids=self.ids[:length], trained=self.trained[:length], is_cut=True, lost_targets=lost)


class ExampleTokenizer:
    """Tokenizes examples for an objective.

    Args:
        tokenizer: of transformers.
        train_on: the tokens that are trained on, ``assistant``, ``completion`` or ``all``; None for what suits an example:
            a conversation's assistant, what follows a prompt, or all of a text.
        max_length: tokens beyond are dropped; None for none.
    """

    def __init__(self, tokenizer: Any, train_on: str | None, max_length: int | None) -> None:
        self._tokenizer, self._train_on, self._max_length = with_offsets(tokenizer), train_on, max_length
        self._renderer: ChatRenderer | None = None

    def tokenize(self, example: Example) -> list[Tokens]:
        """One sequence; two for a preference. RowError for what cannot be tokenized or masked."""
        if isinstance(example, Preference):
            return [
                self._continued(answer, "completion").cut(self._max_length)
                for answer in (example.chosen, example.rejected)
            ]
        if isinstance(example, Text):
            return [self._text(example).cut(self._max_length)]
        return [self._continued(example, self._train_on).cut(self._max_length)]

    def _text(self, example: Text) -> Tokens:
        if self._train_on in ("assistant", "completion"):
            raise RowError(f"a text has no part to tell apart for train_on: {self._train_on}; remove train_on")
        ids = np.array(self._tokenizer(self._with_end(example.text))["input_ids"], dtype=np.int32)
        return Tokens(ids, np.ones(len(ids), dtype=bool), ends=self._tokenizer.eos_token is not None)

    def _continued(self, example: Conversation | Completion, train_on: str | None) -> Tokens:
        if isinstance(example, Completion):
            return self._completion(example, train_on)
        rendered = self.renderer.render(example)
        default = "assistant" if example.num_prompt is None else "completion"
        trained = _CHOOSE[train_on or default](rendered.assistant, example)
        return Tokens(rendered.ids.astype(np.int32), trained, rendered.ends, whole=rendered.whole)

    @property
    def renderer(self) -> ChatRenderer:
        """Made for the first conversation: not all rows need a chat template."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer)
        return self._renderer

    def _completion(self, example: Completion, train_on: str | None) -> Tokens:
        if train_on == "assistant":
            raise RowError("a prompt and its completion as text have no assistant; use train_on: completion")
        text = self._with_end(example.prompt + example.completion)
        encoded = self._tokenizer(text, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        # A token of both belongs to the completion, as does what the tokenizer adds at the end.
        completion = np.cumsum(np.array(encoded["offset_mapping"])[:, 1] > len(example.prompt)) > 0
        trained = np.ones(len(ids), dtype=bool) if train_on == "all" else completion
        has_template = self._tokenizer.chat_template is not None
        return Tokens(ids, trained, ends=self._tokenizer.eos_token is not None, without_template=has_template)

    def _with_end(self, text: str) -> str:
        end = self._tokenizer.eos_token
        return text if end is None or text.endswith(end) else text + end


def _completion_of(assistant: np.ndarray, example: Conversation) -> np.ndarray:
    """All from the first answer after the prompt on; in rows that name no prompt, the last answer."""
    starts = np.flatnonzero(assistant & ~np.insert(assistant[:-1], 0, False))
    answers = [(index, each) for index, each in enumerate(example.messages) if each["role"] == "assistant"]
    places = [index for index, answer in answers if says_something(answer)]  # others have none
    if len(starts) != len(places):
        raise RowError(
            f"{len(places)} answers, but {len(starts)} places of the assistant in the rendering of the chat template, so where "
            "the completion begins is not known; use train_on: assistant, or another template"
        )
    if example.num_prompt is not None:
        first = sum(index < example.num_prompt for index in places)
        return np.arange(len(assistant)) >= starts[first]
    if places[-1:] != [answers[-1][0]]:  # the last answer is empty
        return np.zeros(len(assistant), dtype=bool)
    return assistant & (np.arange(len(assistant)) >= starts[-1])


_CHOOSE: dict[str, Callable[[np.ndarray, Conversation], np.ndarray]] = {
    "assistant": lambda assistant, example: assistant,
    "completion": _completion_of,
    "all": lambda assistant, example: np.ones(len(assistant), dtype=bool),
}
