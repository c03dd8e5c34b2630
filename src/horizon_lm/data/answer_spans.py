"""Locate the assistant's answers in the rendered text of a conversation.

The whole conversation is rendered once. Rendering its prefixes would not work, because with many templates the text of
the first turn is not a prefix of the text of the first two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.data.conversations import Message, RowError

_USE_MARKS = "use a template with {% generation %} marks"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """The style in which a template renders answers.

    Attributes:
        opening: text that starts an assistant turn (the generation prompt); empty if unknown.
        trims: True if the template strips whitespace from answers.
    """

    opening: str = ""
    trims: bool = False


def locate_answers(text: str, messages: Sequence[Message], style: TemplateStyle = TemplateStyle()) -> list[Span]:
    """Return the character spans of the assistant's turns in a rendered conversation, without their end-of-turn tokens.

    All contents are placed in order and without overlap, once as early and once as late as possible. If both placements
    agree, the placement is unique. A turn starts where its opening ends, so that it includes text that the template
    inserts before the content.

    Args:
        text: the rendered conversation.
        messages: its messages.
        style: the style of the template.

    Raises:
        RowError: an answer is not in the text, or could be in several places.
    """
    opening = style.opening
    contents = [_rendered_content(text, message, style.trims) for message in messages]
    anchors = [index for index, content in enumerate(contents) if content]
    early, late = _earliest_starts(text, contents, anchors), _latest_starts(text, contents, anchors)
    spans, before, last = [], 0, -1
    for index in anchors:
        start = early[index]
        if messages[index]["role"] == "assistant":
            if start != late[index]:
                raise RowError(
                    f"the assistant's answer {shorten(contents[index])} (message {index + 1}) occurs in several places "
                    f"of the rendered conversation, so its tokens are ambiguous; reword or drop the row, or {_USE_MARKS}"
                )
            # Take the first opening after the previous message, since a turn may have several parts. If a message in between
            # could not be placed, only the last opening is certain to belong to this turn.
            find = text.find if index == last + 1 else text.rfind
            opened = find(opening, before, start) if opening else -1
            spans.append((start if opened < 0 else opened + len(opening), start + len(contents[index])))
        before, last = start + len(contents[index]), index
    return spans


def _rendered_content(text: str, message: Message, trims: bool) -> str:
    """Return the message content as rendered by the template, or an empty text if it cannot serve as an anchor."""
    content: str = message["content"]
    if message.get("tool_calls"):
        raise RowError(f"tool calls cannot be located in the rendered conversation; {_USE_MARKS}")
    if not content.strip():
        return ""
    if content not in text or (trims and message["role"] == "assistant"):
        content = content.strip()
    if content in text or message["role"] != "assistant":
        return content if content in text else ""
    raise RowError(
        f"the assistant's answer {shorten(content)} is not in the rendered conversation, because the chat "
        f"template changes it; {_USE_MARKS}"
    )


def _earliest_starts(text: str, contents: list[str], anchors: list[int]) -> dict[int, int]:
    starts, position = {}, 0
    for index in anchors:
        starts[index] = text.find(contents[index], position)
        if starts[index] < 0:
            raise RowError(
                f"message {index + 1} {shorten(contents[index])} is out of order in the rendered conversation; drop "
                f"the row, or {_USE_MARKS}"
            )
        position = starts[index] + len(contents[index])
    return starts


def _latest_starts(text: str, contents: list[str], anchors: list[int]) -> dict[int, int]:
    starts, limit = {}, len(text)
    for index in reversed(anchors):
        limit = starts[index] = text.rfind(contents[index], 0, limit)
    return starts


def shorten(content: str) -> str:
    return repr(content if len(content) <= 40 else content[:37] + "...")
