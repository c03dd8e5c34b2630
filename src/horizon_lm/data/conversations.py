"""Messages of conversations, and the four kinds of example that rows become."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in an order that a chat template can render.

    Attributes:
        messages: role and content; of an assistant also ``tool_calls`` and ``reasoning_content``.
        tools: what the assistant may call, as JSON schemas.
        template_options: more that the template is given, such as ``enable_thinking``.
        num_prompt: so many first messages are the prompt, in rows that say so; else None.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    num_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Text to go on from its first token."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """Text, and how it goes on. No chat template is applied."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to the same prompt."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


Example = Conversation | Text | Completion | Preference


ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant", "function": "tool",
}  # fmt: skip
TEXTS = ("content", "reasoning_content", "thinking")  # what a message says, besides calls
_READ = {  # besides role and content
    "assistant": ("tool_calls", *TEXTS[1:]),
    "tool": ("name", "tool_call_id"),
    "user": ("name",),
}


class RowError(Exception):
    """What is wrong with a row; the caller knows its place."""


def kind(value: Any) -> str:
    """A JSON value's kind, as its author would call it."""
    if value is None:
        return "missing or null"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")


def read_messages(row: Mapping[str, Any], name: str) -> list[Message]:
    """The messages in a field; RowError for what is none."""
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise RowError(f"field {name!r} must be a list of {{role, content}}, but is {kind(value)}")
    return [_message(entry, f"{name}[{number}]") for number, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise RowError(f"{where} must be {{role, content}}, but is {kind(entry)}")
    entry = {key: value for key, value in entry.items() if value is not None}
    if "from" in entry and "role" not in entry:
        entry = _of_sharegpt(entry, where)
    role = entry.get("role")
    if not isinstance(role, str):
        raise RowError(f"{where}.role must be text, but is {kind(role)}")
    if role not in ROLES:
        raise RowError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(entry, where)}
    for key, value in entry.items():
        if key in ("role", "content") or value in ("", [], {}):  # 0 and false say something
            continue
        if key not in _READ.get(role, ()):
            raise RowError(f"{where}.{key} is not read; remove it, or leave the row out")
        message[key] = _tool_calls(value, where) if key == "tool_calls" else value
    return message


def _content(entry: Mapping[str, Any], where: str) -> str:
    content = entry.get("content")
    if content is None and entry.get("tool_calls"):
        return ""
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        others = [part.get("type") for part in content if part.get("type") != "text"]
        if others:
            raise RowError(f"{where}.content has a part of type {others[0]!r}; only text is read")
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    if not isinstance(content, str):
        raise RowError(f"{where}.content must be text, but is {kind(content)}")
    return content


def _tool_calls(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise RowError(f"{where}.tool_calls must be a list of calls, but is {kind(value)}")
    calls = []
    for call in value:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{where}.tool_calls: a call must have a function with a name")
        function = dict(function)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _json(function["arguments"], f"{where}.tool_calls: arguments of {function['name']}")
        calls.append({**{k: v for k, v in call.items() if k not in function}, "type": "function", "function": function})
    return calls


def _of_sharegpt(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``from`` and ``value`` as role and content; a function call is the assistant's, and is JSON."""
    role, value = entry["from"], entry.get("value")
    if not isinstance(role, str):
        raise RowError(f"{where}.from must be text, but is {kind(role)}")
    if value is None:
        raise RowError(f"{where} has 'from', but no 'value'; a message is {{from, value}} or {{role, content}}")
    if role == "function_call" and isinstance(value, str):
        calls = _json(value, f"{where}.value")
        return {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    rest = {key: each for key, each in entry.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": value, **rest}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"{where} is not valid JSON ({error.msg})") from error


def is_said(value: Any) -> bool:
    """Whether a text of a message is there, and more than spaces."""
    return isinstance(value, str) and bool(value.strip())


def says_something(message: Message) -> bool:
    """Whether a message has a content, a call or a thought."""
    return bool(message.get("tool_calls")) or any(is_said(message.get(name)) for name in TEXTS)


def checked(messages: list[Message]) -> list[Message]:
    """Messages in an order that has something to learn; RowError for others."""
    roles = [message["role"] for message in messages]
    if {"system", "developer"} & set(roles[1:]):
        raise RowError("the system message must be the first one")
    if "assistant" not in roles:
        raise RowError("there is no message of the assistant, so nothing to learn")
    turns = roles[1:] if roles[0] in ("system", "developer") else roles
    for number, (before, role) in enumerate(pairwise(turns), 1):
        if before == role and role in ("user", "assistant"):
            raise RowError(f"turns {number} and {number + 1} are both the {role}'s; join them or remove one")
        if role == "tool" and before not in ("assistant", "tool"):
            raise RowError(f"turn {number + 1} is a tool's, but no assistant's call stands before it")
    return messages
