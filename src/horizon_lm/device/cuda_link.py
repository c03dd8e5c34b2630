"""Transfers of a CUDA device: direct or staged copies, dtype conversion, and landing gradients in host memory.

`HostTransport` moves bytes of one dtype across the link. `CudaLink` adds conversion, addition and squaring on the
device. Both touch only buffers that they or the engine allocated permanently, so nothing here needs ``record_stream``.

Shapes: V rows of a table, R rows of a batch, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from horizon_lm.device.cpu import HostLink
from horizon_lm.device.page_locks import PageLocks
from horizon_lm.device.transfers import SquaredNorm
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.kernels.decoding import decode, has_triton

_PIECE_ELEMENTS = 1 << 24  # elements converted or squared in one operation
_PACKED_BYTES = 1 << 24  # codes and scales that are decoded at once by Triton's kernels, which need no other memory
_PACKED_BYTES_OF_TORCH = 1 << 21  # the same by torch, which needs about 30 times as much memory for it
_STAGING_BYTES = 64 * 2**20
_ALIGNMENT = 256  # alignment in bytes of tensors that share scratch memory
LINK_SCRATCH_BYTES = 4 * _PIECE_ELEMENTS  # device memory of one link, which holds a piece in fp32


class HostTransport:
    """Copies between host and device within one dtype, enqueued on the current stream.

    Page-locked memory is copied directly. Everything else goes through two page-locked staging buffers alternately, so
    that the host fills one while the device reads the other.

    Args:
        device: the device at the other end.
        locks: the page-locked ranges of host memory.
    """

    def __init__(self, device: torch.device, locks: PageLocks) -> None:
        self._device, self._locks = device, locks
        with torch.cuda.device(device):
            self._staging = [
                (torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event(blocking=True))
                for _ in range(2)
            ]
        self._turn = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy a 1-D tensor between host and device, and return the destination."""
        to_device = destination.device == self._device
        for start, stop, is_locked in self._locks.parts(source if to_device else destination):
            if is_locked:
                destination[start:stop].copy_(source[start:stop], non_blocking=True)
            else:
                self._copy_staged(destination[start:stop], source[start:stop], to_device)
        return destination

    def stage(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a page-locked buffer that no copy is using, and the event to record once a copy uses it."""
        self._turn ^= 1
        buffer, event = self._staging[self._turn]
        event.synchronize()
        return buffer[: numel * dtype.itemsize].view(dtype), event

    def _copy_staged(self, destination: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
        """Copy piece by piece through the staging buffers: the host fills one while the device still reads the other."""
        for d, s in _split_alike(destination, source, _STAGING_BYTES // source.element_size()):
            staging, event = self.stage(s.numel(), s.dtype)
            if to_device:
                d.copy_(staging.copy_(s), non_blocking=True)
                event.record()
            else:
                staging.copy_(s, non_blocking=True)
                event.record()
                event.synchronize()  # the host copies on what has arrived
                d.copy_(staging)


class CudaLink:
    """The link of one copy stream, which must be current. Data cross the bus in the host's dtype, and the device converts them.

    Scratch memory is allocated up front, because an allocation could make the enqueuing thread wait for the device.

    Args:
        device: the device to copy from and to.
        locks: the page-locked ranges of host memory; None if only torch has locked any.
    """

    def __init__(self, device: torch.device, locks: PageLocks | None = None) -> None:
        self._device = device
        self._scratch = torch.empty(LINK_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._side_stream = torch.cuda.Stream(device, priority=-1)  # runs beside the stream of the link
        # Two places of the scratch memory take turns, each with an event for when it is filled and one for when it is free again.
        # `decode` fills them on the link's stream and empties them on the side stream; `_add` fills them on the side stream.
        self._filled = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._free = [torch.cuda.Event(blocking=True) for _ in range(2)]
        # The half (0 or 1) that `decode` filled last, and whether decoding may still be using either.
        self._turn, self._may_be_decoding = 0, False
        self._transport = HostTransport(device, locks or PageLocks(device))
        self._host = HostLink()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in either direction. Another dtype is converted on the device, through its scratch memory, piece by piece."""
        if source.dtype == destination.dtype:
            self._transport.copy(destination, source)
            return
        for d, s in _split_alike(destination, source, _PIECE_ELEMENTS):
            if source.device == self._device:
                converted = self._take_scratch(d.dtype, s.numel()).copy_(s)
                self._transport.copy(d, converted)
            else:
                arrived = self._transport.copy(self._take_scratch(s.dtype, s.numel()), s)
                d.copy_(arrived)

    def decode(self, destination: torch.Tensor, packed: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        """Decode a quantized tensor part by part. While the components of one part cross the link into one half of the scratch memory, the
        part before is decoded from the other half, on the side stream.
        """
        copying, self._may_be_decoding = torch.cuda.current_stream(self._device), True
        for components, place in codec.cut(packed, destination, packed_bytes()):
            self._turn ^= 1
            filled, free = self._filled[self._turn], self._free[self._turn]
            copying.wait_event(free)
            arrived = self._copy_components(self._scratch.chunk(2)[self._turn], components)
            filled.record()
            with torch.cuda.stream(self._side_stream):
                self._side_stream.wait_event(filled)
                decode(codec, arrived, place, dtype)
                free.record()

    def _copy_components(self, half: torch.Tensor, components: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors from host memory, one after the other, into one half of the scratch memory, and return them there by name."""
        arrived, start = {}, 0
        for name, source in components.items():
            raw = source.reshape(-1).view(torch.uint8)
            on_device = self._transport.copy(half[start : start + raw.numel()], raw)
            arrived[name] = on_device.view(source.dtype).view(source.shape)
            start += -(-raw.numel() // _ALIGNMENT) * _ALIGNMENT
        return arrived

    def finish(self) -> None:
        # The work that `decode` has enqueued on the side stream still reads the scratch memory, and writes the decoded tensors.
        if self._may_be_decoding:
            for free in self._free:
                torch.cuda.current_stream(self._device).wait_event(free)
            self._may_be_decoding = False

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        # In pieces that fit into a staging buffer, into which the host gathers. It is page-locked, so `copy` does not stage it again.
        for d, r in zip(*_split_rows(destination, rows), strict=True):
            staging, event = self._transport.stage(r.numel() * table.shape[1], table.dtype)
            torch.index_select(table, 0, r, out=staging.view(r.numel(), table.shape[1]))  # (V, H) -> (R, H)
            self.copy(d.view(-1), staging)
            event.record()  # `stage` hands the buffer out again once this copy has read it

    def call(self, function: Callable[[], None]) -> None:
        function()

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> SquaredNorm:
        """Land gradients, which the device rounds, adds and squares piece by piece, in its scratch memory."""
        if add:
            return _sum_of_squares(self._add(destination, source))
        if source.dtype == destination.dtype:
            self._transport.copy(destination, source)
            return _sum_of_squares([_norm(piece) for piece in source.split(_PIECE_ELEMENTS)])
        norms = []
        for d, s in _split_alike(destination, source, _PIECE_ELEMENTS // 2):
            kept = self._take_scratch(d.dtype, d.numel()).copy_(s)
            self._transport.copy(d, kept)
            norms.append(_norm(kept))
        return _sum_of_squares(norms)

    def _add(self, destination: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        """Add gradients to the gradients in host memory, and return the norm of each piece of the sum. While the sum of one piece goes to
        the host, the next piece comes from there on the side stream: the link has two directions.
        """
        self.finish()
        for free in self._free:
            free.record()  # reached once all earlier uses of the scratch memory and the destination are done
        copying, norms = torch.cuda.current_stream(self._device), []
        pieces = list(_split_alike(destination, source, _PIECE_ELEMENTS // 2))
        read = [self._read(d, turn) for turn, (d, _) in enumerate(pieces[:2])]
        for index, (d, s) in enumerate(pieces):
            kept, turn = read[index], index % 2
            copying.wait_event(self._filled[turn])
            # A piece has half of `_PIECE_ELEMENTS`. Two pieces in 16 bits fill half of the scratch memory, and their sum in fp32 takes the
            # other half. Two pieces in fp32 fill all of it, so they are summed in place.
            total = kept if kept.dtype == torch.float32 else self._scratch.chunk(2)[1].view(torch.float32)[: d.numel()]
            _accumulate(kept, s, total)
            self._transport.copy(d, kept)
            norms.append(_norm(kept))
            self._free[turn].record()
            if index + 2 < len(pieces):
                read.append(self._read(pieces[index + 2][0], turn))
        return norms

    def _read(self, source: torch.Tensor, turn: int) -> torch.Tensor:
        """Copy a piece of host memory into place ``turn`` (0 or 1) of the scratch memory, on the side stream."""
        start = turn * (_PIECE_ELEMENTS // 2) * source.element_size()
        place = self._scratch[start : start + source.numel() * source.element_size()].view(source.dtype)
        with torch.cuda.stream(self._side_stream):
            self._side_stream.wait_event(self._free[turn])
            self._transport.copy(place, source)
            self._filled[turn].record()
        return place

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> SquaredNorm:
        """Land rows (R, H) in a table (V, H). They are not contiguous there, so host threads scatter and round them."""
        total = 0.0
        for s, r in zip(*_split_rows(source, rows), strict=True):
            staging, event = self._transport.stage(s.numel(), source.dtype)
            staging.copy_(s.reshape(-1), non_blocking=True)
            event.record()
            event.synchronize()
            total += self._host.land_rows(table, staging.view(s.shape), r, add)
        return total

    def _take_scratch(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return scratch memory for ``numel`` elements. The link's stream waits for the side stream, so all earlier uses come before."""
        self.finish()
        return self._scratch[: numel * dtype.itemsize].view(dtype)


class DeviceLink(HostLink):
    """The link of a stream of collectives, which must be current: everything that it touches is on the device."""

    def decode(self, destination: torch.Tensor, packed: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        for components, place in codec.cut(packed, destination, packed_bytes()):
            decode(codec, components, place, dtype)


def packed_bytes() -> int:
    """Return the largest number of packed bytes that are decoded at once."""
    return _PACKED_BYTES if has_triton() else _PACKED_BYTES_OF_TORCH


def _split_alike(a: torch.Tensor, b: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(a.split(size), b.split(size), strict=True)


def _split_rows(values: torch.Tensor, rows: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Split rows (R, H) and their indices (R,) into pieces that fit into a staging buffer in any dtype."""
    size = max(1, min(_PIECE_ELEMENTS, _STAGING_BYTES // 4) // values.shape[1])
    return values.split(size), rows.split(size)


def _accumulate(kept: torch.Tensor, source: torch.Tensor, total: torch.Tensor) -> None:
    """Add gradients to those that are kept: in fp32, in ``total``, and rounded once."""
    kept.copy_(total.copy_(kept).add_(source))


def _norm(piece: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.float32)


def _sum_of_squares(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squared norms as a host tensor, which has its value once the stream has run the copy to it."""
    host = torch.empty((), dtype=torch.float64, pin_memory=True)
    return host.copy_(torch.stack(norms).double().square().sum(), non_blocking=True)
