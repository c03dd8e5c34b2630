"""Judge each streamed test by its outcome and by what its trainings left."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.peers.expected import ALLOWED, DIFFERENCES, REJECTIONS

LOG_TOLERANCE, PARAMETER_TOLERANCE = 1e-3, 2e-4  # relative; trainings in float32, whose sums are added in another order
KINDS = ("pass", "unused", "rejected", "differs", "fail")  # unused: the test passed without a streamed model

Row = Mapping[str, Any]  # a test in one mode, as written by the plugin


@dataclass(frozen=True)
class Verdict:
    """A kind of `KINDS`, the reason, and the sentence of `tests.peers.expected` that explains it."""

    kind: str
    reason: str = ""
    explanation: str = ""


def read(path: Path) -> tuple[dict[str, Row], Row]:
    """Return the last result of each test, and how many tests were `collected`, and which of them drawn: `share` and `also`."""
    rows, run = {}, {"collected": 0, "share": 100, "also": ""}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "id" in row:
            rows[row["id"]] = row
        else:
            run |= row
    return rows, run


def judge(plain: Row, streamed: Row) -> Verdict:
    """Return the verdict on a test that passed on plain models.

    A rejection or difference that `tests.peers.expected` does not list is a failure.
    """
    if streamed["outcome"] == "skipped":
        return Verdict("unused", "skipped")
    if streamed["outcome"] != "passed":
        reason = f"{streamed['error']}: {streamed['message']}"
        if streamed["error"] == "Failed" and (explanation := _find(ALLOWED, streamed["id"])):
            return Verdict("differs", reason, explanation)  # an error that the test expects is not raised
        explanation = _find(REJECTIONS, streamed["message"]) if streamed["rejected"] else ""
        return Verdict("rejected" if explanation else "fail", reason, explanation)
    if not streamed["streamed"]:
        return Verdict("unused", "no model was streamed")
    explained = [
        (each, _find(DIFFERENCES, f"{streamed['id']}: {each}")) for each in differences(plain["runs"], streamed["runs"])
    ]
    reason, explanation = next((each for each in explained if not each[1]), (explained or [("", "")])[0])
    return Verdict("differs" if explanation else "fail", reason, explanation) if explained else Verdict("pass")


def differences(plain: list[Row], streamed: list[Row]) -> Iterator[str]:
    """Yield the differences between the trainings of a test: logged figures, and sums and norms of parameters."""
    if len(plain) != len(streamed):
        yield f"{len(plain)} trainings, and {len(streamed)} streamed"
    for a, b in zip(plain, streamed, strict=False):
        if len(a["log"]) != len(b["log"]):
            yield f"{len(a['log'])} logged rows, and {len(b['log'])} streamed"
        for x, y in zip(a["log"], b["log"], strict=False):
            if x.keys() != y.keys():
                yield f"logged in one mode only: {', '.join(sorted(x.keys() ^ y.keys()))}"
            for name in sorted(x.keys() & y.keys()):
                if not _close(x[name], y[name], LOG_TOLERANCE * max(1e-3, abs(x[name]))):
                    yield f"{name} {x[name]:.6g}, streamed {y[name]:.6g}"
        if a["params"].keys() != b["params"].keys():
            yield f"parameters in one mode only: {', '.join(sorted(a['params'].keys() ^ b['params'].keys())[:3])}"
        for name in sorted(a["params"].keys() & b["params"].keys()):
            (sum_a, norm_a), (sum_b, norm_b) = a["params"][name], b["params"][name]
            tolerance = PARAMETER_TOLERANCE * max(1e-3, norm_a)
            if not (_close(norm_a, norm_b, tolerance) and _close(sum_a, sum_b, 3 * tolerance)):
                yield f"norm of {name} {norm_a:.6g}, streamed {norm_b:.6g}; sum {sum_a:.6g} and {sum_b:.6g}"


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance + 1e-6 or (a != a and b != b)


def _find(table: Mapping[str, str], text: str) -> str:
    return next((explanation for pattern, explanation in table.items() if re.search(pattern, text)), "")
