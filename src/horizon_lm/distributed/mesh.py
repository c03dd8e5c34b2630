"""The mesh of a training: which ranks share a copy of the model, and which have copies of the same range."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horizon_lm.distributed.collectives import Group, ReduceGroups
from horizon_lm.distributed.cores import divide_cores
from horizon_lm.distributed.lost import noticing_lost_ranks
from horizon_lm.errors import ConfigError, DisagreementError
from horizon_lm.memory.layout.ranks import WHOLE, Shard

REPLICATE, SHARD = "replicate", "shard"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # of the groups between devices, whatever the default group's backend can do


class Mesh:
    """The ranks of a training as a grid of copies of the model (``replicate``) and of ranges of each copy (``shard``).

    This is the mesh of a single process, with which nothing is exchanged. Of several processes, it is a `ProcessMesh`.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        shard: the range of this rank.
        reduce: the groups that sum gradients; of several ranks alone.
        gather: the group that gathers units: the one that sums gradients within a copy of the model; of several ranks alone.
    """

    rank, size, shard = 0, 1, WHOLE
    gather: Group
    reduce: ReduceGroups

    # Agreements between all ranks, in host memory. All ranks must reach each at the same place of the program.

    def exchange(self, place: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order.

        Args:
            place: a text for the place of the program.
            value: plain data.

        Raises:
            DisagreementError: another rank is at another place. It is raised on all ranks.
        """
        return [value]

    def require_same(self, place: str, details: str) -> None:
        """Raise DisagreementError on all ranks if they are not at the same place of the program, with the same details."""

    def union(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sorted union (R,) of the distinct and sorted rows of all ranks."""
        return rows

    def sums(self, place: str, values: Sequence[float]) -> list[float]:
        """Return the sum of each of some numbers over the ranks that share a copy of the model."""
        return list(values)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give a tensor in host memory the values that it has on a rank. Each rank has it in the same shape."""

    def broadcast_text(self, text: str) -> str:
        """Return the text of the first rank."""
        return text

    def transfer(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Copy a tensor in host memory from one rank to another. Only these two call this."""

    def growth_bytes(self, largest: int) -> int:
        """Return the device memory that sums may still take, if the largest buffer of gradients has ``largest`` bytes."""
        return 0


ALONE = Mesh()  # of every single process: it has no state


class ProcessMesh(Mesh):
    """The mesh of several processes of torch.distributed.

    All ranks must create it, in the same order as other meshes. Ranks of a shard group are neighbours, so that a group lies
    within a machine if its size divides the number of devices there.

    Args:
        replicate: number of copies of the model.
        shard: number of ranges of each copy.
        timeout: time that a rank waits for others in a collective; None for that of torch.distributed.
        device: the device of this rank, on which units are gathered and gradients summed; None for host memory.

    Attributes:
        control: the group of all ranks that agree on something in host memory.
        progress, place: number of agreements that this rank has reached, and the place of the last one.
    """

    def __init__(
        self, replicate: int, shard: int, timeout: timedelta | None = None, device: torch.device | None = None
    ) -> None:
        self._timeout, self._device = timeout, device or torch.device("cpu")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if replicate * shard != self.size:
            raise ConfigError(
                f"a mesh of {replicate} x {shard} needs {replicate * shard} processes, but there are {self.size}"
            )
        self.progress, self.place = 0, "the start"
        self.shard = Shard(self.rank % shard, shard)
        # Every process must create all groups, also those that it is not in.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        spans_machines = shard > local_size and shard % local_size == 0  # a copy of the model does
        ranks_of_copies = [list(range(first, first + shard)) for first in range(0, self.size, shard)]
        ranks_of_ranges = [list(range(first, self.size, shard)) for first in range(shard)] if replicate > 1 else []
        self.gather = self._group_of(ranks_of_copies, local_size if spans_machines else None)
        self.reduce = ReduceGroups(self.gather, self._group_of(ranks_of_ranges) if ranks_of_ranges else None)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        divide_cores(self.rank, self.exchange, self._device)

    def _group_of(self, partition: Iterable[Sequence[int]], of_machine: int | None = None) -> Group:
        """Create a process group for each part of a partition of the ranks, and return the group that this rank is in."""
        backend = BACKENDS[self._device.type]
        groups = [(ranks, dist.new_group(list(ranks), self._timeout, backend)) for ranks in partition]
        own_ranks, own_group = next((ranks, group) for ranks, group in groups if self.rank in ranks)
        return Group(own_group, own_ranks, self.rank, of_machine)

    def connect(self) -> None:
        """Let NCCL connect the ranks, before other buffers fill the device, and allocate what collectives need.

        NCCL connects two ranks when they first exchange something, in a way that depends on its size, and takes up to gigabytes
        outside of torch's allocator. So each collective runs once, with messages as large as those of a step.
        """
        if self._device.type == "cpu":
            return
        with torch.cuda.device(self._device):
            for group in filter(None, (self.reduce.shard, self.reduce.replicate)):
                group.warm_up(self._device)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def exchange(self, place: str, value: Any) -> list[Any]:
        return [json.loads(data) for data in self._collect(place, json.dumps(value).encode())]

    def require_same(self, place: str, details: str) -> None:
        self._require_equal([f"{place}, {each}" for each in self.exchange(place, details)])

    def union(self, rows: torch.Tensor) -> torch.Tensor:
        found = self._collect("the lookup of tokens", rows.numpy().astype(np.int64).tobytes())
        return torch.from_numpy(np.unique(np.concatenate([np.frombuffer(each, np.int64) for each in found])))

    def sums(self, place: str, values: Sequence[float]) -> list[float]:
        first = self.rank - self.shard.index
        of_copy = self.exchange(place, list(values))[first : first + self.shard.count]
        return [sum(column) for column in zip(*of_copy, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        with noticing_lost_ranks():
            dist.broadcast(tensor, source, group=self.control)

    def broadcast_text(self, text: str) -> str:
        # A zero byte is added, and cut off at the end, because `frombuffer` takes no empty buffer.
        data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self.broadcast(size, 0)
        if self.rank > 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data, 0)
        return data.numpy().tobytes()[:-1].decode()

    def transfer(self, tensor: torch.Tensor, source: int, target: int) -> None:
        with noticing_lost_ranks():
            if self.rank == source:
                dist.send(tensor, target, group=self.control)
            else:
                dist.recv(tensor, source, group=self.control)

    def growth_bytes(self, largest: int) -> int:
        return self.reduce.growth_bytes(largest)

    def _collect(self, place: str, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order.

        A rank sends the name of the place and its data in one message, padded to the length of the longest, because a collective needs
        messages of equal length.
        """
        self.progress, self.place = self.progress + 1, place
        name = place.encode()
        own_sizes = torch.tensor([len(name), len(data)])
        sizes = torch.empty((self.size, 2), dtype=torch.int64)
        with noticing_lost_ranks():
            dist.all_gather(list(sizes), own_sizes, group=self.control)
            longest = int(sizes.sum(1).max())
            own = torch.frombuffer(bytearray(name + data + bytes(longest - len(name) - len(data))), dtype=torch.uint8)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, own, group=self.control)
        everyone = [part.numpy().tobytes() for part in parts]
        messages = list(zip(everyone, sizes.tolist(), strict=True))
        self._require_equal([message[:name_length].decode() for message, (name_length, _) in messages])
        return [message[name_length : name_length + length] for message, (name_length, length) in messages]

    def _require_equal(self, places: Sequence[str]) -> None:
        """Raise DisagreementError unless the places of all ranks are equal."""
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is not None:
            raise DisagreementError(
                f"rank 0 and rank {other} are not at the same place of the program: rank 0 is at {places[0]}; rank {other} is "
                f"at {places[other]}. All ranks must call the model equally often, in the same mode, and train the same weights."
            )


@contextmanager
def fail_together(mesh: Mesh, place: str) -> Iterator[None]:
    """Context manager: if this raises ConfigError or OSError on any rank, raise an error on all ranks.

    Args:
        mesh: the mesh.
        place: a text for the place of the program.
    """
    own_error: ConfigError | OSError | None = None
    try:
        yield
    except (ConfigError, OSError) as error:
        own_error = error
    texts = mesh.exchange(place, str(own_error or ""))
    if own_error is not None:
        raise own_error
    if first := next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), None):
        raise ConfigError(first)


def find_mesh(device_mesh: Any = None, device: torch.device | None = None) -> Mesh:
    """Return the mesh of the processes that torch.distributed has started.

    Args:
        device_mesh: a DeviceMesh with the dimensions ``replicate`` and ``shard``, or ``shard`` alone; None to shard within each
            machine, and to replicate over the machines. A `Mesh` is returned as it is.
        device: the device of this rank; None for host memory.

    Raises:
        ConfigError: the processes were started but torch.distributed was not initialised, or the mesh has other dimensions.
    """
    if isinstance(device_mesh, ProcessMesh):
        return device_mesh
    if isinstance(device_mesh, Mesh):  # `ALONE`: the process may have joined others since, so their mesh is looked for
        device_mesh = None
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            raise ConfigError(
                "this process is one of several (WORLD_SIZE), but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before the model is streamed"
            )
        return ALONE
    replicate, shard = _default_sizes() if device_mesh is None else _sizes_of(device_mesh)
    if replicate * shard == 1:
        return ALONE
    mesh = ProcessMesh(replicate, shard, device=device)
    mesh.connect()
    return mesh


def _default_sizes() -> tuple[int, int]:
    """Return the number of copies of the model and of ranges of each: one copy on each machine, if machines are alike."""
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    shard = local if world % local == 0 else world
    return world // shard, shard


def _sizes_of(device_mesh: Any) -> tuple[int, int]:
    """Return the number of copies of the model, and of ranges of each, of a DeviceMesh. Raise ConfigError for other dimensions."""
    names = tuple(device_mesh.mesh_dim_names or ())
    if names not in ((SHARD,), (REPLICATE, SHARD)) or device_mesh.mesh.numel() != dist.get_world_size():
        raise ConfigError(
            f"device_mesh has the dimensions {names}; create it with init_device_mesh(..., mesh_dim_names=('replicate', "
            "'shard')), over all processes"
        )
    sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
    return sizes.get(REPLICATE, 1), sizes[SHARD]
