"""Render conversations to tokens and mask the assistant's tokens up to the end of each turn."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.data.answer_spans import USE_MARKS, Span, TemplateStyle, locate_answers, locate_turns
from horizon_lm.data.conversations import Conversation, Message, RowError, has_content
from horizon_lm.data.template_coverage import RenderedConversation, argument_variants, render_checked
from horizon_lm.data.template_limits import limit_templates
from horizon_lm.data.trl_compat import training_template, training_template_file
from horizon_lm.errors import ConfigError, first_line


def with_offsets(tokenizer: Any) -> Any:
    """Return a tokenizer whose character offsets include leading spaces, as a copy if this one trims them.

    Raises:
        ConfigError: the tokenizer reports no character offsets.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer reports no character offsets; add its tokenizer.json to "
            "the folder"
        )
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or not _clear_trim_offsets(state := json.loads(processor.__getstate__())):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    processor = tokenizer.backend_tokenizer.post_processor
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _clear_trim_offsets(state: Any) -> bool:
    """Clear ``trim_offsets`` in a post-processor and its parts; return whether it was set anywhere. Tokens do not
    change.
    """
    parts = list(state.values()) if isinstance(state, dict) else state if isinstance(state, list) else []
    found = bool(sum(map(_clear_trim_offsets, parts)))  # not any(), which would stop at the first
    if isinstance(state, dict) and state.get("trim_offsets"):
        state["trim_offsets"], found = False, True
    return found


_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_ANSWER = "\u2042"  # a character that occurs in no template
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """The tokens of a conversation.

    Attributes:
        ids: token ids, shape (T,).
        assistant: mask of the tokens that the assistant generates, bool (T,).
        has_end: True if an end-of-turn token follows every answer.
        is_complete: True if the template rendered every part of the conversation.
    """

    ids: np.ndarray
    assistant: np.ndarray
    has_end: bool
    is_complete: bool = True


class ChatRenderer:
    """A renderer of conversations to tokens with a mask of the assistant's tokens, using the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        use_training_template: use TRL's version of the template with generation marks, if it has one.

    Raises:
        ConfigError: the tokenizer has no chat template or no character offsets.
    """

    def __init__(self, tokenizer: Any, use_training_template: bool = True) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so conversations cannot be rendered; "
                "set chat_template_path, for example to the model's instruct version"
            )
        limit_templates()
        self._tokenizer = with_offsets(tokenizer)
        self._training = training_template(tokenizer) if use_training_template else None
        self._special_ids = np.array(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))
        self._special_tokens = tokenizer.convert_ids_to_tokens(self._special_ids.tolist())
        self._styles: dict[str, TemplateStyle] = {}

    def render(self, conversation: Conversation) -> TokenizedConversation:
        """Render a conversation.

        Raises:
            RowError: the template rejects the conversation or drops an answer or call, or an answer cannot be located.
        """
        try:
            found = render_checked(conversation, self.text)
            return replace(self._tokenize(conversation, found), is_complete=found.is_complete)
        except (RowError, ConfigError):  # a template that exceeds a limit would do so in every row
            raise
        except Exception as error:  # a template is a program and may raise any exception
            raise RowError(f"the chat template rejects this row: {first_line(error)}") from error

    def _tokenize(self, conversation: Conversation, found: RenderedConversation) -> TokenizedConversation:
        """Find the assistant's tokens by the template's marks, otherwise by TRL's, otherwise by locating
        the answers.
        """
        if self._has_generation_marks(found.conversation):
            return self._tokenize_with_marks(found.conversation, None)
        # TRL's template may expect tool arguments in a different form from the model's own.
        for variant in argument_variants(conversation) if self._training is not None else ():
            if self._training_template_matches(variant, found.text):
                return self._tokenize_with_marks(variant, self._training)
        try:
            spans = self._locate(found)
        except RowError as error:
            raise RowError(f"{error}{self._marked_template()}") from error
        return self._tokenize_with_spans(found.text, spans)

    def _locate(self, found: RenderedConversation) -> list[Span]:
        """Return the character spans of the assistant's turns in a rendered conversation, without their end-of-turn tokens."""
        style = self._template_style(found.conversation)
        if not any(message.get("tool_calls") for message in found.conversation.messages):
            return locate_answers(found.text, found.messages, style, found.ends)
        if not style.opening:  # so that the header of a turn cannot be told from what follows
            raise RowError(f"tool calls cannot be located in the rendered conversation; {USE_MARKS}")
        return locate_turns(found.text, found.conversation, self._text_before_thinking, self._special_tokens)

    def _marked_template(self) -> str:
        """Name TRL's template with generation marks, which renders a row in another way than the model's own."""
        file = None if self._training is None else training_template_file(self._training)
        return f", such as TRL's, which renders this row differently: set chat_template_path: {file}" if file else ""

    def _training_template_matches(self, conversation: Conversation, text: str) -> bool:
        """Return whether TRL's template renders a conversation exactly as the model's own does."""
        try:
            return text == self.text(conversation, chat_template=self._training)
        except Exception:  # a template is a program and may raise any exception
            return False

    def _text_before_thinking(self, conversation: Conversation, **options: Any) -> str:
        """Return the text of a conversation without a thinking block at its end, which the model has to generate."""
        return _THINKING.sub("", self.text(conversation, **options))

    def text(self, conversation: Conversation, **options: Any) -> str:
        """Return the text of a conversation as rendered by the template."""
        return str(self._apply(conversation, tokenize=False, **options))

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        options = {**conversation.template_options, **options, "tools": conversation.tools}
        return self._tokenizer.apply_chat_template(conversation.messages, **options)

    def _has_generation_marks(self, conversation: Conversation) -> bool:
        """Return whether the template of a conversation has generation marks."""
        # A tokenizer may have a separate template for conversations with tools.
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _tokenize_with_marks(self, conversation: Conversation, template: str | None) -> TokenizedConversation:
        """Tokenize with a template that marks generated text; None for the model's own template."""
        encoded = self._apply(conversation, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
        ids, assistant = np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        assistant &= ~_empty_answer_mask(assistant, conversation.messages)
        is_followed = np.append(assistant[1:], False)  # by another token of the same answer
        last_tokens = np.flatnonzero(assistant & ~is_followed)
        has_end = all(self._ends_turn(ids[: index + 1]) for index in last_tokens)
        return TokenizedConversation(ids, assistant, has_end=has_end)

    def _ends_turn(self, ids: np.ndarray) -> bool:
        """Return whether the last token other than whitespace is a special token."""
        for token in ids[::-1]:
            if token in self._special_ids:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _tokenize_with_spans(self, text: str, spans: list[Span]) -> TokenizedConversation:
        """Tokenize a rendered text whose answers are given as character spans."""
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
        return TokenizedConversation(ids, assistant, all(ends))

    def _end_of_turn(self, text: str, ids: np.ndarray, offsets: np.ndarray, end: int) -> int | None:
        """Return the index of the special token that follows a span, directly or after spaces, or None."""
        after = np.flatnonzero(
            (offsets[:, 0] >= end) & (offsets[:, 1] > offsets[:, 0]) & np.isin(ids, self._special_ids)
        )
        if not len(after) or text[end : offsets[after[0], 0]].strip(" "):
            return None
        return int(after[0])

    def _template_style(self, conversation: Conversation) -> TemplateStyle:
        """Return the style of the template, determined by rendering test conversations once for each set of options."""
        key = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if key not in self._styles:
            self._styles[key] = self._probe_template_style(conversation.template_options)
        return self._styles[key]

    def _probe_template_style(self, template_options: Mapping[str, Any]) -> TemplateStyle:
        """Find out what a template puts before answers, and whether it trims them, by rendering short conversations."""

        def render(*contents: str, **options: Any) -> str:
            turns = zip(("user", "assistant") * 2, contents, strict=False)
            messages = [{"role": role, "content": content} for role, content in turns]
            return self.text(Conversation(messages, template_options=template_options), **options)

        padded = f"\n\n {_ANSWER} \n\n"
        try:
            prompt, prompt_with_opening = render("?"), render("?", add_generation_prompt=True)
            trims = render("?", padded, "?", padded) == render("?", _ANSWER, "?", _ANSWER)
        except ConfigError:  # a limit was exceeded
            raise
        except (
            Exception
        ):  # a template is a program and may raise any exception, for example for want of a system message
            return TemplateStyle()
        starts_alike = prompt_with_opening.startswith(prompt)
        opening = prompt_with_opening.removeprefix(prompt) if starts_alike else ""
        # A thinking block opened by the template is part of the answer, since the model has to generate it.
        return TemplateStyle(_THINKING.sub("", opening), trims)


def _empty_answer_mask(assistant: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
    """Return the mask of the tokens of empty answers, from which a model would learn to end its turn immediately."""
    non_empty = [has_content(message) for message in messages if message["role"] == "assistant"]
    turns = np.cumsum(assistant & ~np.insert(assistant[:-1], 0, False))  # number of the answer at each token, from 1
    if all(non_empty):
        return np.zeros(len(assistant), dtype=bool)
    if not len(turns) or turns[-1] != len(non_empty):
        raise RowError("an answer of the assistant is empty and cannot be located; remove it")
    return assistant & ~np.array([True, *non_empty])[turns]
