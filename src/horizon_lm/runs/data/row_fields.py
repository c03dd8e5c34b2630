"""Reject rows that hold more than text, or that another objective needs, and find fields that are not used."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from horizon_lm.runs.data.conversations import Completion, Conversation, Example, Preference, RowError, Text

_MEDIA_FIELDS = {
    "image": "pictures", "images": "pictures", "video": "films", "videos": "films", "audio": "sounds", "audios": "sounds",
}  # fmt: skip
_KTO_FIELDS = ("label", "kto_tag")  # of TRL and of LLaMA-Factory
_ANSWER_FIELDS = ("completion", "messages", "conversations", "output", "answer")
# A tag of HTML has an end, or is quoted where it is talked about. `<image>` is no tag of HTML, but `<video>` and `<audio>` are,
# so these are placeholders only before and after the text.
_PLACEHOLDER = re.compile(r"(?<![`'\"\w])<(image)>(?![`'\"])|\A\s*<(video|audio)>|<(video|audio)>\s*\Z")
_TEXT_PLACEHOLDER = re.compile(r"\A\s*<(image)>")  # a text of the web may have any word in it


def reject_other_rows(row: Mapping[str, Any], objective: str) -> None:
    """Raise RowError for a row, with renamed fields, that holds pictures, sounds or films, or that is for another objective."""
    for name, kind in _MEDIA_FIELDS.items():
        if row.get(name):
            raise RowError(
                f"field {name!r} holds {kind}, and only text is supported; drop the row, or remove the field if its text stands alone"
            )
    if objective == "dpo":
        return
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise RowError(
            f"fields 'chosen' and 'rejected' are preferences, which objective: {objective} does not use; use objective: dpo, or name the "
            "answer to train on with columns, such as columns: {completion: chosen}"
        )
    for name in _KTO_FIELDS:
        value = row.get(name)
        marks_answer = isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false"))
        if marks_answer and any(each in row for each in _ANSWER_FIELDS):
            raise RowError(
                f"field {name!r} marks good and bad answers, and objective: {objective} would train on both alike; use "
                "horizon_lm.trainer(KTOTrainer), or keep the rows with good answers and remove the field"
            )


def reject_placeholders(example: Example) -> None:
    """Raise RowError if a prompt has a placeholder of a picture, a film or a sound, or a text begins with one.

    A name whose end tag follows is a tag of HTML instead, which rows may talk about.
    """
    is_text = isinstance(example, Text)
    pattern = _TEXT_PLACEHOLDER if is_text else _PLACEHOLDER
    for text in _prompts(example):
        found = pattern.search(text)
        if found is None:
            continue
        name = next(filter(None, found.groups()))  # of the alternative that matched
        if f"</{name}>" not in text:
            raise RowError(
                f"the {'text' if is_text else 'prompt'} has the placeholder <{name}>, and only text is supported; drop the "
                f"row, or write `<{name}>` in backquotes if the tag is meant"
            )


def _prompts(example: Example) -> Iterator[str]:
    """Yield the prompts of an example: texts of the user, or the whole of a text. Both answers of a preference have the same."""
    if isinstance(example, Preference):
        yield from _prompts(example.chosen)
    elif isinstance(example, Conversation):
        yield from (message["content"] for message in example.messages if message["role"] == "user")
    else:
        yield example.prompt if isinstance(example, Completion) else example.text


def unused_fields(row: Any, used: Collection[str]) -> list[str]:
    """Return the fields of a row with a value that are not among the used ones; none of a row that is no object."""
    if not isinstance(row, Mapping):
        return []
    return [name for name, value in row.items() if value is not None and name not in used]
