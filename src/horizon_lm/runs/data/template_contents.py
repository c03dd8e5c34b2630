"""Give contents of messages to a chat template in the form that it renders: as text, or as parts with images between texts."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.runs.data.conversations import PICTURE, Conversation, Message
from horizon_lm.runs.data.vision import Vision

_SAMPLE = "\u2042"  # a character that occurs in no template


class TemplateContents:
    """The form of contents that the chat template of a tokenizer renders, found by rendering samples.

    Args:
        tokenizer: the tokenizer.
        options: options of each rendering.
        vision: the processor of images; None for a model of text, whose contents stay text.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], vision: Vision | None) -> None:
        self._tokenizer, self._options, self._vision = tokenizer, options, vision

    def of(self, conversation: Conversation) -> Sequence[Message]:
        """Return the messages of a conversation with contents that the template renders."""
        has_images = bool(conversation.images)
        if self._vision is None or not (has_images or self.drops_texts):
            return conversation.messages
        if self._takes_parts:
            return [{**each, "content": as_parts(each["content"], has_images)} for each in conversation.messages]
        token = self._vision.processor.image_token
        return [{**each, "content": each["content"].replace(PICTURE, token)} for each in conversation.messages]

    def place_in_text(self, text: str) -> str:
        """Return a text that no template renders with the tokens of the model in place of each `PICTURE`, as the template writes them."""
        assert self._vision is not None
        return text.replace(PICTURE, self._around_image if PICTURE in text else "")

    @cached_property
    def _around_image(self) -> str:
        """The token of the processor, with others around it that the template writes for an image between two texts."""
        assert self._vision is not None
        token: str = self._vision.processor.image_token
        if self._tokenizer.chat_template is None or not self._takes_parts:
            return token
        parts = as_parts(f"{_SAMPLE}{PICTURE}{_SAMPLE}", has_images=True)
        between = self._render(parts).split(_SAMPLE)[1:2]
        return between[0].strip() if between and token in between[0] else token

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template renders contents that are parts, and not their syntax in Python."""
        text = self._render(as_parts(_SAMPLE, has_images=False))
        return _SAMPLE in text and "'type'" not in text

    @cached_property
    def drops_texts(self) -> bool:
        """True if the template renders contents that are parts, but not those that are text, as LLaVA's."""
        return self._takes_parts and _SAMPLE not in self._render(_SAMPLE)

    def _render(self, content: Any) -> str:
        """Return the text of a turn of the user; empty if the template rejects it."""
        try:
            message = {"role": "user", "content": content}
            return str(self._tokenizer.apply_chat_template([message], tokenize=False, **self._options))
        except ConfigError:  # a limit was exceeded
            raise
        except Exception:  # a template is a program and may raise any exception
            return ""


def as_parts(content: str, has_images: bool) -> list[Mapping[str, str]]:
    """Return a content as parts. ``has_images``: `PICTURE` stands for an image in it."""
    parts: list[Mapping[str, str]] = []
    for number, text in enumerate(content.split(PICTURE) if has_images else [content]):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
