"""Find the images of a row, and their places in its texts.

A text has `PICTURE` at the place of each image, and its row has references to the images in the same order. A reference is what the
row says: a path, an address or data in text, bytes, or an object of these. Nothing is opened here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from horizon_lm.runs.data.conversations import IMAGES, PICTURE, Message, RowError, describe_type

COLUMNS = ("images", "image")
# A tag that is quoted is talked about. LLaMA-Factory, ms-swift and TRL write it without quotes.
PLACEHOLDER = re.compile(r"(?<![`'\"\w])<image>(?![`'\"])")


def column_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the references in the columns of a row; raise RowError for values of another type, and for two columns with images."""
    filled = [name for name in COLUMNS if row.get(name)]
    if len(filled) > 1:
        raise RowError("fields 'image' and 'images' both hold images; remove one of them")
    found: list[Any] = []
    for name in filled:
        value = row[name]
        found = value if isinstance(value, list) else [value]
        for number, each in enumerate(found):
            require_reference(each, name if found is not value else f"{name}[{number}]")
    return found


def require_reference(value: Any, where: str) -> None:
    """Raise RowError, naming ``where``, if a value of a row cannot be a reference to an image."""
    inner = next(filter(None, map(value.get, ("bytes", "path", "url"))), None) if isinstance(value, Mapping) else value
    if not isinstance(inner, str | bytes) or not inner:
        raise RowError(
            f"{where} must be the path of an image, its bytes or a data URI, but is {describe_type(value)}"
            f"{' without any of these' if isinstance(value, Mapping) else ''}"
        )


def place_in_messages(row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[list[Message], tuple[Any, ...]]:
    """Return the messages of a row with `PICTURE` at the place of each image, and the references in this order.

    Images of a row without a placeholder stand before the text of the first turn of the user, as in TRL.

    Raises:
        RowError: the placeholders and the images do not agree in number, or an answer has an image.
    """
    columns = column_images(row)
    if not columns and not any(IMAGES in message for message in messages):
        return [*messages], ()
    placed, slots = [], list[Any]()  # a slot is a reference, or None for the next one of the columns
    for message in messages:
        content, own = _place(message["content"], message.get(IMAGES, ()), message["role"] != "assistant")
        if own and message["role"] == "assistant":
            raise RowError("a turn of the assistant has an image; only prompts may have images")
        slots += own
        placed.append({**{key: value for key, value in message.items() if key != IMAGES}, "content": content})
    first = next((index for index, message in enumerate(placed) if message["role"] == "user"), None)
    if not slots and first is not None:
        slots = [None] * len(columns)
        placed[first]["content"] = PICTURE * len(columns) + placed[first]["content"]
    return placed, _fill(slots, columns)


def place_in_text(row: Mapping[str, Any], text: str) -> tuple[str, tuple[Any, ...]]:
    """Return a text of a row with `PICTURE` in place of each placeholder, and the references to the images of the row.

    Raises:
        RowError: the placeholders and the images do not agree in number.
    """
    columns = column_images(row)
    if not columns:
        return text, ()
    placed, slots = _place(text, (), True)
    return placed, _fill(slots, columns)


def _place(text: str, own: Sequence[Any], replaces: bool) -> tuple[str, list[Any]]:
    """Return a text with `PICTURE` in place of each placeholder, if ``replaces``, and a slot for each image in it.

    ``own``: the references of the images that the text has `PICTURE` for already.
    """
    if text.count(PICTURE) != len(own):
        raise RowError("a text has the character U+FFFC, which stands for an object in a text; remove it")
    references, slots = iter(own), []
    for match in re.finditer(f"{PICTURE}|{PLACEHOLDER.pattern}" if replaces else PICTURE, text):
        slots.append(next(references) if match[0] == PICTURE else None)
    return (PLACEHOLDER.sub(PICTURE, text) if replaces else text), slots


def _fill(slots: Sequence[Any], columns: Sequence[Any]) -> tuple[Any, ...]:
    """Return the references of slots, with those of the columns in the open ones; raise RowError if there are more or fewer."""
    num_open = sum(slot is None for slot in slots)
    if num_open != len(columns):
        raise RowError(
            f"the row has {_counted(num_open, 'placeholder')} of images, but {_counted(len(columns), 'image')} for them; write <image> once "
            "for each image"
        )
    rest = iter(columns)
    return tuple(next(rest) if slot is None else slot for slot in slots)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
