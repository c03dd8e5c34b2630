"""The page of ``horizon-lm inspect --html``: the rows of some batches, with their images. It loads nothing from elsewhere."""

import base64
import io
from html import escape
from typing import Any

from horizon_lm.cli.inspected_rows import ShownSequence, shown_sequences
from horizon_lm.common.visible import visible
from horizon_lm.runs.data.batch import Batch

_SIDE = 256  # pixels of the longer side of an image on the page
_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Rows</title><style>"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{white-space:pre-wrap;font:inherit;border:1px solid #ccc;padding:1em}"
    "b{font-weight:inherit;background:#c8f0c8}i{font-style:inherit;color:#a0a}figure{margin:.5em 0}figcaption{color:#555}"
    "</style>"
)


def batch_page(tokenizer: Any, rows: Any, batches: list[Batch], num_rows: int) -> str:
    """Return the page of some batches.

    Args:
        tokenizer: the tokenizer of the rows.
        rows: the rows of all batches.
        batches: the batches.
        num_rows: rows to show of each.
    """
    parts = [_HEAD, "<h1>Rows</h1><p><b>Trained on</b>, <i>special token</i></p>"]
    for number, batch in enumerate(batches, 1):
        parts.append(f"<h2>Batch {number}</h2>")
        for shown in shown_sequences(batch, rows, num_rows):
            pieces = _pieces(shown, tokenizer, batch)
            parts.append(f"<h3>{escape(visible(shown.title))}</h3><pre>{pieces}</pre>")
    return "".join(parts)


def _pieces(shown: ShownSequence, tokenizer: Any, batch: Batch) -> str:
    """Return the pieces of a sequence as HTML."""
    images = [image for group in shown.row.load_images(shown.number) for image in group]
    parts = list[str]()
    for piece in shown.pieces(tokenizer, batch):
        text = escape(visible(piece.text))
        if piece.image is not None:
            source = _data_uri(images[piece.image])
            text = f'<figure><img src="{source}" alt=""><figcaption>{text}</figcaption></figure>'
        text = f"<i>{text}</i>" if piece.special else text
        parts.append(f"<b>{text}</b>" if piece.trained else text)
    return "".join(parts)


def _data_uri(image: Any) -> str:
    """Return a small copy of an image as a data URI."""
    small, stream = image.copy(), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
