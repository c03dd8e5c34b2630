"""Pack several rows into one, and truncate rows that are not packed in the end."""

from functools import partial
from typing import Any

import numpy as np

from horizon_lm.data import trl_compat
from horizon_lm.data.sources import digest
from horizon_lm.data.table_cache import record
from horizon_lm.data.token_dataset import Part

# Number of tokens packed together: those of 1,000 rows, as in TRL, unless rows average more than 2,000 tokens.
_TOKENS_PER_BATCH = 2_000_000
_ROW_COLUMN = "row_of_token"  # column with the index of each token's source row


def pack(part: Part, strategy: str, length: int) -> Part:
    """Pack the rows in use of a part into rows of at most ``length`` tokens by TRL's ``strategy``, a batch of rows at a time."""
    batch_size = max(1, min(1000, int(_TOKENS_PER_BATCH / max(1.0, float(part.lengths.mean())))))
    fingerprint = digest(part.fingerprint, strategy, length)
    rows = _rows_in_use(part, batch_size, fingerprint)
    # Every file on the way is in the cache under a key of its own.
    packed = trl_compat.pack(
        record(rows), length, strategy, batch_size=batch_size, new_fingerprint=digest(fingerprint, "packed"), desc="packing",
    )  # fmt: skip
    packed = record(packed).map(
        _count_targets, batched=True, batch_size=100, new_fingerprint=digest(fingerprint, "counted"), desc="counting targets",
    )  # fmt: skip

    def place_of_packed(index: int) -> str:
        numbers = np.unique(packed.data.column(_ROW_COLUMN)[index].values.to_numpy()).tolist()
        return " + ".join(part.place(number) for number in numbers)

    # A long row is split into several, some of which may have no targets.
    with_targets = np.flatnonzero(packed.data.column("num_targets").to_numpy())
    return Part(record(packed), place_of_packed, with_targets, part.weight)


def _rows_in_use(part: Part, batch_size: int, fingerprint: str) -> Any:
    """Return the tokens and target masks of the rows in use of a part, and for each token its row, which packing does not keep."""
    import datasets

    table = part.table
    ids = table.features["input_ids"]
    features = datasets.Features(input_ids=ids, trained=table.features["trained"], **{_ROW_COLUMN: ids})
    is_used = np.zeros(len(table), dtype=bool)
    is_used[part.indices] = True

    def select(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = zip(indices, columns["input_ids"], columns["trained"], strict=True)
        used = [(index, ids, trained) for index, ids, trained in rows if is_used[index]]
        return {
            "input_ids": [ids for _, ids, _ in used],
            "trained": [trained for _, _, trained in used],
            _ROW_COLUMN: [[index] * len(ids) for index, ids, _ in used],
        }

    return table.map(
        select, batched=True, batch_size=batch_size, with_indices=True, remove_columns=table.column_names, features=features,
        new_fingerprint=fingerprint, desc="selecting rows to pack",
    )  # fmt: skip


def truncate(part: Part, length: int) -> Part:
    """Truncate rows to ``length`` tokens if they were kept whole for packing."""
    table = part.table
    rows = table.map(
        partial(_truncate, length=length), batched=True, batch_size=100,
        remove_columns=[name for name in table.column_names if name not in ("input_ids", "trained", "num_targets")],
        new_fingerprint=digest(part.fingerprint, "cut", length), desc="truncating rows",
    )  # fmt: skip
    targets = rows.data.column("num_targets").to_numpy()
    return Part(record(rows), part.place, part.indices[targets[part.indices] > 0], part.weight)


def _truncate(columns: dict[str, list[Any]], length: int) -> dict[str, list[Any]]:
    """Return the columns of truncated rows. Their first token is no target, because no token is before it."""
    trained = [mask[:length] for mask in columns["trained"]]
    ids = [each[:length] for each in columns["input_ids"]]
    return {"input_ids": ids, "trained": trained, "num_targets": [sum(mask[1:]) for mask in trained]}


def _count_targets(columns: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Return the number of targets of each packed row. The first token of a document is none, since no token before it predicts it."""
    counts = []
    for index, trained in enumerate(columns["trained"]):
        mask = np.asarray(trained, dtype=bool)
        # The strategy ``wrapped`` keeps no borders between documents.
        segments = columns["seq_lengths"][index] if "seq_lengths" in columns else [len(mask)]
        firsts = np.cumsum([0, *segments[:-1]])
        counts.append(int(mask.sum() - mask[firsts].sum()))
    return {"num_targets": counts}
