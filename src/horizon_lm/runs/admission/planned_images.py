"""The images of the rows of a plan: those of the run's data, or pictures as the settings allow them, for which the processor of the model, or
its config, says how they are read.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest
from itertools import chain
from typing import Any

from horizon_lm.errors import ConfigError, HorizonError, ImagesNotSupportedError
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.image_arguments import rows_from_config
from horizon_lm.planning.measure.image_costs import RowsWithImages, rows_with_images
from horizon_lm.runs.admission.inputs import RowShape, Source
from horizon_lm.runs.config import DatasetConfig, RunConfig, TextConfig
from horizon_lm.runs.data.conversations import Preference, RowError
from horizon_lm.runs.data.examples import ROWS_INSPECTED, ExampleReader
from horizon_lm.runs.data.image_files import ImageFiles
from horizon_lm.runs.data.local_files import find_files
from horizon_lm.runs.data.sources import open_source
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.data.vision import Pictures, Vision

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LARGE = 4096  # pixels of each side of an image, if the settings do not limit them: processors scale it down
_TOKENS_TRIED = 4096  # of images in a row with which the model's code is tried
_ROWS_DECODED = 32  # first rows whose images a plan decodes: those with the most images


def with_images_of_data(
    run: RunConfig, source: Source, rows: RowShape, find: Callable[[], RowsWithImages | None]
) -> tuple[Source, list[str]]:
    """Return the model of a run with the images of its data, and a note if a plan cannot count them.

    Args:
        run: settings of the run.
        source: its model.
        rows: the shape of its rows.
        find: returns the images; None if there are none.

    Raises:
        ImagesNotSupportedError: the model does not compute images as transformers does.
    """
    try:
        found = replace(source, images=find())
        found.outline(run, length=rows.length, masked=rows.masked)  # which the plan takes from there
    except ImagesNotSupportedError:
        raise
    except (HorizonError, RowError) as error:
        reason = str(error).removeprefix("images_per_row: ")
        return source, [f"images: rows of text are planned, because those with images cannot be: {reason}"]
    return found, []


def images_of_tables(tables: Iterable[TokenTable]) -> RowsWithImages:
    """Return the images of the sequence with the most tokens of images. At least one row of the tables has an image."""
    (_, index, number), part = max(
        ((part.most_images(), part) for table in tables for part in table.parts), key=lambda each: each[0]
    )
    row = part.row(index)
    assert row.images is not None
    note = f"as in {row.place}, whose images have the most tokens"
    return _rows_of(row.images.pictures.vision, row.load_images(number), note)


def images_of_first_rows(run: RunConfig, source: Source) -> RowsWithImages | None:
    """Return the images of the one of the first rows in the local data of a run whose images have the most pixels; None if none has an image.

    If they cannot be read, or the model's folder has no processor, return as many images as a row has, as `images_of_rows` does.
    """
    if isinstance(run, TextConfig) and run.packing:  # how many images a packed row has is known once rows are tokenized
        return None
    references = chain.from_iterable(_references(config, run.objective) for config in run.datasets or ())
    # Those of few rows are held at once: they may be the images themselves.
    if not (found := nlargest(_ROWS_DECODED, references, key=lambda each: len(each[1]))):
        return None
    if (vision := _vision_of(run, source)) is not None:
        loaded = _load(vision, found)
        if images := max(loaded, key=lambda row: sum(each.width * each.height for each in row), default=None):
            note = f"as in the one of the first {ROWS_INSPECTED:,} rows whose images have the most pixels"
            return _rows_of(vision, [images], note)
    others = images_of_rows(run, source, len(found[0][1]))
    note = f"as many as one of the first {ROWS_INSPECTED:,} rows has"
    return replace(others, note="; ".join(filter(None, [note, others.note])))


def _references(config: DatasetConfig, objective: str) -> Iterator[tuple[ImageFiles, Sequence[Any]]]:
    """Yield the references to images of each sequence in the first rows of a dataset that has some; none for one on the hub."""
    if find_files(config) is None:
        return
    rows = open_source(config)
    with suppress(RowError):  # which a run reports
        reader = ExampleReader.of_rows(config, rows.first_rows(ROWS_INSPECTED), objective)
        for example in map(reader.read, rows.first_rows(ROWS_INSPECTED)):
            sequences = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
            yield from ((ImageFiles.beside(config.path), each.images) for each in sequences if each.images)


def _load(vision: Vision, found: Iterable[tuple[ImageFiles, Sequence[Any]]]) -> Iterator[list[Any]]:
    """Yield the images of the sequences whose images can be read."""
    for files, references in found:
        with suppress(RowError):
            yield [each.pixels for each in Pictures(vision, files).load(references)]


def images_of_rows(run: RunConfig, source: Source, per_row: int) -> RowsWithImages:
    """Return the images of the rows of a plan, which are squares of ``image_max_pixels``.

    Args:
        run: settings of the run.
        source: its model.
        per_row: images of a row.

    Raises:
        ConfigError: the size of images, or how the model takes them, is not known.
    """
    parts = find_parts(copy.deepcopy(source.model.skeleton()).train())
    if not parts.towers:
        raise ConfigError(f"images_per_row: {type(parts.model).__name__} has no tower that reads images; remove it")
    if (vision := _vision_of(run, source)) is None:
        return rows_from_config(parts, per_row, run.image_max_pixels)
    from PIL import Image

    side = _LARGE if run.image_max_pixels is None else math.isqrt(run.image_max_pixels)
    return _rows_of(vision, [[vision.scaled(Image.new("RGB", (side, side)))]], repeats=per_row)


def _vision_of(run: RunConfig, source: Source) -> Vision | None:
    """Return the processor of a run's model; None if its folder has none."""
    folder = source.model.folder
    if folder is None or not any((folder / name).is_file() for name in _PROCESSORS):
        return None
    return Vision(folder, source.config, run.image_max_pixels, run.image_min_pixels, run.trust_remote_code)


def _rows_of(vision: Vision, groups: Sequence[Sequence[Any]], note: str = "", repeats: int = 1) -> RowsWithImages:
    """Return rows with images as a processor makes them.

    Of images with many tokens the largest one stands for all, so that trying the model's code takes little memory. It is tried twice if it
    has other tokens when it is the only one: some processors cut it into crops then.

    Args:
        vision: the processor.
        groups: the images of a row, those of each packed row by themselves.
        note: as in `RowsWithImages`.
        repeats: number of times that a row has these images.
    """
    images = [image for group in groups for image in group]
    tokens = [ids for group in groups for ids in _tokens_of(vision, group)]
    sizes = list(map(len, tokens))
    if len(images) > 2 and sum(sizes) > _TOKENS_TRIED:
        largest = images[sizes.index(max(sizes))]
        count = 1 if len(_tokens_of(vision, [largest])[0]) == max(sizes) else 2
        found = _rows_of(
            vision, [[largest] * count], f"{note}; all counted as the largest", -(-sum(sizes) // (count * max(sizes)))
        )
        return replace(found, per_row=len(images))
    return rows_with_images(
        len(images) * repeats, tokens, lambda ids, mask: vision.inputs([*groups] * len(ids), ids, mask), note, repeats
    )


def _tokens_of(vision: Vision, images: Sequence[Any]) -> list[Sequence[int]]:
    """Return the tokens of each image of a row."""
    processor = vision.processor
    expanded = vision.expand(" ".join([processor.image_token] * len(images)), images)
    texts = [expanded.text[start:end] for _, (start, end) in expanded.places]
    return [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
