"""What each rank takes of its GPU and of the machine, on emulated GPUs of which each rank has another one."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  PEFT imports it, which fails on an emulated GPU
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import init_device_mesh

from horizon_lm.common.resources import limit_cores
from horizon_lm.device.base import Task
from horizon_lm.distributed import collectives, mesh
from horizon_lm.schedule.ops import Stream
from tests.distributed.pool import TIMEOUT, Pool
from tests.distributed.training import Outcome, Training, alone, assert_same, batches_of, build, run, train
from tests.support.adapted_models import trained_with_adapters
from tests.support.emulated_gpu import EmulatedGpu, emulated_gpu
from tests.support.threaded_device import ThreadedDevice

CORES = 16
Use = tuple[Outcome, set[int], int, list[str]]


@contextmanager
def own_gpu(rank: int) -> Iterator[EmulatedGpu]:
    """Context manager: a machine with a GPU for each rank, and with 16 cores."""
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(index=rank) as gpu:
        patch.setitem(mesh.BACKENDS, "cuda", "gloo")
        patch.setattr(collectives, "COLLECTIVE_BYTES", 2**14)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))
        yield gpu
    limit_cores(None)


def on_own_gpu(rank: int, training: Training) -> Use:
    """Train, and return what this rank has used: contexts, threads for updates, and which threads have allocated memory."""
    others = set(threading.enumerate())  # of models before, which have not been collected yet
    with own_gpu(rank) as gpu:
        device_mesh = init_device_mesh(
            "cpu", (training.replicate, training.shard), mesh_dim_names=("replicate", "shard")
        )
        model, optimizer = build(training, device=f"cuda:{rank}", device_mesh=device_mesh, compile=False)
        before = len(gpu.allocations)
        outcome = train(model, optimizer, training, [rank])
        threads = [each.name for each in threading.enumerate() if each not in others]
        updating = sum(name.startswith("horizon-host-") for name in threads) - 1  # and one that waits
        allocating = [name for name, _ in gpu.allocations[before:] if name == "horizon-collective"]
        del model, optimizer
    return outcome, gpu.contexts, updating, allocating


def test_contexts_threads_and_memory_of_each_rank(pool: Pool) -> None:
    """Each rank has one context, on its own GPU, and its share of the cores; collectives allocate nothing in a step."""
    settings = {"activation_checkpoints": "host", "attn_implementation": "sdpa"}
    # Without clipping, because a GPU rounds the norm in another way.
    training = Training(settings=settings, optimizer={"max_grad_norm": None})
    found = pool.run(2, on_own_gpu, training)
    assert_same([outcome for outcome, *_ in found], alone(training), training)
    assert [contexts for _, contexts, *_ in found] == [{0}, {1}]
    assert [num_threads for _, _, num_threads, _ in found] == [CORES // 2 - 4] * 2
    assert [allocating for *_, allocating in found] == [[]] * 2


def locked_with_adapters(rank: int, late: bool) -> int:
    """Return the bytes that a model with adapters has page-locked on this rank."""
    with own_gpu(rank) as gpu:
        device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        model = trained_with_adapters(late, device=f"cuda:{rank}", device_mesh=device_mesh)
        locked = gpu.registered_bytes()
        del model
        gc.collect()
    return locked


def test_adapters_added_later_leave_nothing_locked(pool: Pool) -> None:
    """On each rank, of which the second owns a range in the middle of each slab."""
    early, late = (pool.run(2, locked_with_adapters, late) for late in (False, True))
    assert early == late


def taken_by_sums(rank: int) -> tuple[int, int]:
    """Return the memory that sums still need on a GPU whose ranks are connected, and on one whose ranks are not."""
    with own_gpu(rank):
        made = mesh.ProcessMesh(1, 2, device=torch.device("cuda", rank))
        before = made.reduce.growth_bytes(2**30)
        made.connect()
        return made.reduce.growth_bytes(2**30), before


def test_memory_of_sums_is_taken_before_a_step(pool: Pool) -> None:
    assert pool.run(2, taken_by_sums) == [(0, 2 * 2**14)] * 2


def without_host_tensors(rank: int, training: Training, folder: str) -> Outcome:
    """Train with a default group that, as NCCL's, rejects tensors in host memory."""
    dist.destroy_process_group()
    dist.init_process_group(
        "cuda:fake", init_method=f"file://{folder}/store", rank=rank, world_size=training.world, timeout=TIMEOUT
    )
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    return run(rank, training)


def test_a_default_group_that_rejects_host_tensors(pool: Pool, tmp_path: Path) -> None:
    """Gradients are clipped by their norm, which is summed in host memory."""
    training = Training(optimizer={"max_grad_norm": 0.1})
    outcomes = pool.run(2, without_host_tensors, training, str(tmp_path))
    expected = alone(training)
    assert_same(outcomes, expected, training)
    assert outcomes[0].norms == pytest.approx(expected.norms, rel=1e-6)


class ForeignError(Exception):
    pass


def after_a_fault(rank: int, training: Training) -> Outcome:
    """Train, with an error of foreign code in the second step, while updates are late on one rank."""
    model, optimizer = build(training, device=ThreadedDevice(rank, delay=1e-4))
    device = model._horizon.engine.device
    updates = device._pool(Stream.HOST)
    submit = updates.submit

    def late(task: Task, ready: Any = None, trace: Any = None, urgent: bool = False) -> None:
        submit(task, lambda: (ready() if ready else None, threading.Event().wait(0.2 * rank)), trace, urgent)

    updates.submit = late
    model(**batches_of(training, 0)[rank]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    hook = model.model.layers[0].mlp.register_forward_pre_hook(_fail)
    batch = batches_of(training, 1)[rank]
    with pytest.raises(ForeignError):
        model(**batch)
    hook.remove()
    return train(model, optimizer, replace(training, first=1, steps=1), [rank])


def _fail(*_: Any) -> None:
    raise ForeignError


def test_collectives_that_other_ranks_have_launched_are_not_dropped(pool: Pool) -> None:
    """All ranks fail at the same place, one of them before it has launched what the others have, and go on."""
    training = Training(steps=2)
    outcomes = pool.run(2, after_a_fault, training)
    assert_same(outcomes, alone(training), training)
