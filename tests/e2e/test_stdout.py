"""Commands whose standard output cannot be written to end with one line, or in silence if nobody reads it."""

import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.forks import context
from tests.support.thinned_cases import thinned

PAGES = ["version", "--version", "--help", "init", "plan --list", "plan --help", "train --settings"]
FULL = "error: standard output cannot be written to: No space left on device\n"


def _main(arguments: Sequence[str], to: str, stderr: Path, is_buffered: bool) -> None:
    from horizon_lm.cli import main

    if to == "a closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(to, os.O_WRONLY)
    os.dup2(writer, 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    # With PYTHONUNBUFFERED, an error leaves nothing behind that could be written once more.
    raw = io.FileIO(1, "w")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw) if is_buffered else raw, write_through=not is_buffered)  # type: ignore[type-var]
    sys.argv[1:] = arguments
    main()


@pytest.mark.parametrize(
    ("to", "code", "message", "is_buffered"),
    thinned(
        (
            (*case, is_buffered)
            for case, is_buffered in itertools.product(
                [("/dev/full", 2, FULL), ("a closed pipe", 1, ""), (os.devnull, 0, "")], (True, False)
            )
        ),
        keep=[(os.devnull, 0, "", True)],
    ),
)
def test_pages(tmp_path: Path, to: str, code: int, message: str, is_buffered: bool) -> None:
    for arguments in PAGES:
        process = context.Process(target=_main, args=(arguments.split(), to, tmp_path / "stderr", is_buffered))
        process.start()
        process.join(100)
        assert ((tmp_path / "stderr").read_text(), process.exitcode) == (message, code), arguments
        (tmp_path / "stderr").unlink()
