"""Turn the entries of ``datasets`` into rows of tokens: open a source, recognize its format, tokenize its examples to a table, report mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.chat_template import today
from horizon_lm.runs.data.checks import check_rows
from horizon_lm.runs.data.conversations import RowError
from horizon_lm.runs.data.examples import ROWS_INSPECTED, ExampleReader
from horizon_lm.runs.data.findings import Finding, Findings
from horizon_lm.runs.data.image_files import ImageFiles
from horizon_lm.runs.data.loaded_images import ImagesOfRows
from horizon_lm.runs.data.sources import open_source
from horizon_lm.runs.data.table_cache import progress_bars
from horizon_lm.runs.data.token_dataset import Part, TokenTable
from horizon_lm.runs.data.tokenize import ExampleTokenizer
from horizon_lm.runs.data.tokenized_table import tokenize_source
from horizon_lm.runs.data.vision import Pictures, Vision
from horizon_lm.runs.data.workers import ending_with_us


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    """Options of preprocessing.

    Attributes:
        objective, train_on, max_length: settings of the run.
        packing: packing strategy, or None for unpacked rows.
        num_proc: number of processes; None for one.
        seed: seed for sampling a fraction of the rows.
        day: the date that chat templates print; None for today's.
        chat_template: where the chat template is from, for messages; None for the model's own.
        allow_downloads: download images whose addresses are in rows.
    """

    objective: str
    train_on: str | None = None
    max_length: int | None = None
    packing: str | None = None
    num_proc: int | None = None
    seed: int = 0
    day: str | None = None
    chat_template: str | None = None
    allow_downloads: bool = False

    @property
    def row_limit(self) -> int | None:
        """The length to which rows are truncated before packing; None if packing needs whole rows."""
        return self.max_length if self.packing in (None, "bfd") else None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of preprocessing some datasets.

    Attributes:
        rows: the rows that are used.
        num_read: number of rows read.
        found: the rows with each flag.
        findings: likely mistakes in the rows.
    """

    rows: TokenTable
    num_read: int
    found: Findings
    findings: Sequence[Finding]


def prepare(
    datasets: Sequence[DatasetConfig],
    tokenizer: Any,
    options: PreprocessConfig,
    chosen: Sequence[np.ndarray] | None = None,
    vision: Vision | None = None,
) -> Report:
    """Read, tokenize and truncate the rows of some datasets, and leave out those that cannot be trained on.

    Args:
        datasets: the datasets.
        tokenizer: the model's tokenizer.
        options: settings of the run.
        chosen: the indices of the rows of each dataset that are to be used; None for those that the datasets select.
        vision: the processor of images; None for a model of text.

    Raises:
        ConfigError: the rows need a chat template, character offsets, TRL, pillow or a processor of images, which are missing.
        DataError: files or rows are invalid.
    """
    found, parts, num_read = Findings(), list[Part](), 0
    with progress_bars(), ending_with_us():
        for number, config in enumerate(datasets):
            source = open_source(config)
            try:
                reader = ExampleReader.of_rows(config, source.first_rows(ROWS_INSPECTED), options.objective)
            except RowError as error:  # every further row would give the same error
                found.add_invalid([(0, error.fault, str(error))], source.place)
                continue
            found.add_unused([reader.unused_fields(row) for row in source.first_rows(ROWS_INSPECTED)], source.place)
            files = ImageFiles.beside(config.path, options.allow_downloads)
            pictures = None if vision is None else Pictures(vision, files)
            day = options.day or today()
            examples = ExampleTokenizer(tokenizer, options.train_on, options.row_limit, day, pictures)
            table = tokenize_source(source, reader, examples, options.num_proc)
            indices = source.sample(options.seed) if chosen is None else chosen[number]
            images = None if pictures is None else ImagesOfRows(source, reader, pictures)
            used = found.add_table(table, indices, source.place)
            parts.append(Part(table, source.place, used, config.weight, images))
            num_read += len(indices)
    found.reject_invalid(options.chat_template)
    return Report(TokenTable(parts), num_read, found, check_rows(found, parts, tokenizer))
