"""Find the number of positions that a model has."""

from dataclasses import dataclass
from typing import Any

from torch import nn

_SPARE_ROWS = 8  # of a table, beyond the positions of the config: OPT has 2


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a model.

    Attributes:
        number: the number that its config names.
        is_table: each has a row of a table, so that there are no more; otherwise any position can be computed.
    """

    number: int
    is_table: bool


def positions_of(model: Any) -> Positions | None:
    """Return the positions of a model, with or without weights; None if its config names no number of them."""
    number = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(number, int) or number < 1:
        return None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {table.num_embeddings for table in tables if table is not model.get_input_embeddings()}
    return Positions(number, is_table=any(number <= size <= number + _SPARE_ROWS for size in sizes))
