"""What is likely to be wrong with rows, found by looking at all of their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horizon_lm.data.preprocess import ExampleCounts, Report
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.errors import DataError

_EMPTY_THINKING = ("<think></think>", "<think>\n</think>", "<think>\n\n</think>")


@dataclass(frozen=True, slots=True)
class Finding:
    """Rows in which something is wrong, or may be.

    Attributes:
        is_error: a run with them is refused.
        what: that they have in common.
        remedy: what to do.
        rows: how many, and where the first come from.
    """

    is_error: bool
    what: str
    remedy: str
    rows: ExampleCounts

    def __str__(self) -> str:
        return f"rows that {self.what}: {self.rows.count:,} ({self.rows}); {self.remedy}"


def audit(report: Report, tokenizer: Any) -> list[Finding]:
    """What is found in the rows of a report, before they are packed; errors first."""
    doubled, thinking, repeated = ExampleCounts(), ExampleCounts(), ExampleCounts()
    patterns = _empty_thinking(tokenizer)
    for part in report.rows.parts:
        for numbers, ends, ids, trained in part.batches():
            starts = np.concatenate([[0], ends[:-1]])
            doubled.add(numbers[_begins_twice(ids, starts, ends, tokenizer.bos_token_id)], part.place)
            thinking.add(numbers[_has_trained(ids, trained, ends, patterns)], part.place)
    for part, again in zip(report.rows.parts, _copies([part.keys for part in report.rows.parts]), strict=True):
        repeated.add(part.indices[again], part.place)
    found = [
        Finding(
            True, "begin with two begin-of-sequence tokens", "the text and the tokenizer each add one; remove it from the text",
            doubled,
        ),
        Finding(False, "have no token to train on", "they are left out; raise max_length, or look at their answers", report.left_out),
        Finding(
            False, "lost tokens to train on at max_length", "the model learns answers without their end; raise max_length",
            report.cut_answer,
        ),
        Finding(
            False, "have an answer that no end-of-turn token follows", "the model may not learn to stop; see the chat template",
            report.missing_eos,
        ),
        Finding(
            False, "have messages, thoughts or tools that the chat template leaves out",
            "the model does not see them; name a template that writes them with chat_template_path", report.dropped_by_template,
        ),
        Finding(
            False, "have prompt and answer as text, so the chat template is not applied",
            "right for a base model; else write them as messages, or call the fields instruction (for prompt) and output (for completion)", report.plain,
        ),
        Finding(
            False, "train on an empty thinking block", "the model learns not to think; render with thoughts, or without blocks",
            thinking,
        ),
        Finding(False, "are copies of others", "remove them, or say so with weight", repeated),
    ]  # fmt: skip
    return [finding for finding in found if finding.rows.count]


def also_trained_on(held_out: TokenTable, training: TokenTable) -> list[Finding]:
    """What is found in held-out rows beside those that are trained on."""
    known, shared = np.concatenate([part.keys for part in training.parts]), ExampleCounts()
    for part in held_out.parts:
        shared.add(part.indices[np.isin(part.keys, known)], part.place)
    remedy = "their loss says little about new rows; remove copies, or hold out others"
    return [Finding(False, "are trained on, too", remedy, shared)] if shared.count else []


def reject_errors(findings: Sequence[Finding]) -> None:
    """DataError for findings with which a run would be wrong."""
    errors = [str(finding) for finding in findings if finding.is_error]
    if errors:
        raise DataError("\n".join(errors))


def _begins_twice(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, bos: int | None) -> np.ndarray:
    if bos is None or not len(ids):
        return np.zeros(len(starts), dtype=bool)
    second = np.minimum(starts + 1, len(ids) - 1)
    doubled: np.ndarray = (ids[starts] == bos) & (ids[second] == bos) & (ends - starts > 1)
    return doubled


def _empty_thinking(tokenizer: Any) -> list[np.ndarray]:
    """Tokens of thinking blocks without a thought, as far as the tokenizer knows the tags."""
    if not {"<think>", "</think>"} <= set(tokenizer.get_vocab()):
        return []
    return [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _EMPTY_THINKING]


def _has_trained(ids: np.ndarray, trained: np.ndarray, ends: np.ndarray, patterns: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row has one of some sequences of tokens, all of them targets."""
    found = np.zeros(len(ends), dtype=bool)
    for pattern in patterns:
        count = len(ids) - len(pattern) + 1
        if count <= 0:
            continue
        fits = np.ones(count, dtype=bool)
        for offset, token in enumerate(pattern):
            fits &= (ids[offset : offset + count] == token) & trained[offset : offset + count]
        found[list(_rows_of(np.flatnonzero(fits), len(pattern), ends))] = True
    return found


def _rows_of(positions: np.ndarray, length: int, ends: np.ndarray) -> Iterator[int]:
    """Rows in which sequences of tokens at these positions lie as a whole."""
    first, last = (np.searchsorted(ends, positions + offset, side="right") for offset in (0, length - 1))
    yield from np.unique(first[first == last]).tolist()


def _copies(keys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of the rows of each data set, whether a row with the same key stands before."""
    everything = np.concatenate([np.zeros(0, dtype=np.uint64), *keys])
    first = np.zeros(len(everything), dtype=bool)
    first[np.unique(everything, return_index=True)[1]] = True
    return np.split(~first, np.cumsum([len(each) for each in keys])[:-1]) if keys else []
