"""Check on rows of a run that packed rows with images are computed as they would be one by one."""

import copy
from collections.abc import Sequence

import numpy as np

from horizon_lm.model.source import ModelSource
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.packable import require_packable_images
from horizon_lm.runs.data.loader import collate
from horizon_lm.runs.data.packing import join_rows
from horizon_lm.runs.data.token_dataset import Part, Row
from horizon_lm.runs.data.tokenize import Tokens
from horizon_lm.runs.training.rows import RunData

_FEW = 3  # tokens


def require_packable_rows(source: ModelSource, used: str, data: RunData) -> None:
    """Raise ModelNotSupportedError if a run packs rows with images, and its model would compute them in another way.

    Args:
        source: the model.
        used: its attention implementation.
        data: the rows of the run.
    """
    packed = (part for each in data.parts if each.packed is not each.rows for part in each.rows.parts)
    part = next((part for part in packed if part.with_images[part.indices].any()), None)
    if part is not None:
        rows = _few_rows(part)
        parts = find_parts(copy.deepcopy(source.skeleton()))
        require_packable_images(parts, used, collate(rows).inputs(), collate([join_rows(rows)]).inputs())


def _few_rows(part: Part) -> Sequence[Row]:
    """Return the shortest row with images twice, behind a text: its images have other places there than in a row by itself."""
    indices = part.indices[part.with_images[part.indices]]
    row = part.row(int(indices[np.argmin(part.lengths[indices])]))
    (tokens,) = row.sequences
    of_text = np.ones(len(tokens.ids), dtype=bool)
    for image in tokens.images:
        of_text[image.start : image.end] = False
    ids = tokens.ids[of_text][:_FEW]
    return Row([Tokens(ids, np.ones(len(ids), dtype=bool))], None, row.place, row.sources, row.images), row, row
