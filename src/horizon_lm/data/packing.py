"""Several rows in one, each of which sees only itself."""

from functools import partial
from typing import Any

import numpy as np

from horizon_lm.data import trl_compat
from horizon_lm.data.sources import digest
from horizon_lm.data.token_dataset import Part

_TOKENS_AT_ONCE = 2_000_000  # that are packed with each other; of rows up to 2,000 tokens a thousand, as TRL does
_ROW = "row_of_token"  # which row a token comes from


def pack(part: Part, strategy: str, length: int) -> Part:
    """Rows in their order, packed into rows of at most ``length`` tokens; those in use have something to train on."""
    import datasets

    table = part.table
    features = datasets.Features(
        input_ids=table.features["input_ids"], trained=table.features["trained"], **{_ROW: table.features["input_ids"]}
    )
    fingerprint = digest(part.fingerprint, strategy, length)
    usable = np.zeros(len(table), dtype=bool)
    usable[part.indices] = True

    def with_rows(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        """The rows in use, and beside each token the row that it comes from: packing does not tell."""
        used = [n for n, number in enumerate(numbers) if usable[number]]
        return {
            "input_ids": [columns["input_ids"][n] for n in used],
            "trained": [columns["trained"][n] for n in used],
            _ROW: [[numbers[n]] * len(columns["input_ids"][n]) for n in used],
        }

    at_once = max(1, min(1000, int(_TOKENS_AT_ONCE / max(1.0, float(part.lengths.mean())))))
    rows = table.map(
        with_rows, batched=True, batch_size=at_once, with_indices=True, remove_columns=table.column_names, features=features,
        new_fingerprint=fingerprint, desc="choosing rows to pack",
    )  # fmt: skip
    packed = trl_compat.pack(
        rows, length, strategy, batch_size=at_once, new_fingerprint=digest(fingerprint, "packed"), desc="packing"
    )
    packed = packed.map(
        _count_targets,
        batched=True,
        batch_size=100,
        new_fingerprint=digest(fingerprint, "counted"),
        desc="counting targets",
    )

    def place_of_packed(index: int) -> str:
        numbers = np.unique(packed.data.column(_ROW)[index].values.to_numpy()).tolist()
        return " + ".join(part.place(number) for number in numbers)

    # A long row is cut into several, of which some may have nothing to train on.
    return Part(packed, place_of_packed, np.flatnonzero(packed.data.column("num_targets").to_numpy()), part.weight)


def cut(part: Part, length: int) -> Part:
    """Rows that were left long to be packed, without what is beyond ``length`` tokens."""
    table = part.table
    rows = table.map(
        partial(_first_tokens, length=length), batched=True, batch_size=100,
        remove_columns=[name for name in table.column_names if name not in ("input_ids", "trained", "num_targets")],
        new_fingerprint=digest(part.fingerprint, "cut", length), desc="cutting rows",
    )  # fmt: skip
    targets = rows.data.column("num_targets").to_numpy()
    return Part(rows, part.place, part.indices[targets[part.indices] > 0], part.weight)


def _first_tokens(columns: dict[str, list[Any]], length: int) -> dict[str, list[Any]]:
    trained = [mask[:length] for mask in columns["trained"]]
    ids = [each[:length] for each in columns["input_ids"]]
    return {"input_ids": ids, "trained": trained, "num_targets": [sum(mask[1:]) for mask in trained]}


def _count_targets(columns: dict[str, list[Any]]) -> dict[str, list[int]]:
    counts = []
    for index, trained in enumerate(columns["trained"]):
        mask = np.asarray(trained, dtype=bool)
        segments = columns["seq_lengths"][index] if "seq_lengths" in columns else [len(mask)]
        firsts = np.cumsum([0, *segments[:-1]])
        counts.append(int(mask.sum() - mask[firsts].sum()))
    return {"num_targets": counts}
