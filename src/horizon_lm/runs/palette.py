"""The colours and words that the figures of the page and ``loss.png`` share; ``tools/report/assets/page.css`` repeats the first of them."""

import math
from collections.abc import Iterable

from horizon_lm.schedule.ops import Kind

TEXT, MUTED, GRID, PAGE = "#24292f", "#656d76", "#e4e7eb", "#ffffff"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
FIRST, SECOND, THIRD, LIMIT = "#4c78a8", "#f58518", "#54a24b", "#e45756"
DARK = {TEXT: "#d5dbe2", MUTED: "#98a2ad", GRID: "#30363d", PAGE: "#151a21", FIRST: "#6699cc"}

# Copies in are blue, computation is green and orange, copies out are red and mauve, updates are yellow.
KINDS = {
    Kind.STREAM_IN: "#4c78a8",
    Kind.FETCH: "#88bde6",
    Kind.ROUTE: "#7fbf7b",
    Kind.FORWARD: "#54a24b",
    Kind.RECOMPUTE: "#b6a13a",
    Kind.BACKWARD: "#f58518",
    Kind.STAGE: "#9d755d",
    Kind.OFFLOAD: "#b279a2",
    Kind.STREAM_OUT: "#e45756",
    Kind.STREAM_MATRICES: "#2c5f8a",
    Kind.ORTHOGONALIZE: "#b5651d",
    Kind.RETURN_MATRICES: "#a23b3b",
    Kind.ADVANCE: "#e6c65a",
    Kind.UPDATE: "#d0a829",
    Kind.UPDATE_ROWS: "#8d7518",
    Kind.SAVE: "#79706e",
}

_NEAR_ZERO = 0.1  # of the largest value: an axis from 0 shows values from there on as well as one that begins at them


def axis_note(values: Iterable[float | None]) -> str:
    """Return the note of a vertical axis that does not begin at 0; empty if it does, because the values begin near it."""
    shown = [value for value in values if value is not None and math.isfinite(value)]
    return "axis not from 0" if shown and min(shown) > _NEAR_ZERO * max(shown) else ""


MAX_MARKED_POINTS = 60  # lines with more points have no markers
