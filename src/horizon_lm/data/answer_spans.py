"""Where the assistant's answers are in the rendering of a conversation, by characters.

The whole conversation is rendered once. Rendering its beginnings would not do: for many templates the rendering of one
turn does not begin the rendering of two.

"""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.data.conversations import Message, RowError

_MARKS = "use a template with {% generation %} marks"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """How a template writes answers.

    Attributes:
        opening: what it writes for the assistant to go on from; empty if that is not known.
        trims: it takes spaces off their ends.
    """

    opening: str = ""
    trims: bool = False


def locate_answers(text: str, messages: Sequence[Message], manner: TemplateStyle = TemplateStyle()) -> list[Span]:
    """Character spans of the assistant's turns in the rendering of a conversation, without what ends them.

    All contents are placed in order without overlap, once as early and once as late as possible; where both agree, no
    other placement exists. A turn begins where its opening ends, so that it has what the template writes before a content.

    Raises:
        RowError: a content is not there, or could be in several places.
    """
    opening = manner.opening
    contents = [_as_rendered(text, message, manner.trims) for message in messages]
    anchors = [index for index, content in enumerate(contents) if content]
    early, late = _place_early(text, contents, anchors), _place_late(text, contents, anchors)
    spans, before, last = [], 0, -1
    for index in anchors:
        start = early[index]
        if messages[index]["role"] == "assistant":
            if start != late[index]:
                raise RowError(
                    f"the assistant's answer {shorten(contents[index])} (message {index + 1}) could be in several places "
                    f"of the conversation as the chat template renders it; reword the row or leave it out, or {_MARKS}"
                )
            # The first opening after the message before: a turn may have several parts. Where a message between could not be
            # placed, only the last one is sure to be this turn's.
            find = text.find if index == last + 1 else text.rfind
            opened = find(opening, before, start) if opening else -1
            spans.append((start if opened < 0 else opened + len(opening), start + len(contents[index])))
        before, last = start + len(contents[index]), index
    return spans


def _as_rendered(text: str, message: Message, trims: bool) -> str:
    """A content as the template writes it: many strip it. Empty where nothing can be located by it."""
    content: str = message["content"]
    if message.get("tool_calls"):
        raise RowError(
            f"the tokens of tool calls cannot be told apart in the rendering of this chat template; {_MARKS}"
        )
    if not content.strip():
        return ""
    if content not in text or (trims and message["role"] == "assistant"):
        content = content.strip()
    if content in text or message["role"] != "assistant":
        return content if content in text else ""
    raise RowError(
        f"the assistant's answer {shorten(content)} is not in the conversation as the chat template renders it; the "
        f"template changes it, so its tokens cannot be told apart: {_MARKS}"
    )


def _place_early(text: str, contents: list[str], anchors: list[int]) -> dict[int, int]:
    starts, position = {}, 0
    for index in anchors:
        starts[index] = text.find(contents[index], position)
        if starts[index] < 0:
            raise RowError(
                f"message {index + 1} {shorten(contents[index])} is not in its place in the conversation as the chat "
                f"template renders it; leave the row out, or {_MARKS}"
            )
        position = starts[index] + len(contents[index])
    return starts


def _place_late(text: str, contents: list[str], anchors: list[int]) -> dict[int, int]:
    starts, limit = {}, len(text)
    for index in reversed(anchors):
        limit = starts[index] = text.rfind(contents[index], 0, limit)
    return starts


def shorten(content: str) -> str:
    return repr(content if len(content) <= 40 else content[:37] + "...")
