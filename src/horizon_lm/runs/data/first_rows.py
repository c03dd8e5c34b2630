"""Check the first rows of JSON files. Nothing here imports a package that takes seconds."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import numpy as np

from horizon_lm.errors import DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.conversations import Preference, RowError, has_answer
from horizon_lm.runs.data.examples import ROWS_INSPECTED, ExampleReader
from horizon_lm.runs.data.findings import ExampleCounts, Findings, no_row_left, without_answer
from horizon_lm.runs.data.image_files import ImageFiles, decode, is_address
from horizon_lm.runs.data.json_rows import read_rows
from horizon_lm.runs.data.local_files import find_files


def check_first_rows(
    config: DatasetConfig, objective: str, name: str | None = None, allow_downloads: bool = False
) -> None:
    """Raise DataError if the files of an entry of ``datasets`` are of no known type, or some of their first rows are invalid.

    Rows of other files than JSON, of a ``split`` and on the hub are not checked. ``name``: the name in messages of data whose only entry
    this is, for which it is also an error that no row has an answer; None for one of several entries. ``allow_downloads``: as in a run.
    """
    splits = find_files(config)
    if splits is not None and config.split is None and splits["train"].is_json:
        _check_json(config, splits["train"].names, objective, name, allow_downloads)


def _check_json(
    config: DatasetConfig, names: Sequence[str], objective: str, name: str | None, allow_downloads: bool
) -> None:
    """Check the first rows of JSON files, then further ones until one may have an answer, and all once one is invalid. The images of the
    first rows are looked at only then, so that bad ones are reported together with the rows; otherwise they are with the tokens.

    ``names``: the files. For the others see `check_first_rows`.
    """
    rows = islice(chain.from_iterable(map(read_rows, names)), config.max_samples)
    first, found = list(islice(rows, ROWS_INSPECTED)), Findings()
    if not first:
        raise DataError(f"{', '.join(names)}: no rows found")
    places, invalid, may_have_answer = {0: first[0][0]}, list[tuple[int, str, str]](), False
    images: dict[int, Sequence[Any]] = {}
    try:
        reader = ExampleReader.of_rows(config, (row for _, row in first), objective)
    except RowError as error:  # of the first row, whose format all rows have
        found.add_invalid([(0, error.fault, str(error))], places.__getitem__)
        found.reject_invalid()

    def needed() -> Iterator[tuple[str, Any]]:
        """Yield the places and the values of the rows to check. A further row is read only once it is needed: it may be no JSON."""
        yield from first
        while (invalid or not may_have_answer) and (following := next(rows, None)) is not None:
            yield following

    for index, (place, row) in enumerate(needed()):
        # Not checked: it takes TRL to find the prompt of preferences, and transformers to know the options of a template.
        if objective == "dpo" or (isinstance(row, dict) and row.get("chat_template_kwargs")):
            may_have_answer = True
            continue
        try:
            example = reader.read(row)
        except RowError as error:
            invalid.append((index, error.fault, str(error)))
            places[index] = place
            continue
        may_have_answer = has_answer(example) or may_have_answer
        if index < ROWS_INSPECTED and not isinstance(example, Preference) and example.images:
            images[index], places[index] = example.images, place
    if invalid:
        invalid += _bad_images(ImageFiles.beside(config.path, allow_downloads), images)
    found.add_invalid(sorted(invalid), places.__getitem__)
    found.reject_invalid()
    if name is not None and not may_have_answer:
        without = ExampleCounts()
        without.add(np.arange(index + 1), (places | {index: place}).__getitem__)
        raise no_row_left(name, [without_answer(without)])


def _bad_images(files: ImageFiles, images: Mapping[int, Sequence[Any]]) -> Iterator[tuple[int, str, str]]:
    """Yield the index, the fault and the message of each row with an image that cannot be read. Nothing is downloaded.

    Args:
        files: the files of the images.
        images: the references to the images of each row, by its index.
    """
    for index, references in images.items() if find_spec("PIL") else ():
        try:
            for each in references:
                if not (files.allow_downloads and is_address(files.place_of(each))):
                    decode(files.read(each))
        except RowError as error:
            yield index, error.fault, str(error)
