"""What of a conversation a chat template leaves out: that whose change does not change the rendering."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from horizon_lm.data.examples import Conversation, Message
from horizon_lm.data.messages import RowError

Write = Callable[[Conversation], str]  # a conversation as a template writes it


def with_calls_written(conversation: Conversation, write: Write) -> Conversation:
    """A conversation as a template wants its calls: some want arguments as text.

    Raises:
        RowError: the template does not write them in either form; else what the template raises.
    """
    if not any(message.get("tool_calls") for message in conversation.messages):
        return conversation
    refusal: Exception | None = None
    for messages in _forms_of_calls(conversation.messages):
        form = replace(conversation, messages=messages)
        try:
            text = write(form)
        except Exception as error:  # of the template, which is a program
            refusal = refusal or error
            continue
        if _as_python(messages, text):
            continue
        if all(
            _changes(form, text, write, index, _called_otherwise) for index, each in enumerate(messages) if _calls(each)
        ):
            return form
        refusal = RowError(
            "the chat template leaves out a call of a tool, so the model would learn to say nothing in its place; name a "
            "template that writes calls with chat_template_path, or leave the row out"
        )
    assert refusal is not None
    raise refusal


class Unsaid:
    """Tells what a template leaves out, rendering a conversation anew only where that is in doubt.

    A template that leaves out a message of a conversation does so by its role and place. So each message of the first
    conversation with a sequence of roles is tried; in later ones those that were left out, and what cannot be found.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._suspects: dict[tuple[str, ...], set[int]] = {}

    def written(self, conversation: Conversation, text: str) -> tuple[Sequence[Message], bool]:
        """The messages that are in a rendering, and whether that has all that the conversation says.

        Raises:
            RowError: it is an answer that is left out.
        """
        messages, roles = conversation.messages, tuple(message["role"] for message in conversation.messages)
        missing = {index for index in self._in_doubt(messages, text, roles) if self._misses(conversation, text, index)}
        self._suspects[roles] = self._suspects.get(roles, set()) | missing
        if answers := [index for index in missing if roles[index] == "assistant"]:
            raise RowError(
                f"the chat template leaves out the assistant's answer (message {min(answers) + 1}), so there is nothing to "
                "learn from it; name a template that writes it with chat_template_path"
            )
        without_tools = replace(conversation, tools=None)
        is_whole = (
            not missing
            and (not conversation.tools or _differs(without_tools, text, self._write))
            and all(thought in text for thought in _thoughts(messages))
        )
        return [message for index, message in enumerate(messages) if index not in missing], is_whole

    def _in_doubt(self, messages: Sequence[Message], text: str, roles: tuple[str, ...]) -> Iterator[int]:
        suspects = self._suspects.get(roles, set(range(len(roles))))
        for index, message in enumerate(messages):
            content = message["content"].strip()
            if content and (index in suspects or content not in text):
                yield index

    def _misses(self, conversation: Conversation, text: str, index: int) -> bool:
        return not _changes(conversation, text, self._write, index, _reworded)


def _changes(
    conversation: Conversation, text: str, write: Write, index: int, change: Callable[[Message], Message]
) -> bool:
    """Whether a rendering differs when a message does."""
    messages = list(conversation.messages)
    messages[index] = change(messages[index])
    return _differs(replace(conversation, messages=messages), text, write)


def _differs(conversation: Conversation, text: str, write: Write) -> bool:
    try:
        return write(conversation) != text
    except Exception:  # the template has looked at what was changed
        return True


def _reworded(message: Message) -> Message:
    return {**message, "content": f"{message['content']}~"}


def _called_otherwise(message: Message) -> Message:
    def change(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        changed = {**arguments, "_": "_"} if isinstance(arguments, dict) else f"{arguments}_"
        return {**function, "name": f"{function['name']}_", "arguments": changed}

    return _with_functions(message, change)


def _forms_of_calls(messages: Sequence[Message]) -> Iterator[list[Message]]:
    yield list(messages)
    yield [_with_functions(message, _arguments_as_text) for message in messages]


def _with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    calls = [{**call, "function": change(call["function"])} for call in _calls(message)]
    return {**message, "tool_calls": calls} if calls else message


def _arguments_as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}


def _as_python(messages: Sequence[Message], text: str) -> bool:
    """Whether arguments are written as Python's dicts, and not as JSON."""
    arguments = [call["function"].get("arguments") for message in messages for call in _calls(message)]
    return any(isinstance(each, dict) and each and repr(each) in text for each in arguments)


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _thoughts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        thought = message.get("reasoning_content") or message.get("thinking")
        if thought:
            yield thought.strip()
