"""The added tokens of a tokenizer in a GGUF file: leave out those without an embedding, and note others that llama.cpp finds elsewhere."""

from collections.abc import Iterator
from typing import Any

_LONGEST = 200  # characters of tokens whose beginnings are compared


def leave_out(described: dict[str, Any], vocab_size: int) -> list[str]:
    """Remove added tokens without a row in the embedding from ``described``, such as Gemma 3's for images. Return a note on them."""
    added = described["added_tokens"]
    lost = [each["content"] for each in added if each["id"] >= vocab_size]
    if not lost:
        return []
    described["added_tokens"] = [each for each in added if each["id"] < vocab_size]
    for token in lost:
        described["model"]["vocab"].pop(token, None)
    return [f"the added tokens {', '.join(lost)} are left out, because the model has no embedding of them"]


def notes_on_added(added: list[dict[str, Any]]) -> list[str]:
    """Return notes on the added tokens that llama.cpp finds elsewhere in text."""
    notes, flags = [], ("lstrip", "rstrip", "single_word")
    if spaced := [each["content"] for each in added if any(each[flag] for flag in flags)]:
        notes.append(
            f"llama.cpp ignores that the added tokens {', '.join(spaced)} take spaces around them, or must be words"
        )
    if pair := next(_hidden_tokens(added), None):
        notes.append(
            f"llama.cpp looks for the longest added token first, so it finds {pair[0]} where the tokenizer finds {pair[1]}"
        )
    return notes


def _hidden_tokens(added: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of added tokens that overlap in some text, where llama.cpp finds the first one of the pair, and a tokenizer the second one.

    llama.cpp looks for the longest token first. A tokenizer takes the token that begins first, and looks for tokens in text as it is before
    those in normalized text.
    """
    texts = [each["content"] for each in added if len(each["content"]) <= _LONGEST]
    beginning: dict[str, list[str]] = {}  # tokens, by each text that they begin with
    for text in texts:
        for length in range(1, len(text)):
            beginning.setdefault(text[:length], []).append(text)
    for text in texts:
        for start in range(1, len(text)):  # where a longer token may begin, inside of this one
            longer = (each for each in beginning.get(text[start:], ()) if len(each) > len(text))
            # Of runs of one character, both find the longest.
            yield from ((each, text) for each in longer if len({*text, *each}) > 1)
    normalized = [each["content"] for each in added if each["normalized"]]
    for text in (each["content"] for each in added if not each["normalized"]):
        yield from ((each, text) for each in normalized if text in each)
