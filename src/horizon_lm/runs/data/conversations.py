"""Define the four kinds of examples, and read and validate the messages of conversations."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Message = dict[str, Any]
PICTURE = "\ufffc"  # the character of Unicode for an object in a text; it stands for an image in texts of a row that has images
IMAGES = "images"  # key of a message for the references to the images in its content, in their order; None for one of a column


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in an order that a chat template can render.

    Attributes:
        messages: dicts with role and content; the assistant's also with ``tool_calls`` and ``reasoning_content``.
        tools: JSON schemas of the tools that the assistant may call.
        template_options: further arguments of the chat template, such as ``enable_thinking``.
        num_prompt: number of leading messages that form the prompt; None if the row has no separate prompt.
        images: references to the images that the contents have `PICTURE` for, in this order.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    num_prompt: int | None = None
    images: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A text to train on from its first token, with the images that it has `PICTURE` for."""

    text: str
    images: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion as text, with the images that they have `PICTURE` for. No chat template is applied."""

    prompt: str
    completion: str
    images: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to the same prompt."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion


Example = Conversation | Text | Completion | Preference


ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "system": "system", "observation": "tool", "function_call": "assistant", "function": "tool",
    **{role: role for role in ROLES},
}  # fmt: skip
TEXT_KEYS = ("content", "reasoning_content", "thinking")  # keys for the text of a message, apart from tool calls
_OPTIONAL_KEYS = {  # in addition to role and content
    "assistant": ("tool_calls", *TEXT_KEYS[1:]),
    "tool": ("name", "tool_call_id"),
    "user": ("name",),
}


class RowError(Exception):
    """A row that cannot be used. The caller adds the place of the row.

    Args:
        message: the error.
        content: the part of the message that quotes the row.

    Attributes:
        content: the same.
        fault: the message without its content and numbers, which is the same for all rows that have this fault.
        file: the file or address beside the rows that the error is about, which may be repaired without them; empty for others.
    """

    def __init__(self, message: str, content: str = "") -> None:
        super().__init__(message)
        self.file = ""
        self.content, self.fault = content, re.sub(r"\d+", "0", message.replace(content, "", 1))


def describe_type(value: Any) -> str:
    """Return the type of a JSON value in words, for messages."""
    if value is None:
        return "missing or null"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if isinstance(value, bool):
        return "true or false"
    words = {str: "text", dict: "an object", int: "a number", float: "a number"}
    return words.get(type(value), f"of type {type(value).__name__}")


def read_messages(row: Mapping[str, Any], name: str) -> list[Message]:
    """Return the messages in a field of a row; raise RowError if they are malformed."""
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise RowError(f"field {name!r} must be a list of {{role, content}}, but is {describe_type(value)}")
    return [_message(entry, f"{name}[{number}]") for number, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    """Return a message of a row in the form of chat templates; raise RowError, naming ``where``, if it is malformed."""
    if not isinstance(entry, Mapping):
        raise RowError(f"{where} must be {{role, content}}, but is {describe_type(entry)}")
    entry = {key: value for key, value in entry.items() if value is not None}
    content_place, calls_place = f"{where}.content", f"{where}.tool_calls"  # for errors, as the row has them
    if "from" in entry and "role" not in entry:  # ShareGPT
        content_place = f"{where}.value"
        calls_place = content_place if entry["from"] == "function_call" else calls_place
        entry = _convert_sharegpt(entry, where)
    role = entry.get("role")
    _require_role(role, ROLES, f"{where}.role")
    content, images = _content(entry, content_place)
    message: Message = {"role": role, "content": content} | ({IMAGES: images} if images else {})
    for key, value in entry.items():
        if key in ("role", "content", IMAGES) or value in ("", [], {}):  # 0 and false are also values
            continue
        if key not in _OPTIONAL_KEYS.get(role, ()):
            raise RowError(f"{where}.{key} is not supported; remove it, or drop the row")
        message[key] = _tool_calls(value, calls_place) if key == "tool_calls" else value
    return message


def _require_role(role: Any, known: Collection[str], where: str) -> None:
    """Raise RowError, naming ``where``, if a value is none of the known names of speakers."""
    if not isinstance(role, str):
        raise RowError(f"{where} must be text, but is {describe_type(role)}")
    if role not in known:
        raise RowError(f"{where} is {role!r}; it must be one of {', '.join(known)}")


def _content(entry: Mapping[str, Any], where: str) -> tuple[str, list[Any]]:
    """Return the content of a message, or the texts in a list of parts joined, with `PICTURE` for each image, and references to these.

    Raises:
        RowError: it is neither text nor images; names ``where``.
    """
    content = entry.get("content")
    if content is None and entry.get("tool_calls"):
        return "", []
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        texts, images = [], []
        for number, part in enumerate(content):
            kind = part.get("type")
            if kind in _IMAGE_PARTS:
                images.append(_reference(part, f"{where}[{number}]"))
            elif kind != "text":
                raise RowError(f"{where} has a part of type {kind!r}; only text and images are supported")
            texts.append(PICTURE if kind in _IMAGE_PARTS else part.get("text"))
        if all(isinstance(text, str) for text in texts):
            return "".join(texts), images
    if not isinstance(content, str):
        raise RowError(f"{where} must be text, but is {describe_type(content)}")
    images = entry.get(IMAGES) or []
    if not isinstance(images, list) or (
        images and len(images) != content.count(PICTURE)
    ):  # unless this message was read before
        raise RowError(
            f"{where} has images beside it; write them in the field 'images' of the row, or as parts of the content"
        )
    return content, images


_IMAGE_PARTS = ("image", "image_url")  # types of parts of messages; the second one is OpenAI's


def _reference(part: Mapping[str, Any], where: str) -> Any:
    """Return the reference in a part of a message, as it is written; None for an image of a column. Raise RowError, naming ``where``, for
    one that is neither text, bytes nor an object.
    """
    names = ("image", "image_url", "url", "path", "bytes", "base64")
    found = next((part[name] for name in names if part.get(name)), None)
    if not isinstance(found, str | bytes | Mapping | None):
        raise RowError(f"{where} must be the path of an image, its bytes or a data URI, but is {describe_type(found)}")
    return found


def _tool_calls(value: Any, where: str) -> list[Any]:
    """Return calls in OpenAI's form, with arguments in JSON text parsed. Raise RowError, naming ``where``, if they are malformed."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise RowError(f"{where} must be a list of calls, but is {describe_type(value)}")
    calls = []
    for call in value:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{where}: a call must have a function with a name")
        function = dict(function)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _json(function["arguments"], f"{where}: arguments of {function['name']}")
        further = {key: each for key, each in call.items() if key not in function}  # such as the call's id
        calls.append({**further, "type": "function", "function": function})
    return calls


def _convert_sharegpt(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a ``{from, value}`` message to ``{role, content}``, and a function call to a tool call of the
    assistant.
    """
    role, value = entry["from"], entry.get("value")
    _require_role(role, _SHAREGPT_ROLES, f"{where}.from")
    if value is None:
        raise RowError(f"{where} has 'from' but no 'value'; a message is {{from, value}} or {{role, content}}")
    if role == "function_call" and isinstance(value, str):
        calls = _json(value, f"{where}.value")
        return {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    rest = {key: each for key, each in entry.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT_ROLES[role], "content": value, **rest}


def _json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raise RowError, naming ``where``, if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from error


def has_text(value: Any) -> bool:
    """Return whether a value is a string that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def has_content(message: Message) -> bool:
    """Return whether a message has a text, a tool call or reasoning."""
    return bool(message.get("tool_calls")) or any(has_text(message.get(name)) for name in TEXT_KEYS)


def has_answer(example: Example) -> bool:
    """Return whether an example has a text, a completion or an assistant's answer that is not blank; a preference needs two answers."""
    if isinstance(example, Preference):
        return has_answer(example.chosen) and has_answer(example.rejected)
    if isinstance(example, Conversation):
        return any(each["role"] == "assistant" and has_content(each) for each in example.messages)
    return has_text(example.text if isinstance(example, Text) else example.completion)


def validate_messages(messages: list[Message]) -> list[Message]:
    """Return the messages unchanged; raise RowError if their order is invalid."""
    roles = [message["role"] for message in messages]
    if {"system", "developer"} & set(roles[1:]):
        raise RowError("the system message must be the first one")
    turns = roles[1:] if roles[0] in ("system", "developer") else roles
    for number, (before, role) in enumerate(pairwise(turns), 1):
        if before == role and role in ("user", "assistant"):
            raise RowError(f"turns {number} and {number + 1} are both the {role}'s; merge them or remove one")
        if role == "tool" and before not in ("assistant", "tool"):
            raise RowError(f"turn {number + 1} is a tool's, but does not follow a call of the assistant")
    return messages
