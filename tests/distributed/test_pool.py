"""Ranks meet again after one of them has failed to join a group."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool


def join_nobody(rank: int, folder: str) -> None:
    if rank == 0:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=2, timeout=timedelta(seconds=1)
        )


def size_of_group(rank: int) -> int:
    return dist.get_world_size()


def test_ranks_meet_after_one_has_failed_to_join(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Wait timeout"):
        pool.run(2, join_nobody, str(tmp_path))
    assert pool.run(2, size_of_group) == [2, 2]
