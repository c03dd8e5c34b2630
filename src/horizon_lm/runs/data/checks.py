"""Check all tokenized rows for likely mistakes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from horizon_lm.model.positions import Positions
from horizon_lm.runs.data.findings import ExampleCounts, Finding, Findings, cut_before_answer, without_answer
from horizon_lm.runs.data.token_dataset import Part, TokenTable
from horizon_lm.runs.data.tokenize import RowFlag

_EMPTY_THINKING = ("<think></think>", "<think>\n</think>", "<think>\n\n</think>")


def check_rows(found: Findings, parts: Sequence[Part], tokenizer: Any) -> list[Finding]:
    """Return the likely mistakes in the rows of some datasets, before packing; errors come first.

    Args:
        found: the rows with each flag, and those with fields that are not used.
        parts: the rows that are used.
        tokenizer: the tokenizer of the rows.
    """
    doubled, thinking = _count_doubled_bos_and_empty_thinking(parts, tokenizer)
    flagged = found.flagged
    findings = [
        Finding(
            "begin with two begin-of-sequence tokens", "the text and the tokenizer each add one; remove it from the text", doubled,
            is_error=True,
        ),
        Finding(
            "have an image that max_length cuts", "a model reads whole images only; raise max_length, or lower image_max_pixels if the model "
            "has fewer tokens for smaller images", flagged[RowFlag.CUT_IMAGE], is_error=True,
        ),
        without_answer(flagged[RowFlag.NO_ANSWER]),
        cut_before_answer(flagged[RowFlag.CUT_ANSWER]),
        Finding(
            "have the same chosen and rejected answer", "neither is preferred; raise max_length if they differ behind it, or remove them",
            flagged[RowFlag.SAME_ANSWERS], leaves_out=True,
        ),
        Finding(
            "have an empty question or answer", "nothing useful is learned from it; fill it in, or remove the row", flagged[RowFlag.BLANK],
        ),
        Finding(
            "lost tokens to train on by truncation", "the model learns answers without their end; raise max_length",
            flagged[RowFlag.LOST_TARGETS],
        ),
        Finding(
            "have an answer that no end-of-turn token follows", "the model may not learn to stop; check the chat template",
            flagged[RowFlag.MISSING_EOS],
        ),
        Finding(
            "have messages, reasoning or tools that the chat template drops",
            "the model does not see them; set chat_template_path to a template that renders them", flagged[RowFlag.DROPPED_BY_TEMPLATE],
        ),
        Finding(
            "begin with a turn of the assistant", "the model learns to speak before the user; put the user's turn before it, or remove it",
            flagged[RowFlag.ASSISTANT_FIRST],
        ),
        Finding(
            "end with a turn that the assistant does not answer", "no answer to it is learned; add the answer, remove the turn, or raise max_length if it was cut",
            flagged[RowFlag.UNANSWERED],
        ),
        Finding(
            f"have fields that are not used ({', '.join(map(repr, sorted(found.unused_fields)))})",
            "nothing is learned from them; if one is meant, name it with columns", found.unused,
        ),
        Finding(
            "have a special token in the text of a prompt",
            "the model reads it as such, so a text may end its own turn; remove it, or write it differently", flagged[RowFlag.SPECIAL_TEXT],
        ),
        _untemplated(flagged[RowFlag.UNTEMPLATED], parts),
        Finding(
            "train on an empty thinking block", "the model learns not to think; add the reasoning, or remove the blocks",
            thinking,
        ),
        Finding(
            "are copies of others", "remove them, or repeat a dataset with weight instead", _count_copies(parts),
        ),
    ]  # fmt: skip
    return [finding for finding in findings if finding.rows.count]


def _count_doubled_bos_and_empty_thinking(parts: Sequence[Part], tokenizer: Any) -> tuple[ExampleCounts, ExampleCounts]:
    """Count the rows that begin with two begin-of-sequence tokens, and those that train on an empty thinking block."""
    doubled, thinking = ExampleCounts(), ExampleCounts()
    patterns = _empty_thinking(tokenizer)
    for part in parts:
        for indices, ends, ids, trained in part.chunks():
            doubled.add(indices[_begins_with_two_bos(ids, ends, tokenizer.bos_token_id)], part.place)
            thinking.add(indices[_trains_on(ids, trained, ends, patterns)], part.place)
    return doubled, thinking


def _count_copies(parts: Sequence[Part]) -> ExampleCounts:
    """Count the rows that are copies of earlier ones, in any dataset."""
    copies = ExampleCounts()
    for part, is_copy in zip(parts, _copy_masks([part.row_hashes() for part in parts]), strict=True):
        copies.add(part.indices[is_copy], part.place)
    return copies


def _untemplated(rows: ExampleCounts, parts: Sequence[Part]) -> Finding:
    """Return the finding of prompts and answers that are text, which the chat template is not applied to, with the remedy."""
    fields, remedy = "prompt and completion", "write them as messages, or rename the fields to instruction and output"
    if any(part.num_sequences == 2 for part in parts):  # preferences
        fields = "prompt, chosen and rejected"
        remedy = "write them as lists of messages, or set columns: {instruction: prompt}"
    return Finding(
        f"have {fields} as text, so the chat template is not applied",
        f"fine for a base model; otherwise {remedy}",
        rows,
    )


def check_lengths(rows: TokenTable, positions: Positions | None) -> list[Finding]:
    """Return a finding if sequences are longer than the positions of a model; it is an error if each position is a row of a table."""
    if positions is None:
        return []
    too_long = ExampleCounts()
    for part in rows.parts:
        too_long.add(part.indices[part.longest[part.indices] > positions.number], part.place)
    alternative = "" if positions.is_table else ", or extend its positions in config.json (rope_parameters)"
    reason = "has no more" if positions.is_table else "was not made for such lengths"
    remedy = f"it {reason}; set max_length: {positions.number}{alternative}"
    problem = f"are longer than the model's {positions.number:,} positions"
    found = Finding(problem, remedy, too_long, is_error=positions.is_table)
    return [found] if too_long.count else []


def check_overlap(eval_rows: TokenTable, training: TokenTable, length: int | None = None) -> list[Finding]:
    """Return a finding if eval rows, which are cut to ``length`` tokens, are training rows, too, or the beginnings of training rows."""
    training_hashes = np.concatenate([part.row_hashes(length) for part in training.parts])
    shared = ExampleCounts()
    for part in eval_rows.parts:
        shared.add(part.indices[np.isin(part.row_hashes(), training_hashes)], part.place)
    remedy = "their loss is too low to measure generalization; remove them from one of the two"
    return [Finding("are also trained on", remedy, shared)] if shared.count else []


def _begins_with_two_bos(ids: np.ndarray, ends: np.ndarray, bos: int | None) -> np.ndarray:
    """Return for each row whether it begins with two begin-of-sequence tokens, bool (n,). Each row has a token; see `Part.chunks`."""
    if bos is None or not len(ids):
        return np.zeros(len(ends), dtype=bool)
    starts = np.concatenate([[0], ends[:-1]])
    second = np.minimum(starts + 1, len(ids) - 1)  # inside of the array; a row of one token is left out below
    doubled: np.ndarray = (ids[starts] == bos) & (ids[second] == bos) & (ends - starts > 1)
    return doubled


def _empty_thinking(tokenizer: Any) -> list[np.ndarray]:
    """Return the token sequences of empty thinking blocks, or an empty list if the tokenizer does not have the tags."""
    if not {"<think>", "</think>"} <= set(tokenizer.get_vocab()):
        return []
    return [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _EMPTY_THINKING]


def _trains_on(ids: np.ndarray, trained: np.ndarray, ends: np.ndarray, patterns: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each row whether it has one of the patterns with all of its tokens as targets, bool (n,); see `Part.chunks`."""
    found = np.zeros(len(ends), dtype=bool)
    for pattern in patterns:
        num_positions = len(ids) - len(pattern) + 1  # positions at which it could begin
        if num_positions <= 0:
            continue
        matches = np.ones(num_positions, dtype=bool)
        for offset, token in enumerate(pattern):
            matches &= (ids[offset : offset + num_positions] == token) & trained[offset : offset + num_positions]
        found[list(_rows_with_whole(np.flatnonzero(matches), len(pattern), ends))] = True
    return found


def _rows_with_whole(positions: np.ndarray, length: int, ends: np.ndarray) -> Iterator[int]:
    """Yield each row that has all of the ``length`` tokens from one of the positions on; other sequences reach into the next row."""
    first_rows = np.searchsorted(ends, positions, side="right")
    last_rows = np.searchsorted(ends, positions + length - 1, side="right")
    yield from np.unique(first_rows[first_rows == last_rows]).tolist()


def _copy_masks(hashes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return for each row of each dataset whether an earlier row has the same hash."""
    all_hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *hashes])
    _, first_places = np.unique(all_hashes, return_index=True)
    is_copy = np.ones(len(all_hashes), dtype=bool)
    is_copy[first_places] = False
    return np.split(is_copy, np.cumsum([len(each) for each in hashes])[:-1]) if hashes else []
