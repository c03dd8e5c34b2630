"""Sums of gradients over machines: the order of the ranks, and a network that carries them once."""

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from horizon_lm.distributed.collectives import Group, Reduce
from horizon_lm.distributed.mesh import ProcessMesh
from horizon_lm.memory.layout.ranks import Shard
from tests.distributed.pool import Pool
from tests.support.thinned_cases import thinned


def gradients(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return values whose sum depends on its order."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(10.0 ** (rank % 3 * 3)).to(dtype)


def summed(
    rank: int, local: int, shape: tuple[int, ...], dtype: torch.dtype, at_once: int
) -> tuple[torch.Tensor, int, dict[int, int]]:
    """Return this rank's range of the sum, the bytes that it is said to receive, and those that each rank has sent to it."""
    from horizon_lm.distributed import collectives

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    before, original = collectives.COLLECTIVE_BYTES, Group._exchange
    num_bytes: dict[int, int] = {}

    def exchange(self: Any, sent: Any, received: Any) -> None:
        for place, parts in received.items():
            if place != self._index:
                num_bytes[place] = num_bytes.get(place, 0) + sum(part.nbytes for part in parts)
        original(self, sent, received)

    collectives.COLLECTIVE_BYTES, Group._exchange = at_once, exchange  # type: ignore[method-assign]
    try:
        mesh = ProcessMesh(1, dist.get_world_size())
        buffer = gradients(rank, shape, dtype)
        cuts = Shard(rank, mesh.size).cuts(shape[0], 4)
        move = Reduce(mesh.reduce, buffer, cuts)
        mesh.reduce.sum(buffer, cuts)
        return buffer[cuts[rank] : cuts[rank + 1]].clone(), move.host_bytes, num_bytes
    finally:
        collectives.COLLECTIVE_BYTES, Group._exchange = before, original  # type: ignore[method-assign]
        del os.environ["LOCAL_WORLD_SIZE"]


SIZES = [((64,), 2**20), ((103,), 96), ((37, 5), 400), ((3,), 2**20)]  # of a tensor, and the most that is sent at once


@pytest.mark.parametrize(
    ("local", "shape", "at_once", "dtype"),
    thinned(
        (local, *sizes, dtype)
        for local, sizes, dtype in itertools.product((1, 2, 4), SIZES, (torch.float32, torch.bfloat16))
    ),
)
def test_sums_have_the_order_of_the_ranks(
    pool: Pool, local: int, shape: tuple[int, ...], at_once: int, dtype: torch.dtype
) -> None:
    """On one machine of four ranks, on two of two, and on four; in one piece, and in several; empty ranges, too."""
    parts = [each for each, _, _ in pool.run(4, summed, local, shape, dtype, at_once)]
    total = gradients(0, shape, dtype).float()
    for rank in range(1, 4):
        total += gradients(rank, shape, dtype).float()
    assert torch.equal(torch.cat(parts), total.to(dtype))
    if shape[0] > 60 and dtype == torch.float32:
        other = sum(gradients(rank, shape, dtype) for rank in (3, 2, 1, 0))
        assert not torch.equal(other, total)


def test_bytes_between_machines(pool: Pool) -> None:
    """Two machines of two ranks: a partial sum in float32 goes on to the second one, and half of the sum comes back."""
    numel = 256
    found = pool.run(4, summed, 2, (numel,), torch.bfloat16, 2**20)
    across = {
        rank: sum(n for place, n in got.items() if place // 2 != rank // 2) for rank, (_, _, got) in enumerate(found)
    }
    assert across[0] + across[1] == numel // 2 * 2
    assert across[2] + across[3] == numel * 4
    for _, said, got in found:
        assert said == sum(got.values())
    direct = pool.run(4, summed, 4, (numel,), torch.bfloat16, 2**20)
    assert all(said == sum(got.values()) == 3 * numel // 4 * 2 for _, said, got in direct)
