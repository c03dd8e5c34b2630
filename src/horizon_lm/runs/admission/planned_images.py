"""The images of the rows of a plan: as the processor of the model makes them, or as its config says."""

import copy
import math
from pathlib import Path

from horizon_lm.errors import ConfigError
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.image_arguments import rows_from_config
from horizon_lm.planning.measure.image_costs import RowsWithImages, rows_with_images
from horizon_lm.runs.admission.inputs import Source
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.data.vision import Vision

_LARGE = 4096  # pixels of each side of an image, if the settings do not limit them: processors scale it down


def images_of_rows(run: RunConfig, source: Source, per_row: int) -> RowsWithImages:
    """Return the images of the rows of a plan, which are squares of ``image_max_pixels``.

    Args:
        run: settings of the run.
        source: its model.
        per_row: images of a row.

    Raises:
        ConfigError: the size of images, or how the model takes them, is not known.
    """
    folder, parts = source.model.folder, find_parts(copy.deepcopy(source.model.skeleton()).train())
    if not parts.towers:
        raise ConfigError(f"images_per_row: {type(parts.model).__name__} has no tower that reads images; remove it")
    if folder is None or not _has_processor(folder):
        return rows_from_config(parts, per_row, run.image_max_pixels)
    vision = Vision(folder, source.config, run.image_max_pixels, run.image_min_pixels, run.trust_remote_code)
    return _rows_of(vision, per_row, run.image_max_pixels)


def _has_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def _rows_of(vision: Vision, per_row: int, max_pixels: int | None) -> RowsWithImages:
    """Return rows with images as a processor makes them."""
    from PIL import Image

    processor = vision.processor
    side = _LARGE if max_pixels is None else math.isqrt(max_pixels)
    image = vision.scaled(Image.new("RGB", (side, side)))
    text = vision.expand(processor.image_token, [image]).text
    tokens = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return rows_with_images(per_row, tokens, lambda ids, mask: vision.inputs([[image]] * len(ids), ids, mask))
