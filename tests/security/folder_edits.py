"""Edits of the files of a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Path], object]


def changed(file: str, **values: Any) -> Edit:
    """Edit that sets values of a JSON file; a value of None removes it."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return edit


def text(file: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def link(file: str, to: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(to)

    return edit
