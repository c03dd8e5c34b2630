"""The names of a model's units: the embedding table, the decoder blocks, the head, and everything else."""

from functools import cache

_FLOAT32 = ".float32"


class Unit(str):
    """The name of a unit, which is streamed, updated and saved as a whole."""

    __slots__ = ()

    @property
    def float32(self) -> "Unit":
        """The slabs of this unit's weights that are kept in float32; they are moved, updated and saved with it."""
        return Unit(self + _FLOAT32)

    @property
    def is_float32(self) -> bool:
        """True for the slabs of weights that are kept in float32."""
        return self.endswith(_FLOAT32)

    @property
    def home(self) -> "Unit":
        """The unit to which these slabs belong."""
        return Unit(self.removesuffix(_FLOAT32))

    @property
    def is_block(self) -> bool:
        """True for a decoder block."""
        return self.startswith("block")

    @property
    def block_index(self) -> int:
        """The index of the decoder block."""
        return int(self.removeprefix("block").removesuffix(_FLOAT32))


@cache
def block(index: int) -> Unit:
    """Return the name of the decoder block at ``index``."""
    return Unit(f"block{index}")


EMBED, HEAD, OUTER = Unit("embed"), Unit("head"), Unit("outer")
IDLE = Unit("idle")  # embedding tables that are not trained, of which rows are read, beside one that is; in no schedule
