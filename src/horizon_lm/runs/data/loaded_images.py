"""Load the images of rows again when a batch is made of them: a table of tokens has references and hashes, no pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horizon_lm.errors import DataError
from horizon_lm.runs.data.conversations import Example, Preference, RowError
from horizon_lm.runs.data.examples import ExampleReader
from horizon_lm.runs.data.sources import Source
from horizon_lm.runs.data.vision import Pictures, TokenImage


@dataclass(frozen=True)
class ImagesOfRows:
    """The images of the rows of a dataset.

    Attributes:
        source: the rows.
        reader: converts them to examples.
        pictures: their images.
    """

    source: Source
    reader: ExampleReader
    pictures: Pictures

    def load(self, index: int, sequence: int, expected: Sequence[TokenImage]) -> list[Any]:
        """Return the images of a sequence of a row, in RGB.

        Args:
            index: index of the row in the source.
            sequence: index of the sequence in the row.
            expected: the images as they were when the row was tokenized.

        Raises:
            DataError: they cannot be read any more, or have changed.
        """
        if not expected:
            return []
        references = _images_of(self.reader.read(self.source.row(index)), sequence)
        try:
            return [each.pixels for each in self.pictures.load(references, expected)]
        except RowError as error:
            raise DataError(f"{self.source.place(index)}: {error}") from error


def _images_of(example: Example, sequence: int) -> Sequence[Any]:
    """Return the references to the images of a sequence of an example."""
    if isinstance(example, Preference):
        return (example.chosen, example.rejected)[sequence].images
    return example.images
