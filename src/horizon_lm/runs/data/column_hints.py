"""Find the fields of a row that ``columns`` could rename, so that the row has a known format.

A field takes the place of another of the same meaning, known by its name. A name without a known meaning may stand for
any of them; one of another meaning never does: an answer is not taken from a question.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_SAME_WORD = 0.8  # similarity from which two words are spellings of one
_WORDS = {  # in the names of fields, by their meaning
    "rejected": ("rejected", "reject", "negative", "worse", "bad", "loser", "dispreferred"),
    "chosen": ("chosen", "accepted", "preferred", "positive", "better", "good", "winner"),
    "system": ("system",),
    "context": ("context", "passage"),
    "answer": ("answer", "response", "output", "completion", "reply", "assistant", "gpt", "target", "solution", "generation"),
    "prompt": ("prompt", "question", "instruction", "query", "input", "user", "human", "problem", "request"),
    "text": ("text", "content", "document", "article"),
}  # fmt: skip
_MEANING_OF_WORD = {each: meaning for meaning, words in _WORDS.items() for word in words for each in (word, word + "s")}
_METADATA = {
    "id", "uuid", "url", "source", "category", "language", "lang", "date", "timestamp", "topic", "type", "name", "split",
    "model", "author", "license", "score", "label", "meta", "metadata",
}  # fmt: skip
_MEANING_OF_FIELD = {
    "question": "prompt", "instruction": "prompt", "prompt": "prompt", "input": "context", "system": "system", "text": "text",
    "answer": "answer", "output": "answer", "completion": "answer", "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip
_TEXT_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")
_LISTS = {
    "messages": "role",
    "conversations": "from",
}  # expected names of lists of messages, and their key of the speaker


def suggest_columns(
    row: Mapping[str, Any],
    formats: Iterable[tuple[Sequence[str], Collection[str]]],
    usual: Sequence[str],
) -> dict[str, str]:
    """Return the setting ``columns`` that gives a row the likeliest format; empty if none is likely.

    Args:
        row: a row that has none of the formats.
        formats: the required and the optional fields of each.
        usual: the required fields of the format that is suggested if others are as likely.
    """
    best: dict[str, str] = {}
    best_rank = (-1, 0, 0, False)  # below that of any format
    for required, optional in formats:
        columns = _columns_for(row, required, optional)
        if columns is None:
            continue
        num_present = sum(field in row for field in (*required, *optional))
        num_spellings = sum(len(_closest(theirs.casefold(), [ours])) for ours, theirs in columns.items())
        num_meant = sum(_may_mean(theirs, ours) for ours, theirs in columns.items())
        # The best format has most of its fields in the row, then most names that are spellings or synonyms, then is the usual one.
        rank = (num_present, num_spellings, num_meant, tuple(required) == tuple(usual))
        if rank > best_rank:
            best, best_rank = columns, rank
    return best


def as_setting(columns: Mapping[str, str]) -> str:
    """Return columns as they are written in a run file."""
    quoted = {
        ours: json.dumps(name, ensure_ascii=False) if re.search(r"[^\w .-]", name) else name
        for ours, name in columns.items()
    }
    return f"columns: {{{', '.join(f'{ours}: {theirs}' for ours, theirs in quoted.items())}}}"


def field_for(row: Mapping[str, Any], expected: str) -> str | None:
    """Return the field of a row whose name has the meaning of an expected one; None if there is none."""
    return next((name for name, value in row.items() if _may_mean(name, expected) and _fits(value, expected)), None)


def _columns_for(row: Mapping[str, Any], required: Sequence[str], optional: Collection[str]) -> dict[str, str] | None:
    """Return the row's own names by the expected ones that give it all required fields; None if too few could be renamed."""
    free = {name: value for name, value in row.items() if name not in required and name not in optional}
    columns: dict[str, str] = {}
    missing = [field for field in required if field not in row]
    wanted = [*missing, *(field for field in optional if field not in row)]
    for ours in wanted:
        if theirs := field_for(free, ours):
            columns[ours] = theirs
            del free[theirs]
    for ours in missing:
        if ours in columns:
            continue
        unknown = [name for name, value in free.items() if _meaning(name) is None and _fits(value, ours)]
        if not unknown:
            return None
        # The text of a document is longer than its title; other fields stand in their order.
        columns[ours] = max(unknown, key=lambda name: len(free[name])) if ours == "text" else unknown[0]
        del free[columns[ours]]
    return columns


def _may_mean(name: str, expected: str) -> bool:
    """Return whether a field's name has an expected meaning. A list of messages may have any name: its value decides."""
    return expected in _LISTS or _meaning(name) == _MEANING_OF_FIELD.get(expected, "")


def _fits(value: Any, expected: str) -> bool:
    """Return whether a value is of a type that an expected field may have: text, or messages."""
    first_entry = value[0] if isinstance(value, list) and value else value
    speaker_key = None  # the key of the speaker, if the value is a message or a list of messages
    if isinstance(first_entry, Mapping):
        speaker_key = next((key for key in ("role", "from") if key in first_entry), None)
    if expected in _LISTS:
        return isinstance(value, list) and speaker_key == _LISTS[expected]
    return isinstance(value, str) or (speaker_key is not None and expected in _TEXT_OR_MESSAGES)


def _meaning(name: str) -> str | None:
    """Return the meaning of a field by the words of its name; ``ambiguous`` for several meanings, and None without a known word."""
    name = name.casefold()
    words = [word for word in re.split(r"[\W_\d]+", name) if word]
    if name in _METADATA or words[-1:] in (["id"], ["url"]):
        return "metadata"
    found = {_MEANING_OF_WORD[known] for word in words for known in _closest(word, _MEANING_OF_WORD)}
    for meaning in ("rejected", "chosen", "system"):  # as in rejected_answer
        if meaning in found:
            return meaning
    if len(found) > 1:
        found.discard("text")  # as in output_text
    if len(found) > 1:
        return "ambiguous"
    return next(iter(found), None)


def _closest(word: str, known: Iterable[str]) -> list[str]:
    """Return a list of the known word that is closest to ``word`` in spelling; an empty list if none is close."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=_SAME_WORD)
