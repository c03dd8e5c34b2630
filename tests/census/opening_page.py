"""Render the section about opening folders at the end of the page of models."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.census.opening import OPENED
from tests.census.table import one_line

TITLE = "## Opening a folder"
_HEAD = f"""{TITLE}

`python -m tests.census run --cases {",".join(OPENED)}` saves a tiny model of every type as a folder
in bf16, fp16, float32, and both bf16 and float32, and opens each in `float32`, `bf16`, `fp32_master` or in 4 bits, with `from_pretrained` or as a run
does, which also resumes from a checkpoint. Compared with transformers' own `from_pretrained` are all parameters and buffers with their dtypes, logits in
float32 with the same weights (bit for bit, or within 1e-5), and what `save_pretrained` writes. With all four kinds of folders, a type is opened once in
each way; the pairs are others with each version of transformers. The width is 40 or 48 where a type allows it, because the root of 64 is exact.
`python -m tests.census openings VERSION=RESULTS ...` writes this section.

"Folders" are those that were tried. A type that is rejected is so whatever its folder.
"""
_STATUSES = {"right": "right", "close": "right", "rejected": "rejected", "wrong": "wrong", "crashed": "fails"}
_VERDICTS = ("right", "rejected", "wrong", "fails", "not tried")

Results = Mapping[str, Mapping[str, Any]]  # by mapping and type, as `tests.census run` writes them


def section(by_version: Mapping[str, Results]) -> str:
    """Return the section in Markdown, from the results with each version of transformers."""
    counts = ["| transformers | mapping | types | folders | " + " | ".join(_VERDICTS) + " |", "|" + "---|" * 9]
    reasons: dict[tuple[str, str, str, str], list[str]] = {}
    for version, results in by_version.items():
        for mapping, types in results.items():
            verdicts = {model_type: _verdict(result) for model_type, result in types.items()}
            found = Counter(word for word, _ in verdicts.values())
            folders = sum(len(result["cases"]) for result in types.values())
            cells = [version, mapping, len(types), folders, *(found[word] for word in _VERDICTS)]
            counts.append(f"| {' | '.join(map(str, cells))} |")
            for model_type, (word, why) in verdicts.items():
                if word != "right":
                    reasons.setdefault((model_type, mapping, word, why), []).append(version)
    rows = ["", "| type | mapping | transformers | | why |", "|---|---|---|---|---|"]
    for (model_type, mapping, word, why), versions in sorted(reasons.items()):
        rows.append(f"| {model_type} | {mapping} | {', '.join(versions)} | {word} | {why} |")
    return "\n".join([_HEAD, *counts, *(rows if reasons else [])]) + "\n"


def _verdict(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outcome of a type: that of its worst folder, with the reason unless it is right."""
    if result["status"] != "built":
        return "not tried", f"no tiny model can be built: {one_line(result['detail'])}"
    outcomes = result["cases"].values()
    for word in ("wrong", "fails", "rejected", "not tried"):
        for outcome in outcomes:
            if _STATUSES.get(outcome["status"], "not tried") == word:
                said = re.sub(r"\S*/folder\b", "the folder", one_line(outcome["detail"]))
                return word, said.partition(": ")[2] if word == "rejected" else said
    return "right", ""


def with_section(page: str, new: str) -> str:
    """Return a page with this section, in place of the one that it has."""
    return page.partition(TITLE)[0].rstrip("\n") + "\n\n" + new


def section_of(page: str) -> str:
    """Return the section of a page; empty if it has none."""
    _, title, rest = page.partition(TITLE)
    return title + rest
