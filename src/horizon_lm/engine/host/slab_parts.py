"""The moves that stream the tensors of a unit into their slot on the device."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from horizon_lm.device.transfers import Copy, Decode, DecodeThere, Move
from horizon_lm.memory.codecs.stack import Rows
from horizon_lm.memory.layout.parts import PartLayout
from horizon_lm.memory.unit_slabs import Slab, Slot


class SlabPart(PartLayout[Slab]):
    """The tensors in a unit's slabs that have a slot of their own, in host memory."""

    def moves(self, slot: Slot, dtypes: Mapping[str, torch.dtype], some: Sequence[slice] | None = None) -> list[Move]:
        """Return the moves that stream the part into its slot: copies of this rank's range, and the decoding of quantized tensors, all of
        whose codes this rank must own.

        Args:
            slot: the slot.
            dtypes: the dtype that the values of each quantized tensor are rounded to.
            some: the rows to stream, counted from the first in the slab, if the part has rows; None for all.
        """
        return [*self.copies(slot, some), *self._decode_all(slot, dtypes, some)]

    def copies(self, slot: Slot, some: Sequence[slice] | None = None) -> list[Move]:
        """Return the copies of this rank's range of the tensors that are not quantized, with the arguments of `moves`."""
        own_spans = self.own if some is None else self.own_rows(some)
        return [
            _copy(slot[number][span.in_slot], slab.weights[span.in_slab])
            for number, slab in enumerate(self.slabs.of_weights)
            for span in own_spans[number]
        ]

    def _decode_all(
        self, slot: Slot, dtypes: Mapping[str, torch.dtype], some: Sequence[slice] | None
    ) -> Iterator[Move]:
        """Yield the moves that decode all quantized tensors from host memory into the slot, with the arguments of `moves`."""
        for name, dtype in dtypes.items():
            if self.has(name):
                yield from self._decode_tensor(slot, name, dtype, some)

    def copies_of_codes(self, buffer: torch.Tensor) -> list[Move]:
        """Return the copies of this rank's range of codes and scales into their buffer."""
        slab = self.slabs.packed
        own_spans = [span.within(slab.own) for span in self.packed_spans()]
        return [_copy(buffer[span.in_slot], slab.weights[span.in_slab]) for span in own_spans if span.numel]

    def decoding_there(self, slot: Slot, packed: torch.Tensor, dtypes: Mapping[str, torch.dtype]) -> list[Move]:
        """Return the moves that decode quantized tensors on the device, from the buffer in which all ranks have gathered their codes.

        Args:
            slot, dtypes: as in `moves`.
            packed: the buffer of codes and scales.
        """
        return [
            DecodeThere(
                self.layout.view(slot, name), self.packed.view(packed, name), self.slabs.codecs[name], dtypes[name]
            )
            for name in self.packed
        ]

    def _decode_tensor(self, slot: Slot, name: str, dtype: torch.dtype, some: Sequence[slice] | None) -> Iterator[Move]:
        """Yield the moves that decode one tensor, or some rows of it, into the slot; ``slot`` and ``some`` are as in `moves`."""
        slab, codec, view = self.slabs.packed, self.slabs.codecs[name], self.layout.view(slot, name)
        codes = slab.layout.view(slab.weights, name)
        if self.rows is None:  # the part has whole tensors, of which no rows are chosen
            yield Decode(view, codes, codec, dtype)
            return
        num_rows = self.slabs.layout.entry(name).shape[0]
        for rows in [self.rows] if some is None else some:
            target = view[rows.start - self.rows.start : rows.stop - self.rows.start]
            yield Decode(target, codes, Rows(codec, num_rows, rows.start), dtype)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Return the copy of a part of a slab of weights or codes, 1-D, to the device."""
    return Copy(target, source, source.nbytes)
