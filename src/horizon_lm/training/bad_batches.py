"""Save the batch of a step whose loss or gradient is not finite, for inspection: ``bad-batches/step-N.json``.

The file is plain ASCII: JSON escapes control characters and all others, so that it is safe to print on a terminal.
"""

import json
from pathlib import Path
from typing import Any

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.data.batch import Batch
from horizon_lm.disk import Disk, write_file
from horizon_lm.training.bad_rows import BadRows
from horizon_lm.units import Unit

_MOST_TOKENS = 65536  # of a file, which then has about two megabytes
_MOST_FILES = 100  # of a run


def save_bad_batch(
    folder: Path, step: int, batch: Batch, tokenizer: Any, problem: str, unit: Unit | None, bad: BadRows | None
) -> Path | None:
    """Write the rows of a step, those that cause the problem first. Return the file; None if the folder is full.

    Rows beyond the first 65,536 tokens are left out, and the row at that limit is cut.

    Args:
        folder: the folder of such files.
        step: the step, counted from 1.
        batch: its rows.
        tokenizer: decodes their tokens.
        problem: a sentence about what is not finite.
        unit: the unit where it was found; None if that is unknown.
        bad: the rows that cause it; None if they are unknown.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / f"step-{step}.json"
    if not path.exists() and len(list(folder.glob("step-*.json"))) >= _MOST_FILES:
        return None
    culprits = [] if bad is None else list(bad.rows)
    order = [*culprits, *(row for row in range(len(batch.places)) if row not in culprits)]
    rows, room = [], _MOST_TOKENS
    for row in order:
        if room <= 0:
            break
        rows.append(_describe(batch, row, row in culprits, tokenizer, room))
        room -= sum(len(sequence["input_ids"]) for sequence in rows[-1]["sequences"])
    content = {
        "step": step, "problem": problem, "unit": unit, "causing_rows": None if bad is None else culprits,
        "micro_batches": None if bad is None else list(bad.micro_batches), "num_rows": len(batch.places), "rows": rows,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_file(Disk(), path, json.dumps(content, indent=1).encode("ascii"))
    return path


def _describe(batch: Batch, row: int, is_culprit: bool, tokenizer: Any, room: int) -> dict[str, Any]:
    """Return a row with at most ``room`` tokens, as JSON."""
    sequences = []
    for index in range(row, len(batch.input_ids), len(batch.places)):  # one, or a chosen and a rejected answer
        length = _length(batch, index)
        ids = batch.input_ids[index, : min(length, room)].tolist()
        labels = batch.labels[index, : len(ids)].tolist()
        room -= len(ids)
        targets = [label for label in labels if label != IGNORE_INDEX]
        sequences.append(
            {
                "num_tokens": length, "text": _decode(tokenizer, ids), "target_text": _decode(tokenizer, targets),
                "input_ids": ids, "labels": labels,
            }
        )  # fmt: skip
    number = batch.rows[row] if batch.rows else None
    return {"place": batch.places[row], "row": number, "causes_it": is_culprit, "sequences": sequences}


def _length(batch: Batch, index: int) -> int:
    """Return the tokens of a sequence, without the padding where a mask tells."""
    if batch.attention_mask is None:
        return int(batch.input_ids.shape[1])
    return int(batch.attention_mask[index].sum())


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    try:
        return str(tokenizer.decode(ids))
    except Exception:  # a tokenizer's own code; the ids are in the file anyway
        return None
