"""Generate docs/generated/compatibility.md from the rows and their outcomes."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.seams.seam import ROWS, WORKS, Outcome, Row, run

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "compatibility.md"

_HEAD = """# Compatibility

Uses of a streamed model by other code. Each line is a test in `tests/seams`: the same code runs on a plain and on a streamed
model. It *works* if losses, gradients, weights and tokens are equal, in float32 on the CPU unless the line names another
precision. Otherwise it is *rejected* with the error shown, and the model computes afterwards as before. `python -m tests.seams`
writes this page, and the test of a line fails if the page is out of date.

Random sequences of such calls are tested, too: `python -m tests.seams.fuzz --seconds 600`.
"""
_CLASS = re.compile(r"\b[A-Z]\w+(?:For[A-Z]\w+|LMHeadModel)\b")
_SECTIONS = {
    "Weights": "",
    "Precision fp32_master": "",
    "Optimizers": "",
    "Autograd": "",
    "Hooks": "",
    "Changes after stream()": "",
    "Moving and casting": "",
    "Evaluation": "",
    "Generation": "",
    "Saving": "",
    "Opening": "",
    "The model as an object": "",
    "Errors of other code": "",
    "The model's modules": "",
    "Models": "",
    "PEFT": "",
    "Trainers": (
        "`transformers.Trainer` with its own optimizer, accumulation, evaluation and saving trains a streamed model as a plain one, "
        "and resumes (`tests/seams/test_trainer.py`). `horizon_lm.trainer` makes it, and TRL's trainers, load each block twice a step: "
        "[Trainer and TRL](../trainer.md) says what was tried."
    ),
}


def page() -> str:
    """Return the page, after running all rows."""
    unknown = {row.section for row in ROWS.values()} - set(_SECTIONS)
    assert not unknown, unknown
    return "\n".join([_HEAD, *(_section(title, note) for title, note in _SECTIONS.items())])


def _section(title: str, note: str) -> str:
    lines = [line(row) for row in ROWS.values() if row.section == title]
    table = "\n".join(["| use | on a streamed model |", "|---|---|", *lines])
    return "\n\n".join(part for part in (f"## {title}", note, table) if part) + "\n"


def line(row: Row) -> str:
    """Return a row's line, after running its cases."""
    outcomes = {name: run(row.key, name) for name in row.cases}
    wrong = [name for name, outcome in outcomes.items() if not row.allows(outcome)]
    right = {name: outcome for name, outcome in outcomes.items() if name not in wrong}
    parts = [*_parts(right), *([f"**wrong** in {len(wrong)} of {len(outcomes)} cases"] if wrong else [])]
    return f"| {cell(row.text)} | {cell('; '.join(parts))} |"


def _parts(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the outcomes of the cases, with equal outcomes grouped."""
    alike: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        alike.setdefault(words(outcome), []).append(name)
    for text, names in alike.items():
        yield text if len(alike) == 1 else f"{text} ({', '.join(names)})"


def words(outcome: Outcome) -> str:
    """Describe the outcome of a case, with one name for all model classes, so that equal outcomes have equal texts."""
    if outcome.kind == WORKS:
        return f"works, and warns: {_CLASS.sub('Model', outcome.message)}" if outcome.message else "works"
    error, _, message = outcome.message.partition(": ")
    return f"rejected with `{error}`: {_CLASS.sub('Model', message)}"


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
