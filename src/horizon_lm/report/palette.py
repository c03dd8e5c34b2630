"""The colours and words that the figures of the page and ``loss.png`` share."""

from horizon_lm.schedule.ops import Kind

TEXT, MUTED, GRID, PAGE = "#24292f", "#656d76", "#e4e7eb", "#ffffff"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
FIRST, SECOND, THIRD, LIMIT = "#4c78a8", "#f58518", "#54a24b", "#e45756"
DARK = {TEXT: "#d5dbe2", MUTED: "#98a2ad", GRID: "#30363d", PAGE: "#151a21", FIRST: "#6699cc"}

# Copies in are blue, computation is green and orange, copies out are red and mauve, updates are yellow.
KINDS = {
    Kind.STREAM_IN: "#4c78a8",
    Kind.FETCH: "#88bde6",
    Kind.FORWARD: "#54a24b",
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

NOT_FROM_ZERO = "axis not from 0"
MAX_MARKED_POINTS = 60  # lines with more points have no markers
