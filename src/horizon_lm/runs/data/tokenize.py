"""Tokenize examples, mask the tokens to train on, and check what is left of them at the maximum length."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import cached_property, reduce
from operator import or_
from typing import Any

import numpy as np

from horizon_lm.runs.data import trl_compat
from horizon_lm.runs.data.chat_template import (
    ChatRenderer,
    TokenizedConversation,
    prints_date,
    reaches_behind,
    stripping_ids,
    today,
    with_offsets,
)
from horizon_lm.runs.data.conversations import (
    Completion,
    Conversation,
    Example,
    Message,
    Preference,
    RowError,
    Text,
    has_answer,
    has_content,
    has_text,
)
from horizon_lm.runs.data.table_cache import digest
from horizon_lm.runs.data.template_contents import TemplateContents
from horizon_lm.runs.data.vision import Expanded, LoadedImage, Pictures, TokenImage, token_images


class RowFlag(IntFlag):
    """Facts about a row as it is used, after truncation, that are counted and reported. Cached tables have their numbers."""

    TRUNCATED = 1
    MISSING_EOS = 2  # no end-of-turn token follows an answer
    LOST_TARGETS = 4  # by truncation
    DROPPED_BY_TEMPLATE = 8  # messages, reasoning or tools
    UNTEMPLATED = 16  # prompt and completion as text, although the tokenizer has a chat template
    SPECIAL_TEXT = 32  # a special token in a message of another than the assistant
    ASSISTANT_FIRST = 64  # before any turn of the user
    UNANSWERED = 128  # the last turn is not the assistant's
    BLANK = 256  # a question or one of several answers without a character but whitespace
    NO_ANSWER = 512  # no target, or no text, completion or answer but whitespace
    SAME_ANSWERS = 1024  # of a preference
    CUT_ANSWER = 2048  # as NO_ANSWER, but by truncation
    CUT_IMAGE = 4096  # by truncation, with which the row cannot be used


REASONS = (RowFlag.NO_ANSWER, RowFlag.CUT_ANSWER, RowFlag.SAME_ANSWERS)
LEFT_OUT = reduce(or_, REASONS)  # rows with one of these are not used
_NO_FLAGS, _NO_ENDS = RowFlag(0), np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized sequence.

    Attributes:
        ids: token ids, int32 (T,).
        trained: mask of the targets, bool (T,). The first token is never a target, since nothing predicts it.
        flags: facts to report.
        ends: indices of the special tokens that end answers, int (E,).
        inner: special tokens inside of answers.
        images: the images in it, in the order of their tokens.
    """

    ids: np.ndarray
    trained: np.ndarray
    flags: RowFlag = _NO_FLAGS
    ends: np.ndarray = field(default_factory=lambda: _NO_ENDS)
    inner: frozenset[int] = frozenset()
    images: Sequence[TokenImage] = ()

    @property
    def num_targets(self) -> int:
        """The number of tokens to train on."""
        return int(self.trained[1:].sum())

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that are trained on as the end of an answer, each once."""
        ends = self.ends[self.trained[self.ends]]
        return sorted(set(self.ids[ends].tolist()) - self.inner)


def _flag_if(flag: RowFlag, is_set: object) -> RowFlag:
    return flag if is_set else _NO_FLAGS


def flags_of_row(sequences: Sequence[Tokens]) -> RowFlag:
    """Return the flags of all sequences of a row, but of `REASONS` to leave it out only the first one, so that it is counted once."""
    flags = reduce(or_, (each.flags for each in sequences))
    first = next((reason for reason in REASONS if reason in flags), _NO_FLAGS)
    return flags & ~LEFT_OUT | first


def _turn_flags(messages: Sequence[Message]) -> RowFlag:
    """Return the flags of the first and the last turn of a conversation."""
    turns = [each["role"] for each in messages if each["role"] not in ("system", "developer")]
    first = _flag_if(RowFlag.ASSISTANT_FIRST, turns[:1] == ["assistant"])
    return first | _flag_if(RowFlag.UNANSWERED, turns[-1:] != ["assistant"])


def origin(tokenizer: Any, day: str) -> dict[str, str]:
    """Return all that the tokens of rows depend on besides rows and settings: versions of packages, hashes of the tokenizer and of its chat
    template, and the date if the template prints it.
    """
    import tokenizers
    import transformers

    versions = {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "trl": trl_compat.version(),
    }
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.name_or_path
    result = {
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "tokenizer": digest(
            type(tokenizer).__name__, content, tokenizer.special_tokens_map, tokenizer.split_special_tokens
        ),
        "chat template": digest(tokenizer.chat_template),
    }
    return result | ({"date": day} if prints_date(tokenizer) else {})


class ExampleTokenizer:
    """A tokenizer of examples, with a mask of the tokens to train on.

    Args:
        tokenizer: a tokenizer of transformers.
        train_on: ``assistant``, ``completion`` or ``all``; None for the assistant's tokens of a conversation, the completion
            of a prompt, and all tokens of a text.
        max_length: length to which sequences are truncated, or None.
        day: the date that chat templates print; None for that of the clock.
        pictures: the images of the rows; None for a model of text, with which rows with images are rejected.

    Attributes:
        dependencies: all that tokens depend on besides the rows, as JSON-like values.
    """

    def __init__(
        self, tokenizer: Any, train_on: str | None, max_length: int | None, day: str | None = None,
        pictures: Pictures | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer, self._train_on, self._max_length = with_offsets(tokenizer), train_on, max_length
        self._day, self._pictures = day, pictures
        self.dependencies: list[Any] = [train_on, max_length, origin(tokenizer, day or today())]
        self.dependencies += [] if pictures is None else [pictures.vision.dependencies, pictures.files.allow_downloads]
        self._renderer: ChatRenderer | None = None
        self._stripping_ids = stripping_ids(tokenizer)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {
            *tokenizer.all_special_tokens
        }
        self._special_pattern = re.compile("|".join(map(re.escape, special))) if special else None

    def tokenize(self, example: Example) -> list[Tokens]:
        """Return the truncated sequence of an example, or both sequences of a preference. All flags are about the tokens that are left.

        Raises:
            RowError: the example cannot be rendered or masked.
        """
        if isinstance(example, Text):
            return [self._tokenize_text(example)]
        if not isinstance(example, Preference):
            return [self._tokenize_answer(example, self._train_on)]
        pair = [self._tokenize_answer(answer, "completion") for answer in (example.chosen, example.rejected)]
        flag = _flag_if(RowFlag.SAME_ANSWERS, np.array_equal(pair[0].ids, pair[1].ids))
        # A prompt of a preference may begin and end with any turn.
        return [
            replace(each, flags=(each.flags | flag) & ~(RowFlag.ASSISTANT_FIRST | RowFlag.UNANSWERED)) for each in pair
        ]

    def _tokenize_text(self, example: Text) -> Tokens:
        """Return the tokens of a text, all of them targets; raise RowError if ``train_on`` asks for a part of it."""
        if self._train_on in ("assistant", "completion"):
            raise RowError(f"a text has no prompt or assistant for train_on: {self._train_on}; remove train_on")
        images = self._load(example)
        expanded = self._expand(self._with_eos(example.text), images)
        encoded = self._tokenizer(expanded.text, return_offsets_mapping=bool(images))
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        trained = np.ones(len(ids), dtype=bool)
        flags = _flag_if(RowFlag.MISSING_EOS, self._tokenizer.eos_token is None)
        flags |= _flag_if(RowFlag.NO_ANSWER, not has_answer(example))
        places = expanded.token_spans(np.array(encoded["offset_mapping"])) if images else []
        return self._truncated(ids, trained, trained, flags, images=token_images(images, places))

    def _tokenize_answer(self, example: Conversation | Completion, train_on: str | None) -> Tokens:
        """Return the tokens of a prompt and its answer. ``train_on`` None: train the completion, or the assistant's tokens without one."""
        if isinstance(example, Completion):
            return self._tokenize_completion(example, train_on)
        images = self._load(example)
        rendered = self.renderer.render(example, [each.pixels for each in images])
        default = "assistant" if example.num_prompt is None else "completion"
        trained = _TARGET_MASKS[train_on or default](rendered.assistant, example)
        messages = self._kept_messages(example, rendered)
        questions_and_answers = (each for each in messages if each["role"] in ("user", "assistant"))
        flags = (
            _turn_flags(messages)
            | _flag_if(RowFlag.MISSING_EOS, rendered.unended is not None and self._keeps(rendered.unended))
            | _flag_if(RowFlag.DROPPED_BY_TEMPLATE, rendered.dropped is not None and rendered.dropped < len(messages))
            | _flag_if(RowFlag.SPECIAL_TEXT, self._has_special_text(messages))
            | _flag_if(RowFlag.BLANK, not all(map(has_content, questions_and_answers)))
            | _flag_if(RowFlag.NO_ANSWER, not has_answer(example) or not rendered.assistant.any())
        )
        ids, answer = rendered.ids.astype(np.int32), trained & rendered.assistant
        found = token_images(images, rendered.images)
        return self._truncated(ids, trained, answer, flags, rendered.ends, rendered.inner, found)

    def _keeps(self, index: int) -> bool:
        """Return whether truncation keeps the token at an index."""
        return self._max_length is None or index < self._max_length

    def _truncated(
        self, ids: np.ndarray, trained: np.ndarray, answer: np.ndarray, flags: RowFlag, ends: np.ndarray = _NO_ENDS,
        inner: frozenset[int] = frozenset(), images: Sequence[TokenImage] = (),
    ) -> Tokens:  # fmt: skip
        """Return the tokens that truncation keeps, with the flags that follow from what is lost.

        Args:
            ids, trained: the sequence, shape (T,).
            answer: mask of the text, the completion or the answers that are trained on, bool (T,).
            flags: flags that truncation does not change.
            ends, inner, images: as in `Tokens`.
        """
        self._require_images(ids, images)
        length = self._max_length
        for image in images:  # which are read, and never written
            trained[image.start : image.end] = False
        ends = ends if length is None else ends[ends < length]
        kept = Tokens(ids[:length], trained[:length], ends=ends, inner=inner, images=images)
        flags |= _flag_if(RowFlag.CUT_IMAGE, not all(self._keeps(image.end - 1) for image in images))
        flags |= _flag_if(RowFlag.NO_ANSWER, not trained[1:].any())
        if not self._keeps(len(ids) - 1):
            flags |= RowFlag.TRUNCATED | _flag_if(RowFlag.LOST_TARGETS, trained[length:].any())
            has_answer_left = kept.num_targets and has_text(self._tokenizer.decode(kept.ids[answer[:length]]))
            flags |= _flag_if(RowFlag.CUT_ANSWER, not has_answer_left)
        return replace(kept, flags=flags)

    def _kept_messages(self, example: Conversation, rendered: TokenizedConversation) -> Sequence[Message]:
        """Return the messages of which truncation keeps tokens; all of them if it is not certain which ones.

        Only the places of answers are known. So messages up to the last answer of which truncation keeps a token count as kept; the
        messages after it, up to the first answer that is lost, count only if any text follows that answer.
        """
        messages, starts, answers = example.messages, _part_starts(rendered.assistant), _answer_indices(example)
        if self._keeps(len(rendered.ids) - 1) or len(starts) != len(answers):
            return messages
        num_kept = sum(map(self._keeps, starts))  # answers of which a token is kept
        before_lost = messages[: answers[num_kept]] if num_kept < len(answers) else messages
        if not num_kept:
            return before_lost
        end = np.flatnonzero(rendered.assistant[: self._max_length])[-1] + 1  # of the last answer that is kept
        rest = self._tokenizer.decode(rendered.ids[end : self._max_length], skip_special_tokens=True)
        return before_lost if has_text(rest) else messages[: answers[num_kept - 1] + 1]

    def _has_special_text(self, messages: Sequence[Message]) -> bool:
        """Return whether a message that is not the assistant's has a special token in its text, which the model reads as such."""
        if self._special_pattern is None or self._tokenizer.split_special_tokens:
            return False
        texts = (message["content"] for message in messages if message["role"] != "assistant")
        return any(map(self._special_pattern.search, texts))

    @property
    def renderer(self) -> ChatRenderer:
        """The conversation renderer, created on first use because not all rows need a chat template."""
        if self._renderer is None:
            vision = None if self._pictures is None else self._pictures.vision
            self._renderer = ChatRenderer(self._tokenizer, day=self._day, vision=vision)
        return self._renderer

    def _load(self, example: Conversation | Completion | Text) -> list[LoadedImage]:
        """Return the images of an example; raise RowError if one cannot be read, or the model reads none."""
        if not example.images:
            return []
        if self._pictures is None:
            raise RowError(
                "the row has an image, and the model reads only text; use a model of images and text, or drop the row"
            )
        return self._pictures.load(example.images)

    def _expand(self, text: str, images: Sequence[LoadedImage]) -> Expanded:
        """Return a text that no template renders with all tokens of its images."""
        if not images:
            return Expanded(text)
        assert self._pictures is not None
        return self._pictures.vision.expand(self._contents.place_in_text(text), [each.pixels for each in images])

    @cached_property
    def _contents(self) -> TemplateContents:
        """The form in which the chat template writes images, found once for all rows."""
        assert self._pictures is not None
        return TemplateContents(self._tokenizer, {}, self._pictures.vision)

    def _require_images(self, ids: np.ndarray, images: Sequence[TokenImage]) -> None:
        """Raise RowError if tokens (T,) that the model reads as images stand for none, as in a text that is about such a token."""
        if self._pictures is None:
            return
        is_image = np.isin(ids, self._pictures.vision.token_ids)
        for image in images:
            is_image[image.start : image.end] = False
        if is_image.any():
            token = self._tokenizer.convert_ids_to_tokens(int(ids[is_image][0]))
            raise RowError(f"a text has the token {token}, which the model reads as an image; write it differently")

    def _tokenize_completion(self, example: Completion, train_on: str | None) -> Tokens:
        """Return the tokens of a prompt and a completion that are plain text, which no template renders."""
        if train_on == "assistant":
            raise RowError("a prompt and completion in text have no assistant tokens; use train_on: completion")
        images = self._load(example)
        expanded = self._expand(example.prompt, images)
        prompt = expanded.text
        encoded = self._tokenizer(self._with_eos(prompt + example.completion), return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        # A token that spans both belongs to the completion, and so do all after it, such as those that the tokenizer appends.
        offsets = np.array(encoded["offset_mapping"])
        completion = np.cumsum(reaches_behind(len(prompt), ids, offsets, self._stripping_ids)) > 0
        trained = np.ones(len(ids), dtype=bool) if train_on == "all" else completion
        eos_id = self._tokenizer.eos_token_id
        flags = (
            _flag_if(RowFlag.MISSING_EOS, eos_id is None)
            | _flag_if(RowFlag.UNTEMPLATED, self._tokenizer.chat_template is not None)
            | _flag_if(RowFlag.BLANK, not has_text(example.prompt))
            | _flag_if(RowFlag.NO_ANSWER, not has_answer(example))
        )
        found = token_images(images, expanded.token_spans(offsets))
        return self._truncated(ids, trained, completion, flags, np.flatnonzero(ids == eos_id)[-1:], images=found)

    def _with_eos(self, text: str) -> str:
        """Return a text that ends with the tokenizer's end-of-sequence token, if it has one."""
        end = self._tokenizer.eos_token
        return text if end is None or text.endswith(end) else text + end


def _part_starts(mask: np.ndarray) -> np.ndarray:
    """Return the index of the first token of each part of a mask (T,)."""
    return np.flatnonzero(mask & ~np.insert(mask[:-1], 0, False))


def _answer_indices(example: Conversation) -> list[int]:
    """Return the indices of the assistant's messages in a conversation that are not empty; empty ones have no tokens."""
    return [i for i, each in enumerate(example.messages) if each["role"] == "assistant" and has_content(each)]


def _completion_mask(assistant: np.ndarray, example: Conversation) -> np.ndarray:
    """Return the mask (T,) of the completion: all tokens from the first answer after the prompt on or, in a row without a separate prompt,
    the assistant's tokens in the last answer. ``assistant``: the mask (T,) of the assistant's tokens.

    Raises:
        RowError: the assistant's tokens are in more or fewer parts than the conversation has answers, or one of several answers after
            the prompt is empty.
    """
    starts, answers = _part_starts(assistant), _answer_indices(example)
    if len(starts) != len(answers):
        raise RowError(
            f"the row has {len(answers)} answers, but the chat template renders {len(starts)}, so the start of the completion is "
            "ambiguous; use train_on: assistant, or another template"
        )
    first_message = example.num_prompt
    if first_message is None:  # the last answer, even if it is empty
        first_message = max((i for i, each in enumerate(example.messages) if each["role"] == "assistant"), default=0)
    after_prompt = [index for index in answers if index >= first_message]
    if not after_prompt:
        return np.zeros(len(assistant), dtype=bool)
    completion = np.arange(len(assistant)) >= starts[answers.index(after_prompt[0])]
    if example.num_prompt is None:
        return assistant & completion
    num_answers = sum(each["role"] == "assistant" for each in example.messages[first_message:])
    if num_answers > len(after_prompt):
        raise RowError("an answer after the prompt is empty, and cannot be told from the tokens around it; remove it")
    return completion


_TARGET_MASKS: dict[str, Callable[[np.ndarray, Conversation], np.ndarray]] = {
    "assistant": lambda assistant, example: assistant,
    "completion": _completion_mask,
    "all": lambda assistant, example: np.ones(len(assistant), dtype=bool),
}
