"""Cut the sequences of a batch into the pieces that `horizon-lm inspect` shows: texts of one kind, and images."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.common.quantities import counted
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.token_dataset import Row


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent tokens of a sequence that are shown alike.

    Attributes:
        text: their text, or a description of the image that they stand for.
        example: number of their example in a packed row.
        trained: they are trained on.
        special: they are special tokens.
        image: number of the image of the sequence; None for text.
    """

    text: str
    example: int
    trained: bool = False
    special: bool = False
    image: int | None = None


@dataclass(frozen=True, slots=True)
class ShownSequence:
    """A sequence of a batch.

    Attributes:
        title: the origin of its row, and which answer it is.
        row: its row.
        number: its number in the row.
        index: its index in the batch.
    """

    title: str
    row: Row
    number: int
    index: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return len(self.row.sequences[self.number].ids)

    def pieces(self, tokenizer: Any, batch: Batch) -> Iterator[Piece]:
        """Yield the pieces of the sequence. ``batch``: its batch."""
        ids, labels = batch.input_ids[self.index].tolist(), batch.labels[self.index].tolist()
        positions = [1] * len(ids) if batch.position_ids is None else batch.position_ids[self.index].tolist()
        special_ids = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        images = self.row.sequences[self.number].images
        image_of = {place: number for number, image in enumerate(images) for place in range(image.start, image.end)}
        # For each token: the number of its example in a packed row, and what decides how it is shown.
        examples = accumulate(int(position == 0) for position in positions)
        keys = [
            (example, label != IGNORE_INDEX, token in special_ids, None)
            if (image := image_of.get(place)) is None
            else (example, False, False, image)
            for place, (example, label, token) in enumerate(zip(examples, labels, ids, strict=True))
        ]
        for (example, trained, special, image), places in groupby(range(self.num_tokens), key=keys.__getitem__):
            tokens = [ids[place] for place in places]
            if image is None:
                yield Piece(tokenizer.decode(tokens), example, trained, special)
            else:
                yield Piece(f"[image {images[image].name}: {counted(len(tokens), 'token')}]", example, image=image)


def shown_sequences(batch: Batch, rows: Any, num_rows: int) -> Iterator[ShownSequence]:
    """Yield the sequences of the first rows of a batch, which are in ``rows``."""
    answers_per_row = batch.input_ids.shape[0] // len(batch.places)
    for index in range(min(num_rows, len(batch.places))):
        for answer in range(answers_per_row):
            name = "" if answers_per_row == 1 else (", chosen", ", rejected")[answer]
            in_batch = index + answer * len(batch.places)  # all chosen answers come before all rejected ones
            yield ShownSequence(f"{batch.places[index]}{name}", rows[batch.rows[index]], answer, in_batch)
