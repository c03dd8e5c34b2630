"""Join the processes of a run that torchrun has started, or has started again."""

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PORT = "horizon_lm/port"
_SECONDS = 300.0  # until all processes must have joined, as in torch.distributed
_ATTEMPT_SECONDS = 5.0


def init_process_group(backend: str) -> None:
    """Initialise torch.distributed from the environment.

    torchrun keeps one store for all restarts (pytorch issue 135712), in which the addresses of dead processes would be found. So the
    first rank opens a new store, and only its port is exchanged through torchrun's.

    Args:
        backend: backends by device, as in torch.distributed.

    Raises:
        DistError: not all processes have joined in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=_own_store(rank, world), rank=rank, world_size=world)


def _own_store(rank: int, world: int) -> dist.TCPStore:
    """Return the store of this start of the processes."""
    host, limit = os.environ["MASTER_ADDR"], time.monotonic() + _SECONDS
    common = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=_SECONDS))
    options: dict[str, Any] = {"world_size": world, "wait_for_workers": False}
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=_SECONDS), **options)
        common.set(_PORT, str(store.port))
        return store
    while True:
        port = int(common.get(_PORT))
        try:
            store = dist.TCPStore(host, port, timeout=timedelta(seconds=_ATTEMPT_SECONDS), **options)
        except dist.DistError:  # the port of a process that has ended
            if time.monotonic() > limit:
                raise
            continue
        store.set_timeout(timedelta(seconds=_SECONDS))
        return store
