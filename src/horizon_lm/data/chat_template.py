"""Render conversations to tokens, and mark the assistant's tokens up to the end of each turn."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.data.answer_spans import Span, TemplateStyle, locate_answers
from horizon_lm.data.conversations import Conversation, Message, RowError, says_something
from horizon_lm.data.template_coverage import RenderedConversation, forms_of, written
from horizon_lm.data.trl_compat import training_template
from horizon_lm.errors import ConfigError, first_line


def with_offsets(tokenizer: Any) -> Any:
    """A tokenizer of whose tokens every one has all its characters: a copy where it would leave spaces out of them.

    Raises:
        ConfigError: the tokenizer does not tell characters.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer does not tell the characters its tokens come from; add its "
            "tokenizer.json to the folder"
        )
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or not _untrim(state := json.loads(processor.__getstate__())):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    processor = tokenizer.backend_tokenizer.post_processor
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _untrim(state: Any) -> bool:
    """Clear ``trim_offsets`` wherever a post-processor has it; whether it was set. Tokens do not depend on it."""
    parts = list(state.values()) if isinstance(state, dict) else state if isinstance(state, list) else []
    found = bool(sum(map(_untrim, parts)))  # all of them, not up to the first
    if isinstance(state, dict) and state.get("trim_offsets"):
        state["trim_offsets"], found = False, True
    return found


_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_ANSWER = "\u2042"  # a character that no template writes
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens of a conversation.

    Attributes:
        ids: (T,).
        assistant: bool (T,), whether the assistant would generate a token.
        ends: each answer is followed by a token that ends its turn, as far as that is known.
        whole: all that the conversation says is in it, which not every template writes.
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
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so conversations cannot be rendered; "
                "name one with chat_template_path, such as that of the model's instruct version"
            )
        self._tokenizer = with_offsets(tokenizer)
        self._training = training_template(tokenizer) if use_training_template else None
        self._special_ids = np.array(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))
        self._manners: dict[str, TemplateStyle] = {}

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation's tokens. RowError if the template refuses it, leaves out an answer, or it cannot be located."""
        try:
            found = written(conversation, self.text)
            return replace(self._render(conversation, found), whole=found.is_whole)
        except RowError:
            raise
        except Exception as error:  # of the template, which is a program
            raise RowError(f"the chat template refuses this row: {first_line(error)}") from error

    def _render(self, conversation: Conversation, found: RenderedConversation) -> Rendered:
        """In the first way that is possible."""
        if self._marked(found.conversation):
            return self._from_marks(found.conversation, None)
        for form in forms_of(conversation) if self._training is not None else ():  # it may want calls in another form
            if self._renders_alike(form, found.text):
                return self._from_marks(form, self._training)
        return self._from_spans(found.text, locate_answers(found.text, found.messages, self._manner(conversation)))

    def _renders_alike(self, form: Conversation, text: str) -> bool:
        """Whether the training template writes a conversation as the model's own does."""
        try:
            return text == self.text(form, chat_template=self._training)
        except Exception:  # of the template, which is a program
            return False

    def text(self, conversation: Conversation, **options: Any) -> str:
        """A conversation as the template writes it."""
        return str(self._apply(conversation, tokenize=False, **options))

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        options = {**conversation.template_options, **options, "tools": conversation.tools}
        return self._tokenizer.apply_chat_template(conversation.messages, **options)

    def _marked(self, conversation: Conversation) -> bool:
        """Whether the template that a conversation is rendered with has marks: there may be one of its own for tools."""
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _from_marks(self, conversation: Conversation, template: str | None) -> Rendered:
        """The template says itself what the assistant generates."""
        encoded = self._apply(conversation, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        ids, assistant = np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        assistant &= ~_empty_answers(assistant, conversation.messages)
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

    def _manner(self, conversation: Conversation) -> TemplateStyle:
        """How the template writes answers, tried on a conversation of its own."""
        key = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if key not in self._manners:
            self._manners[key] = self._find_manner(conversation.template_options)
        return self._manners[key]

    def _find_manner(self, template_options: Mapping[str, Any]) -> TemplateStyle:
        import jinja2

        def write(*contents: str, **options: Any) -> str:
            turns = zip(("user", "assistant") * 2, contents, strict=False)
            messages = [{"role": role, "content": content} for role, content in turns]
            return self.text(Conversation(messages, template_options=template_options), **options)

        spaced = f"\n\n {_ANSWER} \n\n"
        try:
            without, opened = write("?"), write("?", add_generation_prompt=True)
            trims = write("?", spaced, "?", spaced) == write("?", _ANSWER, "?", _ANSWER)
        except jinja2.TemplateError:
            return TemplateStyle()
        opening = opened.removeprefix(without) if opened.startswith(without) else ""
        # A thinking block that the template opens, or leaves empty, is the model's own in what it has said.
        return TemplateStyle(_THINKING.sub("", opening), trims)


def _empty_answers(assistant: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
    """Where templates mark answers that say nothing: from them a model would learn to end its turn at once."""
    says = [says_something(message) for message in messages if message["role"] == "assistant"]
    turns = np.cumsum(assistant & ~np.insert(assistant[:-1], 0, False))  # of each token, from 1
    if all(says):
        return np.zeros(len(assistant), dtype=bool)
    if not len(turns) or turns[-1] != len(says):
        raise RowError("an answer of the assistant is empty, and cannot be told apart from others; remove it")
    return assistant & ~np.array([True, *says])[turns]
