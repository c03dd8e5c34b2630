"""Locate the assistant's answers in the rendered text of a conversation.

The whole conversation is rendered at once. Rendering its prefixes would not work, because with many templates the text of
the first turn is not a prefix of the text of the first two. Searching for an answer is the second choice: `a` and `is` also
occur in headers and end tokens.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_lm.errors import ConfigError
from horizon_lm.runs.data.conversations import Conversation, Message, RowError, has_content

USE_MARKS = "use a template with {% generation %} marks"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """The style in which a template renders answers.

    Attributes:
        opening: text that starts an assistant turn (the generation prompt); empty if unknown.
        trims: the template strips whitespace from answers.
    """

    opening: str = ""
    trims: bool = False


def locate_answers(
    text: str,
    messages: Sequence[Message],
    style: TemplateStyle = TemplateStyle(),
    ends: Mapping[int, int] | None = None,
) -> list[Span]:
    """Return the character spans of the assistant's turns in a rendered conversation, without their end-of-turn tokens.

    A turn starts where its opening ends, so that it includes text that the template inserts before the content.

    Args:
        text: the rendered conversation.
        messages: its messages.
        style: the style of the template.
        ends: the end of each message's content in the text, apart from whitespace, as found by markers; None to search for the
            contents, which may be ambiguous.

    Raises:
        RowError: an answer is not in the text, or could be in several places.
    """
    places = _place_by_search(text, messages, style) if ends is None else _place_by_ends(text, messages, style, ends)
    spans, previous = [], -1
    for index, (start, end) in sorted(places.items()):
        if messages[index]["role"] == "assistant":
            # Take the first opening after the previous message, since a turn may have several parts. If a message in between
            # could not be placed, only the last opening is certain to belong to this turn.
            search_start = max((each for _, each in places.values() if each <= start), default=0)
            find_opening = text.find if index == previous + 1 else text.rfind
            # Spaces alone are no opening to search for: the previous turn may end with some.
            opened = find_opening(style.opening, search_start, start) if style.opening.strip() else -1
            spans.append((start if opened < 0 else opened + len(style.opening), end))
        previous = index
    return spans


def locate_turns(
    text: str, conversation: Conversation, render: Callable[..., str], special_tokens: Collection[str]
) -> list[Span]:
    """Return the spans as `locate_answers` does, for a conversation with tool calls, by rendering it up to each turn, with and without it.

    Each template prints calls in its own way, so they cannot be searched for as contents can. The texts of the first messages show
    where a turn begins and ends if the whole text begins with them. Rows for which it does not are rejected.

    Args:
        text: the rendered conversation.
        conversation: the conversation.
        render: returns the text of a conversation, followed by the opening of the assistant's next turn if it is called with
            ``add_generation_prompt=True``.
        special_tokens: the texts of the tokenizer's special tokens; a turn ends with at most one of them.

    Raises:
        RowError: the text does not begin with the text of the first messages, or the template changes an answer.
    """
    spans = []
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or not has_content(message):
            continue
        before = replace(conversation, messages=conversation.messages[:index])
        after = replace(conversation, messages=conversation.messages[: index + 1])
        try:
            to_opening, to_end = render(before, add_generation_prompt=True), render(after).rstrip()
        except ConfigError:  # a limit was exceeded
            raise
        except Exception:  # a template is a program and may raise any exception, as for a start that ends with a call
            to_opening = to_end = ""
        if not (text.startswith(to_end) and to_end.startswith(to_opening) and len(to_opening) < len(to_end)):
            raise RowError(f"tool calls cannot be located in the rendered conversation; {USE_MARKS}")
        ending_chars = max((len(token) for token in special_tokens if to_end.endswith(token)), default=0)
        start, end = len(to_opening), len(to_end) - ending_chars
        if not message.get("tool_calls") and message["content"].strip() not in text[start:end]:
            raise _changed_answer(message["content"])
        spans.append((start, end))
    return spans


def _changed_answer(content: str) -> RowError:
    """Return the error for an answer that the template does not render as it is."""
    return RowError(
        f"the assistant's answer {shorten(content)} is not in the rendered conversation, because the chat "
        f"template changes it; {USE_MARKS}",
        shorten(content),
    )


def _place_by_ends(
    text: str, messages: Sequence[Message], style: TemplateStyle, ends: Mapping[int, int]
) -> dict[int, Span]:
    """Return the spans of the contents, by the index of their message, given the places where the contents end (``ends``).

    A template may strip a content, or render it as it is. A content that is changed in another way has no span, and raises RowError if it
    is an answer.
    """
    placed = {}
    for index, end in ends.items():
        content, is_answer = messages[index]["content"], messages[index]["role"] == "assistant"
        start = end - len(content.rstrip())
        if start < 0 or text[start : start + len(content)] != content or (is_answer and style.trims):
            content = content.strip()
            start = end - len(content)
        if start >= 0 and text[start : start + len(content)] == content:
            placed[index] = (start, start + len(content))
        elif is_answer:
            raise _changed_answer(content)
    return placed


def _place_by_search(text: str, messages: Sequence[Message], style: TemplateStyle) -> dict[int, Span]:
    """Return the spans of the contents, by the index of their message; raise RowError if an answer could be in several places.

    The contents are placed in order and without overlap, once as early and once as late as possible. An answer whose earliest and latest
    place are the same can be nowhere else.
    """
    contents = [_rendered_content(text, message, style.trims) for message in messages]
    placeable = [index for index, content in enumerate(contents) if content]  # that are in the text
    early, late = _earliest_starts(text, contents, placeable), _latest_starts(text, contents, placeable)
    for index in placeable:
        if messages[index]["role"] == "assistant" and early[index] != late[index]:
            raise RowError(
                f"the assistant's answer {shorten(contents[index])} (message {index + 1}) occurs in several places "
                f"of the rendered conversation, so its tokens are ambiguous; reword or drop the row, or {USE_MARKS}",
                shorten(contents[index]),
            )
    return {index: (early[index], early[index] + len(contents[index])) for index in placeable}


def _rendered_content(text: str, message: Message, trims: bool) -> str:
    """Return the content as the template renders it; empty if it is blank or not in the text. Raise RowError for an answer that is not."""
    content: str = message["content"]
    if not content.strip():
        return ""
    is_answer = message["role"] == "assistant"
    if content not in text or (trims and is_answer):
        content = content.strip()
    if content in text:
        return content
    if is_answer:
        raise _changed_answer(content)
    return ""


def _earliest_starts(text: str, contents: list[str], placeable: list[int]) -> dict[int, int]:
    """Return the start of the content of each message in ``placeable``, as early as possible; raise RowError if one has no place."""
    starts, position = {}, 0
    for index in placeable:
        starts[index] = text.find(contents[index], position)
        if starts[index] < 0:
            raise RowError(
                f"message {index + 1} {shorten(contents[index])} is out of order in the rendered conversation; drop "
                f"the row, or {USE_MARKS}",
                shorten(contents[index]),
            )
        position = starts[index] + len(contents[index])
    return starts


def _latest_starts(text: str, contents: list[str], placeable: list[int]) -> dict[int, int]:
    """Return the start of the content of each message in ``placeable``, as late as possible; `_earliest_starts` has placed all of them."""
    starts, limit = {}, len(text)
    for index in reversed(placeable):
        limit = starts[index] = text.rfind(contents[index], 0, limit)
    return starts


def shorten(content: str) -> str:
    """Return a text in quotes, cut to 40 characters, for messages."""
    return repr(content if len(content) <= 40 else content[:37] + "...")
