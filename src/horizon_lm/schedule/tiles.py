"""The tiles of a block's experts in a pass: when each is copied to the device, and into which slot.

A block whose experts do not fit twice on the device is computed in parts. The core (attention, norms, router, shared experts)
stays in a slot for the whole block. Its experts are copied and computed tile by tile, in two slots of their own:

- forward: core up to the experts (`ROUTE`), each tile, rest of the core.
- backward: the core is computed again, as far as the gradient of the experts' output needs it (`RECOMPUTE`); then each tile is
  computed again and differentiated, the last one first; then the core is differentiated.

In a forward pass of few tokens, which are routed to few experts, tiles are copied after `ROUTE`, and the experts of a block that is not
cut are one tile, too, in the slot of the block.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from horizon_lm.common.units import Unit, tile
from horizon_lm.schedule.ops import Buf, Buffer, Op


class TileSlots:
    """The slots of the tiles of a model, between which they alternate from the first block to the last.

    Args:
        counts: number of tiles of each block; empty if no block has any.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self._first = counts, [0, *accumulate(counts)]

    def of(self, index: int) -> list[Unit]:
        """Return the tiles of a block, in the order of the forward pass."""
        return [tile(index, number) for number in range(self.counts[index])] if self.counts else []

    def slot(self, unit: Unit) -> int:
        """Return the slot of a tile, and of its gradients."""
        return (self._first[unit.block_index] + unit.tile_number) % 2

    def weights(self, unit: Unit) -> Buffer:
        """Return the device buffer of a tile's weights."""
        return Buffer(Buf.TILE, self.slot(unit))

    def grads(self, unit: Unit) -> Buffer:
        """Return the device buffer of a tile's gradients."""
        return Buffer(Buf.TILE_GRADS, self.slot(unit))


class TileCopies:
    """The copies that a pass has still to list: of each tile as soon as a slot is free, after the core of its block.

    Args:
        tiles: the units in the order of the pass, and the tiles of each in that order; none for most units.
        load: function that returns the operations that copy a tile, or a unit without its tiles.
        behind: places of units that use the slot of the unit before them, and are copied once that has computed.
        routed: blocks whose tiles may be copied only after the block has routed its tokens (`note_routed`).
    """

    def __init__(
        self,
        tiles: Mapping[Unit, Sequence[Unit]],
        load: Callable[[Unit], list[Op]],
        behind: Collection[int] = (),
        routed: Iterable[Unit] = (),
    ) -> None:
        self._load, self._behind, self._not_routed = load, behind, set(routed)
        self._cores = list(tiles)
        self._place_of = {unit: place for place, unit in enumerate(self._cores)}
        self._tiles_left = [each for some in tiles.values() for each in some]  # tiles whose copy is not listed
        self._tiles_computed = 0  # tiles whose computation is listed
        self._tiles_listed = 0  # tiles whose copy is listed
        self._cores_listed = 0  # cores whose copy is listed

    def core(self, place: int) -> list[Op]:
        """Return the copy of the core at a place of the pass, and note it as listed; nothing if it is listed, or behind the end."""
        if place < self._cores_listed or place >= len(self._cores):
            return []
        self._cores_listed = place + 1
        return self._load(self._cores[place])

    def prefetch(self, place: int) -> list[Op]:
        """Return the copy of the core at a place of the pass while the one before it has not computed; nothing if it needs that one's slot."""
        return [] if place in self._behind else self.core(place)

    def ahead(self, place: int) -> list[Op]:
        """Return the copies of the next tiles as far as slots are free, each after the copy of its block's core, and note them as listed.
        Tiles more than one block ahead of this place are left for later.
        """
        ops: list[Op] = []
        while self._tiles_left and self._tiles_listed < self._tiles_computed + 2:  # one in each of the two slots
            unit = self._tiles_left[0]
            place_of_block = self._place_of[unit.owner]
            if place_of_block > place + 1:
                break
            if place_of_block > place and place_of_block in self._behind:
                break
            if unit.owner in self._not_routed:  # until it is routed, the next core may use the link
                ops += self.prefetch(place + 1)
                break
            # `core` returns nothing for a core that is listed already.
            ops += [*self.core(place_of_block), *self._load(unit)]
            del self._tiles_left[0]
            self._tiles_listed += 1
        return ops

    def note_routed(self, unit: Unit) -> None:
        """Record that the part of a block before its experts is listed."""
        self._not_routed.discard(unit)

    def note_computed(self) -> None:
        """Record that the computation of the next tile is listed, after which its slot is free."""
        self._tiles_computed += 1
