"""The collectives of a pass as moves: gathering a unit's ranges on the devices, and summing its gradients at their owners.

Sums are computed in the order of the ranks and in float32, so that a step gives the same bits however the network is built. Between
machines they travel as one chain of partial sums, so that the bytes on a network do not grow with the devices of a machine.

Shapes: buffers are 1-D, or rows (R, H) of a table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from horizon_lm.common.constants import COLLECTIVE_BYTES
from horizon_lm.common.ranges import between, length, overlap
from horizon_lm.device.transfers import Link, Move
from horizon_lm.distributed.lost import noticing_lost_ranks
from horizon_lm.memory.layout.buffers import sum_buffers

_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """The ranks that exchange data: a process group of torch.distributed, used by the stream of collectives alone.

    Args:
        group: the process group.
        ranks: its ranks in the world, in order.
        rank: the rank of this process in the world.
        of_machine: number of ranks of each machine, which follow each other; None if all are on one machine, or each on its own.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, of_machine: int | None = None) -> None:
        self._group, self._ranks, self._index = group, list(ranks), list(ranks).index(rank)
        self._ranks_per_machine = of_machine or len(self._ranks)
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def index(self) -> int:
        """Place of this process among the ranks."""
        return self._index

    def growth_bytes(self, largest: int) -> int:
        """Return the device memory that sums may still take, if the largest buffer of gradients has ``largest`` bytes."""
        needed = sum_buffers(self.size, self._ranks_per_machine, min(largest, COLLECTIVE_BYTES))
        taken = {use: each.numel() * each.element_size() for use, each in self._scratch.items()}
        return sum(max(0, num_bytes - taken.get(use, 0)) for use, num_bytes in needed.items())

    def warm_up(self, device: torch.device) -> None:
        """Run each collective once, with messages as large as those of a step, and allocate the memory of sums."""
        if self.size == 1:
            return
        length_each = COLLECTIVE_BYTES // (2 * self.size)
        buffer = torch.zeros(self.size * length_each, dtype=torch.bfloat16, device=device)
        cuts = [rank * length_each for rank in range(self.size + 1)]
        self.gather(buffer, cuts)
        self.gather(buffer[:-1], [*cuts[:-1], cuts[-1] - 1])  # unequal ranges, which are sent one by one
        self.sum(buffer, cuts)

    def gather(self, buffer: torch.Tensor, cuts: Sequence[int]) -> None:
        """Fill a buffer with the ranges of all ranks, of which this one has its own in place.

        Args:
            buffer: the buffer; its first dimension is cut.
            cuts: the ``size + 1`` places at which it is cut.
        """
        if not len(buffer):
            return
        first = cuts[1] - cuts[0]  # the length of the first range
        if len(buffer) == first * self.size and list(cuts) == [first * rank for rank in range(self.size + 1)]:
            with noticing_lost_ranks():
                _gather_equal(buffer, buffer[self._own_range(cuts)], group=self._group)
            return
        # A collective needs ranges of equal length: others are sent one by one.
        own = buffer[self._own_range(cuts)]
        self._exchange(
            sent={rank: [own] for rank in range(self.size)},
            received={rank: [buffer[part]] for rank, part in enumerate(between(cuts))},
        )

    @property
    def num_machines(self) -> int:
        """The number of machines, if each has several of the ranks; 1 otherwise."""
        return self.size // self._ranks_per_machine

    def sum(self, buffer: torch.Tensor, cuts: Sequence[int]) -> None:
        """Replace this rank's range of a buffer by the sum of that range over all ranks. The other ranges are used up.

        Args:
            buffer: the gradients of this rank; its first dimension is cut.
            cuts: the ``size + 1`` places at which it is cut.
        """
        ranges = between(cuts)
        longest = max(map(length, ranges))
        step = max(1, COLLECTIVE_BYTES // (max(1, _bytes_each(buffer)) * self.size))
        for offset in range(0, longest, step):
            spans = [overlap(slice(own.start + offset, own.start + offset + step), own) for own in ranges]
            self._sum_spans(buffer, spans)
        self._send_sums_home(buffer, cuts)

    def _sum_spans(self, buffer: torch.Tensor, spans: Sequence[slice]) -> None:
        """Sum one span of each rank's range. On several machines the sums end on the last one, and `_send_sums_home` sends them on.

        A place is the number of a rank within its machine. On each machine, the rank with the same place as a span's owner receives
        the span from its neighbours, adds these parts, in the order of the ranks, to the sum of the machines before, and sends the
        sum to the next machine. On a single machine this rank is the owner.
        """

        def parts_at(place: int) -> list[torch.Tensor]:
            """Return the spans whose owners have this place in their machines: one for each machine."""
            return [buffer[span] for span in spans[place :: self._ranks_per_machine]]

        machine, own_place = divmod(self._index, self._ranks_per_machine)
        first_neighbour = machine * self._ranks_per_machine
        own = parts_at(own_place)
        lengths = [len(part) for part in own]
        shape = (sum(lengths), *buffer.shape[1:])
        received = self._take_scratch("received", buffer.dtype, (self._ranks_per_machine, *shape), buffer.device)
        places = range(self._ranks_per_machine)
        self._exchange(
            sent={first_neighbour + place: parts_at(place) for place in places},
            received={first_neighbour + place: received[place].split(lengths) for place in places},
        )
        for part, slot in zip(own, received[own_place].split(lengths), strict=True):
            slot.copy_(part)
        total = self._take_scratch("total", torch.float32, shape, buffer.device)
        if machine == 0:
            total.copy_(received[0])
        else:
            self._exchange(sent={}, received={self._index - self._ranks_per_machine: [total]})
            total.add_(received[0])
        for place in places[1:]:
            total.add_(received[place])
        if machine < self.num_machines - 1:
            self._exchange(sent={self._index + self._ranks_per_machine: [total]}, received={})
            return
        for part, part_of_total in zip(own, total.split(lengths), strict=True):
            part.copy_(part_of_total)

    def _send_sums_home(self, buffer: torch.Tensor, cuts: Sequence[int]) -> None:
        """Send sums from the last machine to their owners on the others."""
        machine, place = divmod(self._index, self._ranks_per_machine)
        source = self.size - self._ranks_per_machine + place  # the rank on the last machine that has these sums
        ranges = [buffer[part] for part in between(cuts)]
        if machine < self.num_machines - 1:
            self._exchange(sent={}, received={source: [ranges[self._index]]})
        elif self.num_machines > 1:
            owners = range(place, source, self._ranks_per_machine)
            self._exchange(sent={rank: [ranges[rank]] for rank in owners}, received={})

    def received_by_sum(self, own: int, row: int, itemsize: int) -> int:
        """Return the bytes that this rank receives in `sum`.

        Args:
            own: elements, or rows, of each range.
            row: elements of a row; 1 for elements.
            itemsize: bytes of an element.
        """
        machine = self._index // self._ranks_per_machine
        # For each element of a range: parts of neighbours, float32 sums of the machines before, and the finished sum.
        of_neighbours = (self._ranks_per_machine - 1) * self.num_machines * itemsize
        partial_sums = 4 * self.num_machines if machine else 0
        finished = itemsize if machine < self.num_machines - 1 else 0
        return own * row * (of_neighbours + partial_sums + finished)

    def _own_range(self, cuts: Sequence[int]) -> slice:
        """Return this rank's range."""
        return between(cuts)[self._index]

    def _take_scratch(self, use: str, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the scratch memory of a use, which is kept from call to call and grows. Only the stream of this group uses it."""
        numel = math.prod(shape)
        kept = self._scratch.get(use)
        if kept is None or kept.numel() * kept.element_size() < numel * dtype.itemsize:
            kept = self._scratch[use] = torch.empty(numel, dtype=dtype, device=device)
        return kept.view(torch.uint8)[: numel * dtype.itemsize].view(dtype).view(shape)

    def _exchange(
        self, sent: Mapping[int, Sequence[torch.Tensor]], received: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send parts to other ranks and receive parts from them, both by place in the group. This rank's and empty parts are left out."""
        operations = [
            dist.P2POp(direction, part, self._ranks[place], self._group)
            for direction, parts in ((dist.isend, sent), (dist.irecv, received))
            for place, of_rank in parts.items()
            for part in of_rank
            if place != self._index and part.numel()
        ]
        with noticing_lost_ranks():
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()


def _bytes_each(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer's element or, of a table, of its row."""
    return buffer[:1].numel() * buffer.element_size()


@dataclass(frozen=True, slots=True)
class Gather:
    """The gathering of a unit in a buffer on the device, in which this rank's range is in place. See `Group.gather`."""

    group: Group
    buffer: torch.Tensor
    cuts: Sequence[int]

    @property
    def host_bytes(self) -> int:
        """The bytes that this rank receives, which cross no host link within a machine."""
        own = self.cuts[self.group.index + 1] - self.cuts[self.group.index]
        return (self.cuts[-1] - own) * _bytes_each(self.buffer)

    def run(self, link: Link) -> None:
        link.call(lambda: self.group.gather(self.buffer, self.cuts))

    def split(self, parts: int) -> list[Move]:
        return [self]


@dataclass(frozen=True, slots=True)
class Reduce:
    """The summing of gradients on the device, each range at its owner. See `Group.sum`.

    Attributes:
        groups: the shard group; with replicas also their group, which adds up the sums of the shard groups.
        buffer: the gradients.
        cuts: the ranges of the owners.
    """

    groups: "ReduceGroups"
    buffer: torch.Tensor
    cuts: Sequence[int]

    @property
    def host_bytes(self) -> int:
        """The bytes that this rank receives, which cross no host link within a machine."""
        shard, replicate = self.groups.shard, self.groups.replicate
        own, bytes_each = self.cuts[shard.index + 1] - self.cuts[shard.index], _bytes_each(self.buffer)
        itemsize = self.buffer.element_size()
        # The copies sum a rank's range in parts and gather it again, so the rank receives all parts but its own twice.
        over_copies = 0 if replicate is None else round(2 * own * (replicate.size - 1) / replicate.size) * bytes_each
        return shard.received_by_sum(own, bytes_each // itemsize, itemsize) + over_copies

    def run(self, link: Link) -> None:
        link.call(lambda: self.groups.sum(self.buffer, self.cuts))

    def split(self, parts: int) -> list[Move]:
        return [self]


@dataclass(frozen=True, slots=True)
class ReduceGroups:
    """The groups that sum gradients.

    Attributes:
        shard: the ranks that own different ranges of one copy of the model.
        replicate: the ranks that own the same range, one for each copy; None if there is one copy.
    """

    shard: Group
    replicate: Group | None

    def growth_bytes(self, largest: int) -> int:
        """Return the device memory that sums may still take, as `Group.growth_bytes`."""
        over_copies = 0 if self.replicate is None else self.replicate.growth_bytes(largest)
        return self.shard.growth_bytes(largest) + over_copies

    def sum(self, buffer: torch.Tensor, cuts: Sequence[int]) -> None:
        """Replace this rank's range by its sum over all ranks of the mesh: first within each copy, then over the copies."""
        self.shard.sum(buffer, cuts)
        if self.replicate is None:
            return
        own = buffer[between(cuts)[self.shard.index]]
        own_cuts = [len(own) * place // self.replicate.size for place in range(self.replicate.size + 1)]
        self.replicate.sum(own, own_cuts)
        self.replicate.gather(own, own_cuts)
