"""Pack several rows into one."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from horizon_lm.runs.data import trl_compat
from horizon_lm.runs.data.findings import ExampleCounts
from horizon_lm.runs.data.table_cache import digest, progress_bars, record
from horizon_lm.runs.data.token_dataset import ROW_OF_TOKEN, Part, Row, TokenTable
from horizon_lm.runs.data.tokenize import Tokens
from horizon_lm.runs.data.tokenized_table import IMAGE_COLUMNS

# Number of tokens packed together: those of 1,000 rows, as in TRL, unless rows average more than 2,000 tokens.
_TOKENS_PER_BATCH = 2_000_000
_TRAINED_ROWS = "trained_rows"  # column with the indices of the source rows that have targets


def pack_rows(rows: TokenTable, strategy: str | None, length: int | None) -> tuple[TokenTable, ExampleCounts]:
    """Pack the rows of each dataset. Also return the rows that packing has cut so that none of their tokens can be trained on.

    Args:
        rows: the rows.
        strategy: the packing strategy; None to return the rows unchanged.
        length: maximum number of tokens in a packed row.
    """
    lost = ExampleCounts()
    if strategy is None:
        return rows, lost
    parts = []
    with progress_bars():
        for part in (part for part in rows.parts if len(part)):
            packed = _pack(part, strategy, length or 0)
            lost.add(_rows_without_targets(part, packed), part.place)
            parts.append(packed)
    return TokenTable(parts), lost


def join_rows(rows: Sequence[Row]) -> Row:
    """Return rows of one sequence each as one packed row."""
    sequences = [row.sequences[0] for row in rows]
    lengths, first = [len(each.ids) for each in sequences], rows[0]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    images = [
        replace(image, start=start + image.start, end=start + image.end)
        for start, each in zip(starts, sequences, strict=True)
        for image in each.images
    ]
    ids, trained = (np.concatenate([getattr(each, name) for each in sequences]) for name in ("ids", "trained"))
    return Row(
        [Tokens(ids, trained, images=images)], lengths, first.place, [row.sources[0] for row in rows], first.images
    )


def with_images(rows: TokenTable) -> ExampleCounts:
    """Return the rows that have images."""
    found = ExampleCounts()
    for part in rows.parts:
        found.add(part.indices[part.with_images[part.indices]], part.place)
    return found


def _pack(part: Part, strategy: str, length: int) -> Part:
    """Pack the rows in use of a part into rows of at most ``length`` tokens by TRL's ``strategy``, a batch of rows at a time."""
    batch_size = max(1, min(1000, int(_TOKENS_PER_BATCH / max(1.0, float(part.lengths.mean())))))
    fingerprint = digest(part.fingerprint, strategy, length)
    rows = _rows_in_use(part, batch_size, fingerprint)
    # Each table on the way is cached under a fingerprint of its own.
    packed = trl_compat.pack(
        record(rows), length, strategy, batch_size=batch_size, new_fingerprint=digest(fingerprint, "packed"), desc="packing",
    )  # fmt: skip
    packed = record(packed).map(
        _count_targets, batched=True, batch_size=100, new_fingerprint=digest(fingerprint, "counted", _TRAINED_ROWS), desc="counting targets",
    )  # fmt: skip

    if part.with_images[part.indices].any():
        name = IMAGE_COLUMNS[0]
        packed = record(packed).map(
            partial(_place_images, images=part.table.data.column(name)), batched=True, batch_size=100,
            features=type(packed.features)({**packed.features, name: part.table.features[name]}),
            new_fingerprint=digest(fingerprint, name), desc="packing images",
        )  # fmt: skip

    def place_of_packed(index: int) -> str:
        numbers = np.unique(packed.data.column(ROW_OF_TOKEN)[index].values.to_numpy()).tolist()
        return " + ".join(part.place(number) for number in numbers)

    # A long row is split into several, some of which may have no targets.
    with_targets = np.flatnonzero(packed.data.column("num_targets").to_numpy())
    return Part(record(packed), place_of_packed, with_targets, part.weight, part.images)


def _rows_without_targets(part: Part, packed: Part) -> np.ndarray:
    """Return the indices of the rows in use of a part that have no target in its packed rows, int (n,)."""
    chunks = packed.table.data.column(_TRAINED_ROWS).chunks
    return np.setdiff1d(part.indices, np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]))


def _rows_in_use(part: Part, batch_size: int, fingerprint: str) -> Any:
    """Return a table of the tokens and target masks of the rows in use of a part, and of each token's row, which packing does not keep."""
    import datasets

    table = part.table
    ids = table.features["input_ids"]
    features = datasets.Features(input_ids=ids, trained=table.features["trained"], **{ROW_OF_TOKEN: ids})
    is_used = np.zeros(len(table), dtype=bool)
    is_used[part.indices] = True

    def select(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = zip(indices, columns["input_ids"], columns["trained"], strict=True)
        used = [(index, ids, trained) for index, ids, trained in rows if is_used[index]]
        return {
            "input_ids": [ids for _, ids, _ in used],
            "trained": [trained for _, _, trained in used],
            ROW_OF_TOKEN: [[index] * len(ids) for index, ids, _ in used],
        }

    return table.map(
        select, batched=True, batch_size=batch_size, with_indices=True, remove_columns=table.column_names, features=features,
        new_fingerprint=fingerprint, desc="selecting rows to pack",
    )  # fmt: skip


def _count_targets(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the number of targets of each packed row, and the source rows that have targets. The first token of a document is no target,
    since no token before it predicts it.
    """
    counts, rows = [], []
    for index, trained in enumerate(columns["trained"]):
        mask = np.array(trained, dtype=bool)
        # The strategy ``wrapped`` keeps no borders between documents.
        segments = columns["seq_lengths"][index] if "seq_lengths" in columns else [len(mask)]
        mask[np.cumsum([0, *segments[:-1]])] = False
        counts.append(int(mask.sum()))
        rows.append(np.unique(np.asarray(columns[ROW_OF_TOKEN][index])[mask]))
    return {"num_targets": counts, _TRAINED_ROWS: rows}


def _place_images(columns: dict[str, list[Any]], images: Any) -> dict[str, list[Any]]:
    """Return the images of each packed row, with the indices of their tokens in it. ``images``: those of each source row."""
    placed = []
    for lengths, rows in zip(columns["seq_lengths"], columns[ROW_OF_TOKEN], strict=True):
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        found = ((start, image) for start in starts for image in images[rows[start]].as_py())
        placed.append(
            [{**image, "start": start + image["start"], "end": start + image["end"]} for start, image in found]
        )
    return {IMAGE_COLUMNS[0]: placed}
