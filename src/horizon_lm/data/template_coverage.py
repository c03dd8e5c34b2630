"""What of a conversation a chat template leaves out: each part is marked with a word, and those that are missing are left out.

Looking for the parts themselves would not do: an answer of one letter stands somewhere in any text.

"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horizon_lm.data.conversations import TEXTS, Conversation, Message, RowError, is_said

Write = Callable[[Conversation], str]  # a conversation as a template writes it


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as a template writes it.

    Attributes:
        text: its rendering.
        conversation: in the form that the template takes.
        messages: those whose content is in the text.
        is_whole: the text has all that the conversation says.
    """

    text: str
    conversation: Conversation
    messages: Sequence[Message]
    is_whole: bool


def written(conversation: Conversation, write: Write) -> RenderedConversation:
    """Render a conversation.

    Raises:
        RowError: the template leaves out an answer, or a call of a tool. Besides, what the template raises.
    """
    taken: tuple[Conversation, str, str] | None = None
    refusal: Exception | None = None
    for form in forms_of(conversation):
        try:
            text = write(form)
        except Exception as error:  # of the template, which is a program
            refusal = refusal or error
            continue
        marked = _marked(form, write)
        taken = taken or (form, text, marked)
        if f"'{_mark('arguments')}': '" not in marked:  # else the template would write Python's form of them
            return _compared(form, text, marked)
    if taken is None:
        assert refusal is not None
        raise refusal
    return _compared(*taken)


def forms_of(conversation: Conversation) -> Iterator[Conversation]:
    """As it is; and with the arguments of calls as JSON text, which some templates want."""
    yield conversation
    if any(_calls(message) for message in conversation.messages):
        yield replace(conversation, messages=[_with_text(message) for message in conversation.messages])


def _compared(form: Conversation, text: str, marked: str) -> RenderedConversation:
    missing = [place for place in _places(form) if _mark(*place) not in marked]
    for index, message in enumerate(form.messages):
        if any(place[:2] == ("call", index) for place in missing):
            raise RowError(
                "the chat template leaves out a call of a tool, so the model would learn to say nothing in its place; name a "
                "template that writes calls with chat_template_path, or leave the row out"
            )
        if ("content", index) in missing and message["role"] == "assistant" and not _calls(message):
            raise RowError(
                f"the chat template leaves out the assistant's answer (message {index + 1}), so there is nothing to learn from "
                "it; name a template that writes it with chat_template_path"
            )
    messages = [message for index, message in enumerate(form.messages) if ("content", index) not in missing]
    return RenderedConversation(text, form, messages, not missing)


# Marks

_Place = tuple[str | int, ...]


def _mark(*place: str | int) -> str:
    """A word that no row has, whatever a template does to letters or quotes them with."""
    return f"qzx{'y'.join(map(str, place))}xzq"


def _places(conversation: Conversation) -> Iterator[_Place]:
    """The parts of a conversation that say something."""
    for index, message in enumerate(conversation.messages):
        for name in TEXTS:
            if is_said(message.get(name)):
                yield name, index
        for number in range(len(_calls(message))):
            yield "call", index, number
    for number, tool in enumerate(conversation.tools or ()):
        if isinstance(_function(tool).get("name"), str):
            yield "tool", number


def _marked(conversation: Conversation, write: Write) -> str:
    """The rendering with all parts marked; all marks, if the template does not take that: then nothing can be told."""
    try:
        return write(_with_marks(conversation)).casefold()
    except Exception:
        return " ".join(_mark(*place) for place in _places(conversation))


def _with_marks(conversation: Conversation) -> Conversation:
    messages = []
    for index, message in enumerate(conversation.messages):
        changed = dict(message)
        for name in TEXTS:
            if is_said(message.get(name)):
                changed[name] = message[name] + _mark(name, index)
        calls = [
            {**call, "function": _called(call["function"], _mark("call", index, number))}
            for number, call in enumerate(_calls(message))
        ]
        messages.append({**changed, "tool_calls": calls} if calls else changed)
    tools = conversation.tools and [
        _tool(tool, _mark("tool", number)) for number, tool in enumerate(conversation.tools)
    ]
    return replace(conversation, messages=messages, tools=tools)


def _called(function: Mapping[str, Any], mark: str) -> dict[str, Any]:
    arguments, word = function.get("arguments"), _mark("arguments")
    if isinstance(arguments, dict):
        arguments = {**arguments, word: mark}
    elif isinstance(arguments, str):
        arguments += mark
    return {
        **function,
        "name": function["name"] + mark,
        **({"arguments": arguments} if "arguments" in function else {}),
    }


def _tool(tool: Any, mark: str) -> Any:
    function = _function(tool)
    if not isinstance(function.get("name"), str):
        return tool
    named = {**function, "name": function["name"] + mark}
    return {**tool, "function": named} if "function" in tool else named


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


# Calls


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _with_text(message: Message) -> Message:
    """A message with the arguments of its calls as JSON text."""
    calls = [{**call, "function": _as_text(call["function"])} for call in _calls(message)]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    return {
        **function,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    }
