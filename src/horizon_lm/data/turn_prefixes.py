"""Locate the assistant's turns in a conversation with tool calls, by rendering it up to each turn, and up to the turn's end.

Calls are printed in a way of each template, so they cannot be searched for as contents can. Where the text of the whole begins
with that of each start of the conversation, the starts show where a turn begins and ends. Other rows are rejected.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from horizon_lm.data.answer_spans import USE_MARKS, Span, changed_answer
from horizon_lm.data.conversations import Conversation, RowError, has_content
from horizon_lm.errors import ConfigError


def locate_turns(
    text: str, conversation: Conversation, render: Callable[..., str], special_tokens: Collection[str]
) -> list[Span]:
    """Return the character spans of the assistant's turns in a rendered conversation, without their end-of-turn tokens.

    Args:
        text: the rendered conversation.
        conversation: the conversation.
        render: returns the text of a conversation, followed by the opening of the assistant's next turn if it is called with
            ``add_generation_prompt=True``.
        special_tokens: the texts of the tokenizer's special tokens; a turn ends with at most one of them.

    Raises:
        RowError: the text does not begin with that of a start of the conversation, or the template changes an answer.
    """
    spans = []
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or not has_content(message):
            continue
        before, after = (replace(conversation, messages=conversation.messages[: index + more]) for more in (0, 1))
        try:
            opened, closed = render(before, add_generation_prompt=True), render(after).rstrip()
        except ConfigError:  # a limit was exceeded
            raise
        except Exception:  # a template is a program and may raise any exception, as for a start that ends with a call
            opened = closed = ""
        if not (text.startswith(closed) and closed.startswith(opened) and len(opened) < len(closed)):
            raise RowError(f"tool calls cannot be located in the rendered conversation; {USE_MARKS}")
        ending = max((len(token) for token in special_tokens if closed.endswith(token)), default=0)
        start, end = len(opened), len(closed) - ending
        if not message.get("tool_calls") and message["content"].strip() not in text[start:end]:
            raise changed_answer(message["content"])
        spans.append((start, end))
    return spans
