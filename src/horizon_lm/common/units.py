"""The units of a model, each of which is streamed, updated and saved as a whole: the embedding table, the blocks, the head, and
everything else.

A block with many experts may be moved in parts: tiles of consecutive experts, and the rest of the block, its core.
"""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a model, or a tile of one. As text it is its name in files: ``embed``, ``block3``, ``block3.tile2``.

    Attributes:
        kind: ``embed``, ``block``, ``head``, ``outer`` or ``idle``.
        index: the index of a block; None for other units.
        tile: the number of a tile of a block's experts; None for a whole unit, or the core of a block.
    """

    kind: str
    index: int | None = None
    tile: int | None = None

    def __str__(self) -> str:
        block = self.kind if self.index is None else f"{self.kind}{self.index}"
        return block if self.tile is None else f"{block}.tile{self.tile}"

    def __repr__(self) -> str:
        return repr(str(self))

    @classmethod
    def parse(cls, name: str) -> "Unit":
        """Return the unit of a name. A name that no unit has, such as one in a file of another program, becomes a kind."""
        found = re.fullmatch(r"(.*?)(\d+)?(?:\.tile(\d+))?", name, re.DOTALL)
        assert found is not None
        kind, *numbers = found.groups()
        return cls(kind, *(None if number is None else int(number) for number in numbers))

    @property
    def is_block(self) -> bool:
        """True for a block, or its core."""
        return self.index is not None and self.tile is None

    @property
    def is_tile(self) -> bool:
        """True for a tile of a block's experts."""
        return self.tile is not None

    @property
    def block_index(self) -> int:
        """The index of the block; for a tile, that of its block."""
        assert self.index is not None
        return self.index

    @property
    def tile_number(self) -> int:
        """The number of a tile in its block."""
        assert self.tile is not None
        return self.tile

    @property
    def owner(self) -> "Unit":
        """The unit whose slabs hold this one: its block for a tile, otherwise itself."""
        return block(self.block_index) if self.is_tile else self


@cache
def block(index: int) -> Unit:
    """Return the block at ``index``."""
    return Unit("block", index)


@cache
def tile(index: int, number: int) -> Unit:
    """Return a tile of the experts of the block at ``index``."""
    return Unit("block", index, number)


EMBED, HEAD, OUTER = Unit("embed"), Unit("head"), Unit("outer")
IDLE = Unit("idle")  # embedding tables that are not trained, of which rows are read, beside one that is; in no schedule
