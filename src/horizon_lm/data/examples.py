"""What a row of any form becomes: one of four things that can be tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
