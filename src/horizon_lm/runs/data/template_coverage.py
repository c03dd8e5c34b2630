"""Find the parts of a conversation that a chat template drops, and the places of those that it renders.

A unique marker is appended to each part, and parts whose marker is missing from the rendered text were dropped. If the text is
otherwise unchanged, the markers stand where the parts end. Searching for the parts themselves would not work: an answer of one
letter occurs in almost any text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horizon_lm.runs.data.conversations import TEXT_KEYS, Conversation, Message, RowError, has_text

Render = Callable[[Conversation], str]  # function that renders a conversation to text


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation together with its rendered text.

    Attributes:
        text: the rendered text.
        conversation: the conversation, with tool arguments in the form that the template expects.
        messages: the messages whose content is in the text.
        dropped: index of the first message of which a part is not in the text, 0 for a tool; None if the text has every part.
        ends: the end of the content of each message in the text, apart from whitespace, by index in ``messages``; None if
            they are not certain.
    """

    text: str
    conversation: Conversation
    messages: Sequence[Message]
    dropped: int | None
    ends: Mapping[int, int] | None = None


def render_checked(conversation: Conversation, render: Render) -> RenderedConversation:
    """Render a conversation and check that no answer or tool call is dropped.

    Arguments of tool calls are given as objects. If the template fails with these, or prints them in Python's syntax, they are given as
    JSON text instead.

    Raises:
        RowError: the template drops an answer or a tool call.
        Exception: any error of the template.
    """
    first_rendered: tuple[Conversation, str, str] | None = None
    first_error: Exception | None = None
    for variant in argument_variants(conversation):
        try:
            text = render(variant)
        except Exception as error:  # a template is a program and may raise anything
            first_error = first_error or error
            continue
        marked = _render_with_markers(variant, render)
        first_rendered = first_rendered or (variant, text, marked)
        # In a dict that is printed in Python's syntax, the marker of arguments is in single quotes.
        if f"'{_marker('arguments')}': '" not in marked.casefold():
            return _check_coverage(variant, text, marked)
    if first_rendered is None:  # no variant could be rendered
        assert first_error is not None
        raise first_error
    return _check_coverage(*first_rendered)


def argument_variants(conversation: Conversation) -> Iterator[Conversation]:
    """Yield a conversation, then if it has tool calls a copy with their arguments as JSON text, which some templates expect."""
    yield conversation
    if any(_calls(message) for message in conversation.messages):
        yield replace(conversation, messages=[_with_json_arguments(message) for message in conversation.messages])


def _check_coverage(conversation: Conversation, text: str, marked: str) -> RenderedConversation:
    """Return a conversation with its text and the parts that are in it; raise RowError if an answer or a call is missing from the text.

    ``marked``: the text with a marker behind each part.
    """
    folded = marked.casefold()
    missing = [place for place in _parts(conversation) if _marker(*place) not in folded]
    for index, message in enumerate(conversation.messages):
        if any(place[:2] == ("call", index) for place in missing):
            raise RowError(
                "the chat template drops a tool call, so the model would learn to end its turn instead; set chat_template_path to "
                "a template that renders tool calls, or drop the row"
            )
        if ("content", index) in missing and message["role"] == "assistant" and not _calls(message):
            raise RowError(
                f"the chat template drops the assistant's answer (message {index + 1}), so there is nothing to train on; set "
                "chat_template_path to a template that renders it"
            )
    kept = [index for index in range(len(conversation.messages)) if ("content", index) not in missing]
    messages = [conversation.messages[index] for index in kept]
    dropped = min((0 if kind == "tool" else int(index) for kind, index, *_ in missing), default=None)
    return RenderedConversation(text, conversation, messages, dropped, _content_ends(text, marked, messages, kept))


def _content_ends(
    text: str, marked: str, messages: Sequence[Message], indices: Sequence[int]
) -> Mapping[int, int] | None:
    """Return the ends of the contents by index in ``messages``, or None if they are not certain.

    Args:
        text: the rendered conversation.
        marked: the same with a marker behind each part.
        messages: messages whose content is in the text.
        indices: their indices in the conversation.
    """
    if _MARKER.sub("", marked) != text:  # contents with markers have changed more than themselves
        return None
    places_of_marker: dict[str, list[int]] = {}  # in the text without markers
    marker_chars = 0  # of the markers so far
    for match in _MARKER.finditer(marked):
        places_of_marker.setdefault(match[0], []).append(match.start() - marker_chars)
        marker_chars += len(match[0])
    ends: dict[int, int] = {}
    for number, (message, index) in enumerate(zip(messages, indices, strict=True)):
        marker_places = places_of_marker.get(_marker("content", index), [])
        if len(marker_places) == 1:
            ends[number] = marker_places[0]
        elif marker_places and message["role"] == "assistant":  # an answer that is there twice
            return None
    return ends


# Markers

_Part = tuple[str | int, ...]
_MARKER = re.compile(r"qzx[a-z_]+(?:y\d+)*xzq")


def _marker(*place: str | int) -> str:
    """Return a unique word that marks a part and survives changes of case and quoting."""
    return f"qzx{'y'.join(map(str, place))}xzq"


def _parts(conversation: Conversation) -> Iterator[_Part]:
    """Yield a `_Part` for each part of a conversation that has content: its kind, and its index or indices, as in `_marker`."""
    for index, message in enumerate(conversation.messages):
        for name in TEXT_KEYS:
            if has_text(message.get(name)):
                yield name, index
        for number in range(len(_calls(message))):
            yield "call", index, number
    for number, tool in enumerate(conversation.tools or ()):
        if isinstance(_tool_function(tool).get("name"), str):
            yield "tool", number


def _render_with_markers(conversation: Conversation, render: Render) -> str:
    """Return the text of a conversation with a marker behind every part. If the template rejects markers, return all markers alone."""
    try:
        return render(_add_markers(conversation))
    except Exception:  # assume that no part is dropped
        return " ".join(_marker(*place) for place in _parts(conversation))


def _add_markers(conversation: Conversation) -> Conversation:
    """Return a copy of a conversation with a marker at the end of each text, tool call and tool."""
    messages = []
    for index, message in enumerate(conversation.messages):
        changed = dict(message)
        for name in TEXT_KEYS:
            if has_text(message.get(name)):
                core = message[name].rstrip()  # a template that strips whitespace finds it behind the marker
                changed[name] = core + _marker(name, index) + message[name][len(core) :]
        calls = [
            {**call, "function": _mark_call(call["function"], _marker("call", index, number))}
            for number, call in enumerate(_calls(message))
        ]
        messages.append({**changed, "tool_calls": calls} if calls else changed)
    tools = conversation.tools
    if tools:
        tools = [_mark_tool(tool, _marker("tool", number)) for number, tool in enumerate(tools)]
    return replace(conversation, messages=messages, tools=tools)


def _mark_call(function: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return the function of a call with a marker behind its name, and in its arguments if it has any."""
    marked = {**function, "name": function["name"] + mark}
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        marked["arguments"] = {**arguments, _marker("arguments"): mark}
    elif isinstance(arguments, str):
        marked["arguments"] = arguments + mark
    return marked


def _mark_tool(tool: Any, mark: str) -> Any:
    """Return a tool with a marker behind the name of its function, if it has one."""
    function = _tool_function(tool)
    if not isinstance(function.get("name"), str):
        return tool
    named = {**function, "name": function["name"] + mark}
    return {**tool, "function": named} if "function" in tool else named


def _tool_function(tool: Any) -> Mapping[str, Any]:
    """Return the function that a tool is, or has under ``function``; an empty one if it is malformed."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


# Tool calls


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _with_json_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
    calls = [{**call, "function": _function_with_json(call["function"])} for call in _calls(message)]
    return {**message, "tool_calls": calls} if calls else message


def _function_with_json(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a call with its arguments as JSON text, ``{}`` without any."""
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}
