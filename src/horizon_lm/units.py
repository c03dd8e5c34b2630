"""The names of a model's units: the embedding table, the decoder blocks, the head, and everything else.

A block with many experts may be moved in parts: tiles of consecutive experts, and the rest of the block, its core.
"""

from functools import cache

_TILE = ".tile"


class Unit(str):
    """The name of a unit, which is streamed, updated and saved as a whole."""

    __slots__ = ()

    @property
    def is_block(self) -> bool:
        """True for a decoder block, or its core."""
        return self.startswith("block") and not self.is_tile

    @property
    def is_tile(self) -> bool:
        """True for a tile of a block's experts."""
        return _TILE in self

    @property
    def block_index(self) -> int:
        """The index of the decoder block; for a tile, that of its block."""
        return int(self.removeprefix("block").partition(".")[0])

    @property
    def owner(self) -> "Unit":
        """The unit whose slabs hold this one: its block for a tile, otherwise itself."""
        return block(self.block_index) if self.is_tile else self

    @property
    def tile_number(self) -> int:
        """The number of a tile in its block."""
        return int(self.partition(_TILE)[2])


@cache
def block(index: int) -> Unit:
    """Return the name of the decoder block at ``index``."""
    return Unit(f"block{index}")


@cache
def tile(index: int, number: int) -> Unit:
    """Return the name of a tile of the experts of the decoder block at ``index``."""
    return Unit(f"block{index}{_TILE}{number}")


EMBED, HEAD, OUTER = Unit("embed"), Unit("head"), Unit("outer")
IDLE = Unit("idle")  # embedding tables that are not trained, of which rows are read, beside one that is; in no schedule
