"""Tokenize the rows of a dataset to a table on disk, cached by everything that the tokens depend on."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np

from horizon_lm.common.visible import visible
from horizon_lm.errors import DataError
from horizon_lm.runs.data.conversations import RowError
from horizon_lm.runs.data.examples import ExampleReader
from horizon_lm.runs.data.image_files import is_address
from horizon_lm.runs.data.sources import Source
from horizon_lm.runs.data.table_cache import cannot_be_cached, digest, map_cached
from horizon_lm.runs.data.tokenize import ExampleTokenizer, Tokens, flags_of_row
from horizon_lm.runs.data.vision import TokenImage, file_state

IMAGE_COLUMNS = ("images", "rejected_images")  # for the images of each sequence of a row
_UNKNOWN = "unknown"  # state of an address that could not be downloaded, which is tried again each time
FAULT, PROBLEM = "fault", "problem"  # columns for an invalid row: the kind of its error, and the message
_CACHE_VERSION = 16  # version of the cached tables; increase it when their content changes
_BATCH_BYTES = 4 * 2**20  # text per batch of tokenization


def tokenize_source(source: Source, reader: ExampleReader, tokenizer: ExampleTokenizer, num_proc: int | None) -> Any:
    """Return the token table of a dataset, from the cache if it was made before. Altered tables are deleted first.

    Args:
        source: the rows.
        reader: converts them to examples.
        tokenizer: tokenizes the examples.
        num_proc: number of processes; None for one.

    Raises:
        DataError: no table can be cached.
    """
    fingerprint = digest(
        _CACHE_VERSION, source.fingerprint, source.config.columns, reader.row_format.name, reader.objective,
        *tokenizer.dependencies,
    )  # fmt: skip
    tokenize = partial(
        map_cached, source.table, partial(_tokenize_rows, decode=source.decode, reader=reader, tokenizer=tokenizer),
        batch_size=_rows_per_batch(source.table), num_proc=num_proc, remove_columns=source.table.column_names,
        features=_token_features(reader.objective), load_from_cache_file=True,
        desc=visible(f"tokenizing {source.config.path}"),
    )  # fmt: skip
    try:
        table = tokenize(fingerprint=fingerprint)
        # The fingerprint knows the files of rows alone. If files of images have changed since, the rows are tokenized again.
        changed = _changed_files(table)
        return tokenize(fingerprint=digest(fingerprint, changed)) if changed else table
    except OSError as error:
        raise DataError(f"{source.config.path}: {cannot_be_cached(error)}") from error


def _changed_files(table: Any) -> dict[str, str]:
    """Return the present state of the images of a token table, by their files, if some have changed; otherwise an empty dictionary."""
    then: dict[str, str] = {}
    for name in (name for name in IMAGE_COLUMNS if name in table.column_names):
        for chunk in table.data.column(name).chunks:
            images = chunk.flatten()
            then.update(zip(images.field("file").to_pylist(), images.field("state").to_pylist(), strict=True))
    then.pop("", None)  # of images in the rows
    now = {file: str(time_ns()) if state == _UNKNOWN else file_state(Path(file)) for file, state in then.items()}
    return {} if now == then else now


def _rows_per_batch(table: Any) -> int:
    """Return the number of rows that have about `_BATCH_BYTES` of text together, from 1 to 200."""
    return max(1, min(200, _BATCH_BYTES * len(table) // max(1, table.data.nbytes)))


def _token_features(objective: str) -> Any:
    """Return the types of the columns of a token table."""
    from datasets import Features, List, Value

    types = {
        "num_targets": Value("int32"),
        "flags": Value("int16"),
        "ends": List(Value("int32")),
        "inner": List(Value("int32")),
    }
    image = {field.name: Value("int32" if field.type is int else "string") for field in fields(TokenImage)}
    for ids, trained, images in _sequence_columns(objective):
        types |= {ids: List(Value("int32")), trained: List(Value("bool")), images: List(image)}
    return Features(types | {FAULT: Value("string"), PROBLEM: Value("string")})


def _sequence_columns(objective: str) -> list[tuple[str, str, str]]:
    """Return the columns of the token ids, of the target mask and of the images of each sequence of a row."""
    columns = [("input_ids", "trained", "images"), ("rejected_ids", "rejected_trained", "rejected_images")]
    return columns if objective == "dpo" else columns[:1]


def _tokenize_rows(
    columns: dict[str, list[Any]],
    *,
    decode: Callable[[Any], list[Any]],
    reader: ExampleReader,
    tokenizer: ExampleTokenizer,
) -> dict[str, list[Any]]:
    """Tokenize a batch of rows, and return the columns of the token table.

    An invalid row has no tokens but an error, so that all errors are reported together.
    """
    names = _sequence_columns(reader.objective)
    nothing = [Tokens(np.zeros(0, np.int32), np.zeros(0, bool))] * len(names)
    rows = []
    for row in decode(columns):
        try:
            rows.append(_table_row(tokenizer.tokenize(reader.read(row)), names))
        except RowError as error:
            failed = {names[0][-1]: [asdict(_failed_image(error.file))]} if error.file else {}
            rows.append(_table_row(nothing, names) | failed | {FAULT: error.fault, PROBLEM: str(error)})
    return {name: [row[name] for row in rows] for name in rows[0]}


def _failed_image(place: str) -> TokenImage:
    """Return an image without tokens that stands for a file or an address in the table, so that rows are tokenized again once it changes."""
    state = _UNKNOWN if is_address(place) else file_state(Path(place))
    return TokenImage(hash="", file=place, state=state, name=place, start=0, end=0)


def _table_row(sequences: Sequence[Tokens], names: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Return a row of the token table by columns. ``names``: the columns of each of its sequences (`_sequence_columns`)."""
    row: dict[str, Any] = {
        "num_targets": sum(tokens.num_targets for tokens in sequences),
        "flags": int(flags_of_row(sequences)),
        "ends": sorted({token for tokens in sequences for token in tokens.end_tokens}),
        "inner": sorted({token for tokens in sequences for token in tokens.inner}),
        FAULT: None,
        PROBLEM: None,
    }
    for tokens, (ids, trained, images) in zip(sequences, names, strict=True):
        row |= {ids: tokens.ids, trained: tokens.trained, images: [asdict(image) for image in tokens.images]}
    return row
