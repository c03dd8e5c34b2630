"""Render conversations to tokens and mask the assistant's tokens up to the end of each turn."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.data.answer_spans import USE_MARKS, Span, TemplateStyle, locate_answers, locate_turns
from horizon_lm.runs.data.conversations import Conversation, Message, RowError, has_content
from horizon_lm.runs.data.template_contents import TemplateContents
from horizon_lm.runs.data.template_coverage import RenderedConversation, argument_variants, render_checked
from horizon_lm.runs.data.template_limits import limit_templates
from horizon_lm.runs.data.template_syntax import require_syntax
from horizon_lm.runs.data.trl_compat import training_template, training_template_file
from horizon_lm.runs.data.vision import Expanded, Vision


def with_offsets(tokenizer: Any) -> Any:
    """Return a tokenizer whose character offsets include leading spaces: this one or, if it trims them, a copy that does not.

    Raises:
        ConfigError: the tokenizer reports no character offsets.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer reports no character offsets; add its tokenizer.json to "
            "the folder"
        )
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None:
        return tokenizer
    state = json.loads(processor.__getstate__())
    if not _clear_trim_offsets(state):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    processor = tokenizer.backend_tokenizer.post_processor  # a copy, which is put back below
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _clear_trim_offsets(state: Any) -> bool:
    """Clear ``trim_offsets`` in a post-processor and its parts; return whether it was set anywhere. Tokens do not
    change.
    """
    was_set = False
    parts: list[Any] = []
    if isinstance(state, list):
        parts = state
    elif isinstance(state, dict):
        parts = list(state.values())
        if state.get("trim_offsets"):
            state["trim_offsets"], was_set = False, True
    for part in parts:
        was_set |= _clear_trim_offsets(part)
    return was_set


def stripping_ids(tokenizer: Any) -> np.ndarray:
    """Return the ids of the tokens that take in the spaces behind them (``rstrip``), as those of Phi-3 do."""
    return np.array([index for index, token in tokenizer.added_tokens_decoder.items() if token.rstrip], dtype=np.int64)


def reaches_behind(position: int, ids: np.ndarray, offsets: np.ndarray, stripping: np.ndarray) -> np.ndarray:
    """Return the mask (T,) of the tokens that stand for a character at or after ``position`` of a text.

    ``offsets`` has the first character of each token and the one after its last, (T, 2). A token of ``stripping`` (`stripping_ids`) that
    begins before ``position`` does not count: it has only taken in the spaces behind it.
    """
    only_strips = (offsets[:, 0] < position) & np.isin(ids, stripping)
    return np.asarray((offsets[:, 1] > position) & ~only_strips)


def read_template(path: Path, name: str) -> str:
    """Return the chat template in a file; raise ConfigError if it cannot be read or parsed. ``name``: the path as it is set."""
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path: {name} cannot be read ({first_line(error)})") from error
    require_syntax(template, name)
    return template


def today() -> str:
    """Return the date in the form of ISO 8601."""
    return date.today().isoformat()


def prints_date(tokenizer: Any) -> bool:
    """Return whether a chat template of a tokenizer prints the date on which it is rendered."""
    return "strftime_now" in str(tokenizer.chat_template)


def dated(tokenizer: Any, day: str | None) -> dict[str, str]:
    """Return the options of ``apply_chat_template`` with which a tokenizer's templates print ``day``; None for the date of the clock."""
    return {"strftime_now": day} if day is not None and prints_date(tokenizer) else {}


_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_WITH_MASK = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"return_offsets_mapping": True}}  # fmt: skip
_SAMPLE_ANSWER = "\u2042"  # a character that occurs in no template
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """The tokens of a conversation.

    Attributes:
        ids: token ids, shape (T,).
        assistant: mask of the tokens that the assistant generates, bool (T,).
        unended: index of the last token of the first answer that no end-of-turn token follows; None if one follows each.
        ends: indices of the special tokens that end answers, int (E,); none if an answer lacks one.
        inner: special tokens inside of answers.
        dropped: index of the first message of which the template drops a part; None if it renders all.
        images: the tokens of each image, as the index of the first one and that behind the last.
    """

    ids: np.ndarray
    assistant: np.ndarray
    unended: int | None
    ends: np.ndarray
    inner: frozenset[int]
    dropped: int | None = None
    images: Sequence[Span] = ()


class ChatRenderer:
    """A renderer of conversations to tokens with a mask of the assistant's tokens, using the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        use_training_template: use TRL's version of the template with generation marks, if it has one.
        day: the date that templates print (`dated`).
        vision: the processor of images; None for a model of text.

    Raises:
        ConfigError: the tokenizer has no chat template or no character offsets.
    """

    def __init__(
        self, tokenizer: Any, use_training_template: bool = True, day: str | None = None, vision: Vision | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template, so conversations cannot be rendered; "
                "set chat_template_path, for example to the model's instruct version"
            )
        limit_templates()
        self._tokenizer, self._date_options = with_offsets(tokenizer), dated(tokenizer, day)
        self._trl_template = training_template(tokenizer) if use_training_template else None
        self._special_ids = np.array(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))
        self._stripping_ids = stripping_ids(tokenizer)
        self._special_tokens = tokenizer.convert_ids_to_tokens(self._special_ids.tolist())
        self._styles: dict[str, TemplateStyle] = {}
        self._blank_by_id: dict[int, bool] = {}  # whether a token is whitespace, by its id
        self._vision, self._contents = vision, TemplateContents(self._tokenizer, self._date_options, vision)

    def render(self, conversation: Conversation, images: Sequence[Any] = ()) -> TokenizedConversation:
        """Render a conversation. ``images``: the images that it refers to.

        Raises:
            RowError: the template rejects the conversation or drops an answer or call, or an answer cannot be located.
        """
        try:
            rendered = render_checked(conversation, self.text)
            return replace(self._tokenize(conversation, rendered, images), dropped=rendered.dropped)
        except (RowError, ConfigError):  # a template that exceeds a limit would do so in every row
            raise
        except Exception as error:  # a template is a program and may raise any exception
            raise RowError(f"the chat template rejects this row: {first_line(error)}") from error

    def _tokenize(
        self, conversation: Conversation, rendered: RenderedConversation, images: Sequence[Any]
    ) -> TokenizedConversation:
        """Return the tokens of a rendered conversation. The assistant's tokens are found by the generation marks of the model's template;
        if it has none, by the marks of TRL's template, if that renders the same text; else by locating the answers in the text.
        """
        if self._has_generation_marks(rendered.conversation):
            return self._tokenize_with_marks(rendered.conversation, None, images)
        # TRL's template may expect tool arguments in a different form from the model's own.
        for variant in argument_variants(conversation) if self._trl_template is not None else ():
            if self._training_template_matches(variant, rendered.text):
                return self._tokenize_with_marks(variant, self._trl_template, images)
        try:
            spans = self._assistant_spans(rendered)
        except RowError as error:
            raise RowError(f"{error}{self._trl_template_hint()}", error.content) from error
        return self._tokenize_with_spans(rendered.text, spans, images)

    def _assistant_spans(self, rendered: RenderedConversation) -> list[Span]:
        """Return the character spans of the assistant's turns in a rendered conversation, without their end-of-turn tokens."""
        style = self._template_style(rendered.conversation)
        if not any(message.get("tool_calls") for message in rendered.conversation.messages):
            return locate_answers(rendered.text, rendered.messages, style, rendered.ends)
        if not style.opening:  # the header of a turn cannot be told from what the assistant generates
            raise RowError(f"tool calls cannot be located in the rendered conversation; {USE_MARKS}")
        return locate_turns(rendered.text, rendered.conversation, self._text_before_thinking, self._special_tokens)

    def _trl_template_hint(self) -> str:
        """Return the hint at TRL's template with generation marks, for a row that it renders differently; empty without a file of it."""
        file = None if self._trl_template is None else training_template_file(self._trl_template)
        return f", such as TRL's, which renders this row differently: set chat_template_path: {file}" if file else ""

    def _training_template_matches(self, conversation: Conversation, text: str) -> bool:
        """Return whether TRL's template renders a conversation exactly as the model's own does."""
        try:
            return text == self.text(conversation, chat_template=self._trl_template)
        except Exception:  # a template is a program and may raise any exception
            return False

    def _text_before_thinking(self, conversation: Conversation, **options: Any) -> str:
        """Return the text of a conversation without a thinking block at its end, which the model has to generate."""
        return _THINKING.sub("", self.text(conversation, **options))

    def text(self, conversation: Conversation, **options: Any) -> str:
        """Return the text of a conversation as rendered by the template."""
        return str(self._apply(conversation, tokenize=False, **options))

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        """Apply the chat template to a conversation with the conversation's own options; ``options`` replace options of the same name."""
        options = {**conversation.template_options, **self._date_options, **options, "tools": conversation.tools}
        return self._tokenizer.apply_chat_template(self._contents.of(conversation), **options)

    def _expand(self, text: str, images: Sequence[Any]) -> Expanded:
        """Return a rendered text with all tokens of its images."""
        return Expanded(text) if self._vision is None else self._vision.expand(text, images)

    def _has_generation_marks(self, conversation: Conversation) -> bool:
        """Return whether the template of a conversation has generation marks."""
        # A tokenizer may have a separate template for conversations with tools.
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _tokenize_with_marks(
        self, conversation: Conversation, template: str | None, images: Sequence[Any]
    ) -> TokenizedConversation:
        """Tokenize with a template that marks generated text; None for the model's own template."""
        encoded = self._apply(conversation, chat_template=template, **_WITH_MASK)
        ids, assistant = np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
        offsets = np.array(encoded["offset_mapping"])
        _complete_last_characters(assistant, offsets)
        assistant &= ~_empty_answer_mask(assistant, conversation.messages)
        if not images:
            return self._find_ends(ids, assistant)
        # Marked tokens become spans of characters, which are marked again in the text with all tokens of the images.
        expanded = self._expand(self.text(conversation, chat_template=template), images)
        spans = [
            expanded.moved((int(offsets[start, 0]), int(offsets[end - 1, 1]))) for start, end in _parts_of(assistant)
        ]
        ids, offsets = self._encode(expanded.text)
        assistant = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            assistant |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return replace(self._find_ends(ids, assistant), images=expanded.token_spans(offsets))

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (T,) of a rendered text, and their offsets (T, 2)."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"])

    def _find_ends(self, ids: np.ndarray, assistant: np.ndarray, unended: Iterable[int] = ()) -> TokenizedConversation:
        """Return the tokens of a conversation with the ends of its answers. The end is the last token of an answer that is not whitespace,
        if it is a special token; special tokens right before it belong to the ending, too, so they are not ``inner``.

        ``unended``: the last tokens of answers that are known to lack an end.
        """
        is_special = np.isin(ids, self._special_ids)
        is_followed = np.append(assistant[1:], False)  # by another token of the same answer
        ends, in_ending, without_end = list[int](), np.zeros(len(ids), dtype=bool), [*unended]
        for last in map(int, np.flatnonzero(assistant & ~is_followed)):
            index, special = last, list[int]()
            while index >= 0 and assistant[index] and (is_special[index] or self._is_blank(int(ids[index]))):
                special += [index] if is_special[index] else []
                index -= 1
            in_ending[special] = True
            ends += special[:1]
            without_end += [] if special else [last]
        inner = frozenset(ids[assistant & is_special & ~in_ending].tolist())
        known_ends = np.array([] if without_end else ends, dtype=np.int64)
        return TokenizedConversation(ids, assistant, min(without_end, default=None), known_ends, inner)

    def _is_blank(self, token: int) -> bool:
        """Return whether a token is whitespace."""
        if token not in self._blank_by_id:
            self._blank_by_id[token] = not self._tokenizer.decode([token]).strip()
        return self._blank_by_id[token]

    def _tokenize_with_spans(self, text: str, spans: list[Span], images: Sequence[Any]) -> TokenizedConversation:
        """Tokenize a rendered text whose answers are given as character spans."""
        expanded = self._expand(text, images)
        text = expanded.text
        ids, offsets = self._encode(text)
        assistant, unended = np.zeros(len(ids), dtype=bool), list[int]()
        for start, end in map(expanded.moved, spans):
            inside = (offsets[:, 0] < end) & reaches_behind(start, ids, offsets, self._stripping_ids)
            assistant |= inside
            end_token = self._end_of_turn(text, ids, offsets, end)
            last = int(np.flatnonzero(inside)[-1]) if inside.any() else None
            if end_token is None:
                unended.append(0 if last is None else last)
            elif last is not None:
                assistant[last : end_token + 1] = True  # and spaces between them
        return replace(self._find_ends(ids, assistant, unended), images=expanded.token_spans(offsets))

    def _end_of_turn(self, text: str, ids: np.ndarray, offsets: np.ndarray, end: int) -> int | None:
        """Return the index of the special token that ends a turn, or of EOS right behind it; None unless only spaces are before it."""
        is_visible = offsets[:, 1] > offsets[:, 0]
        after = np.flatnonzero((offsets[:, 0] >= end) & is_visible & np.isin(ids, self._special_ids))
        if not len(after):
            return None
        first = int(after[0])
        between = text[end : offsets[first, 0]]
        if between.strip(" "):
            return None
        end_of_sequence = self._tokenizer.eos_token_id  # which may follow directly, as in Command R7B
        is_followed = ids[first] != end_of_sequence and ids[first + 1 : first + 2].tolist() == [end_of_sequence]
        return first + is_followed  # the index of EOS if that follows

    def _template_style(self, conversation: Conversation) -> TemplateStyle:
        """Return the style of the template with a conversation's options, which is found once for each set of options."""
        key = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if key not in self._styles:
            self._styles[key] = self._probe_template_style(conversation.template_options)
        return self._styles[key]

    def _probe_template_style(self, template_options: Mapping[str, Any]) -> TemplateStyle:
        """Return the style of the template, found by rendering short conversations; an empty style if the template rejects them."""

        def render(*contents: str, **options: Any) -> str:
            turns = zip(("user", "assistant") * 2, contents, strict=False)
            messages = [{"role": role, "content": content} for role, content in turns]
            return self.text(Conversation(messages, template_options=template_options), **options)

        padded = f"\n\n {_SAMPLE_ANSWER} \n\n"  # an answer that a template may strip
        try:
            prompt, prompt_with_opening = render("?"), render("?", add_generation_prompt=True)
            trims = render("?", padded, "?", padded) == render("?", _SAMPLE_ANSWER, "?", _SAMPLE_ANSWER)
        except ConfigError:  # a limit was exceeded
            raise
        except Exception:  # a template is a program and may raise anything, as for want of a system message
            return TemplateStyle()
        extends_prompt = prompt_with_opening.startswith(prompt)
        opening = prompt_with_opening.removeprefix(prompt) if extends_prompt else ""
        # A thinking block opened by the template is part of the answer, since the model has to generate it.
        return TemplateStyle(_THINKING.sub("", opening), trims)


def _parts_of(mask: np.ndarray) -> list[Span]:
    """Return each part of a mask (T,) as the index of its first token and that behind its last one."""
    borders = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


def _complete_last_characters(assistant: np.ndarray, offsets: np.ndarray) -> None:
    """Add the other tokens of each answer's last character to transformers' mask (T,), which has the first only. ``offsets``: (T, 2)."""
    for last in np.flatnonzero(assistant[:-1] & ~assistant[1:]):
        start, end = offsets[last]
        while last + 1 < len(assistant) and start <= offsets[last + 1, 0] < end:
            last += 1
            assistant[last] = True


def _empty_answer_mask(assistant: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
    """Return the mask of the tokens of empty answers, from which a model would learn to end its turn immediately. Raise RowError if
    an answer is empty, and the template does not mark one part of the text for each answer.
    """
    has_contents = [has_content(message) for message in messages if message["role"] == "assistant"]
    if all(has_contents):
        return np.zeros(len(assistant), dtype=bool)
    begins = assistant & ~np.insert(assistant[:-1], 0, False)
    answer = np.cumsum(begins)  # number of the answer at each token, from 1; 0 before the first
    if not len(answer) or answer[-1] != len(has_contents):
        raise RowError("an answer of the assistant is empty and cannot be located; remove it")
    return assistant & ~np.array([True, *has_contents])[answer]
