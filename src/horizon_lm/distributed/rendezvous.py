"""Join the processes of a run that torchrun has started, or has started again."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from horizon_lm.errors import ConfigError, HorizonError

_PORT = "horizon_lm/port"
_SECONDS = 300.0  # until all processes must have joined, as in torch.distributed
_ATTEMPT_SECONDS = 5.0
_SAME_ERROR_SECONDS = 3.0  # for the first rank to fail in the same way
_POLL_SECONDS = 0.1


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


@contextmanager
def failing_together() -> Iterator[None]:
    """Context manager of what each process does before it joins the others: a process that fails ends them, too.

    If the first process fails in the same way, it alone reports the error (`HorizonError.is_reported`).
    """
    try:
        yield
    except HorizonError as error:
        with suppress(dist.DistError):  # a store that is gone
            if store := _common_store():
                error.is_reported = _announce(store, f"{error}")
        raise


def wait_for_others() -> None:
    """Wait until all processes that torchrun has started are about to join.

    Raises:
        ConfigError: one of them has failed before.
    """
    store = _common_store()
    if store is None:
        return
    store.add(_key("joining"), 1)
    limit = time.monotonic() + _SECONDS
    while time.monotonic() < limit and store.add(_key("joining"), 0) < int(os.environ["WORLD_SIZE"]):
        if store.check([_key("failed")]):
            rank, _, text = store.get(_key("failed")).decode().partition(" ")
            raise ConfigError(f"rank {rank} has failed: {text}")
        time.sleep(_POLL_SECONDS)


def _announce(store: dist.TCPStore, text: str) -> bool:
    """Announce that this process has failed. Return whether the first one reports the same."""
    rank = os.environ["RANK"]
    store.set(_key(f"failed/{rank}"), text)
    store.compare_set(_key("failed"), "", f"{rank} {text}")
    limit = time.monotonic() + _SAME_ERROR_SECONDS
    while rank != "0" and time.monotonic() < limit:
        if store.check([_key("failed/0")]):
            return store.get(_key("failed/0")).decode() == text
        time.sleep(_POLL_SECONDS)
    return False


def _key(name: str) -> str:
    return f"horizon_lm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _common_store() -> dist.TCPStore | None:
    """Return the store of torchrun; None if something else has started this process."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, timeout=timedelta(seconds=_SECONDS))


def _own_store(rank: int, world: int) -> dist.TCPStore:
    """Return the store of this start of the processes."""
    host, limit = os.environ["MASTER_ADDR"], time.monotonic() + _SECONDS
    common = _common_store()
    assert common is not None
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
