"""Conversations to tokens, and which of them are the assistant's, up to the end of each turn.

Three ways, the first that is possible: the template's own ``{% generation %}`` marks; those of the version of it that TRL
trains with, where that renders the conversation alike; the answers' places in the rendering (`horizon_lm.data.spans`).
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.data.examples import Conversation, Message
from horizon_lm.data.messages import RowError
from horizon_lm.data.spans import Span, locate_answers
from horizon_lm.data.trl_helpers import training_template
from horizon_lm.errors import ConfigError, first_line

_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens of a conversation.

    Attributes:
        ids: (T,).
        assistant: bool (T,), whether the assistant would generate a token.
        ends: each answer is followed by a token that ends its turn, as far as that is known.
        whole: thoughts and tools are in it, which not every template writes.
    """

    ids: np.ndarray
    assistant: np.ndarray
    ends: bool
    whole: bool = True


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template and marks the assistant's tokens.

    Args:
        tokenizer: of transformers, with a chat template.
        use_training_template: where TRL has one.

    Raises:
        ConfigError: no chat template, or a tokenizer that cannot say which characters its tokens come from.
    """

    def __init__(self, tokenizer: Any, use_training_template: bool = True) -> None:
        self._tokenizer = tokenizer
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so conversations cannot be rendered; "
                "name one with chat_template_path, such as that of the model's instruct version"
            )
        require_offsets(tokenizer)
        self._training = training_template(tokenizer) if use_training_template else None
        self._special_ids = np.array(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))
        self._openings: dict[str, str] = {}

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation's tokens. RowError if the template refuses it, or an answer cannot be located."""
        try:
            rendered = self._render(conversation)
            said = [*_thoughts(conversation), *_tool_names(conversation)]
            whole = not said or all(map(self.text(conversation).__contains__, said))
            return replace(rendered, whole=whole)
        except RowError:
            raise
        except Exception as error:  # of the template, which is a program
            raise RowError(f"the chat template refuses this row: {first_line(error)}") from error

    def _render(self, conversation: Conversation) -> Rendered:
        """In the first way that is possible."""
        if self._marked(conversation):
            return self._from_marks(conversation, None)
        text = self.text(conversation)
        if self._training is not None and text == self.text(conversation, chat_template=self._training):
            return self._from_marks(conversation, self._training)
        return self._from_spans(text, locate_answers(text, conversation.messages, self._opening(conversation)))

    def text(self, conversation: Conversation, **options: Any) -> str:
        """A conversation as the template writes it."""
        return str(self._apply(conversation, tokenize=False, **options))

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        """The template on a conversation; once more with the arguments of calls as text, if it fails: some want them so."""
        options = {**conversation.template_options, **options, "tools": conversation.tools}
        try:
            return self._tokenizer.apply_chat_template(conversation.messages, **options)
        except TypeError:
            if not any(message.get("tool_calls") for message in conversation.messages):
                raise
            return self._tokenizer.apply_chat_template(with_arguments_as_text(conversation.messages), **options)

    def _marked(self, conversation: Conversation) -> bool:
        """Whether the template that a conversation is rendered with has marks: there may be one of its own for tools."""
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _from_marks(self, conversation: Conversation, template: str | None) -> Rendered:
        """The template says itself what the assistant generates."""
        encoded = self._apply(conversation, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        ids, assistant = np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        last = np.flatnonzero(assistant & ~np.append(assistant[1:], False))
        return Rendered(ids, assistant, all(self._ends_turn(ids[: index + 1]) for index in last))

    def _ends_turn(self, ids: np.ndarray) -> bool:
        """Whether the last token that is not space is a special one."""
        for token in ids[::-1]:
            if token in self._special_ids:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _from_spans(self, text: str, spans: list[Span]) -> Rendered:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"])
        assistant, ends = np.zeros(len(ids), dtype=bool), []
        for start, end in spans:
            inside = (offsets[:, 0] < end) & (offsets[:, 1] > start)
            stop = self._end_of_turn(text, ids, offsets, end)
            ends.append(stop is not None)
            assistant |= inside
            if stop is not None and inside.any():
                assistant[np.flatnonzero(inside)[-1] : stop + 1] = True
        return Rendered(ids, assistant, all(ends))

    def _end_of_turn(self, text: str, ids: np.ndarray, offsets: np.ndarray, end: int) -> int | None:
        """Index of the special token that follows a span, at most spaces away."""
        after = np.flatnonzero(
            (offsets[:, 0] >= end) & (offsets[:, 1] > offsets[:, 0]) & np.isin(ids, self._special_ids)
        )
        if not len(after) or text[end : offsets[after[0], 0]].strip(" "):
            return None
        return int(after[0])

    def _opening(self, conversation: Conversation) -> str:
        """What the template writes for the assistant to go on from."""
        import jinja2

        key = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if key not in self._openings:
            asked = Conversation([{"role": "user", "content": "?"}], template_options=conversation.template_options)
            try:
                without, opened = self.text(asked), self.text(asked, add_generation_prompt=True)
            except jinja2.TemplateError:
                without = opened = ""
            opening = opened.removeprefix(without) if opened.startswith(without) else ""
            # A thinking block that the template opens, or leaves empty, is the model's own in what it has said.
            self._openings[key] = _THINKING.sub("", opening)
        return self._openings[key]


def _thoughts(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        thought = message.get("reasoning_content") or message.get("thinking")
        if thought:
            yield thought.strip()


def _tool_names(conversation: Conversation) -> Iterator[str]:
    for tool in conversation.tools or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, dict) else None
        if name:
            yield name


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages with the arguments of calls as JSON text."""
    changed = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments", {}))}}
            for call in message.get("tool_calls", ())
        ]
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def require_offsets(tokenizer: Any) -> None:
    """ConfigError for a tokenizer that cannot say which characters its tokens come from."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer does not tell the characters its tokens come from; add its "
            "tokenizer.json to the folder"
        )
