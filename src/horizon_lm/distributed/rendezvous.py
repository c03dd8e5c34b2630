"""Join the processes of a run that torchrun has started, or has started again."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from horizon_lm.errors import ConfigError, HorizonError
from horizon_lm.visible import visible

_PORT = "horizon_lm/port"
_SECONDS = 300.0  # until all processes must have joined, as in torch.distributed
_CONNECT_SECONDS = 60.0  # to reach the store of torchrun, which is there before the processes
_ATTEMPT_SECONDS = 5.0
_LINGER_SECONDS = 60.0  # for the others to start, and to see that this process has failed; the store may end with it
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
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    common = _common_store()
    if common is None:
        dist.init_process_group(backend)
        return
    store = _own_store(common, rank, world) if _is_kept_by_torchrun() else dist.PrefixStore("horizon_lm/group", common)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


@contextmanager
def failing_together() -> Iterator[None]:
    """Context manager of what each process does before it joins the others: a process that fails ends them, too.

    The first process of each machine reports its error, and the others theirs, unless it is the same
    (`HorizonError.is_reported`).
    """
    try:
        yield
    except HorizonError as error:
        with suppress(dist.DistError):  # a store that is gone
            if store := _common_store():
                if is_first_of_machine():  # at once, because torchrun may end this process as soon as others know
                    with suppress(OSError, ValueError):
                        print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
                    error.is_reported = True
                error.is_reported |= _announce(store, f"{error}")
        raise


def is_first_of_machine() -> bool:
    """Return whether this is the first process of its machine, which reports what all of them find."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_others() -> None:
    """Wait until all processes of the run are about to join.

    Raises:
        ConfigError: one of them has failed before, cannot be reached, or has not started in time.
    """
    try:
        if store := _common_store():
            _wait(store)
    except dist.DistError as error:
        raise ConfigError(
            f"the first process cannot be reached at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; it has probably "
            "failed: see the output of the other machines"
        ) from error


def _wait(store: dist.TCPStore) -> None:
    world, limit = int(os.environ["WORLD_SIZE"]), time.monotonic() + _SECONDS
    store.add(_key("joining"), 1)
    while True:
        started = store.add(
            _key("joining"), 0
        )  # looked at first: a process that fails announces that before it is counted
        if store.check([_key("failed")]):
            rank, _, text = store.get(_key("failed")).decode().partition(" ")
            raise ConfigError(f"rank {rank} has failed: {text}")
        if started >= world:
            return
        if time.monotonic() > limit:
            raise ConfigError(f"only {started} of {world} processes have started within {_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def _announce(store: dist.TCPStore, text: str) -> bool:
    """Announce that this process has failed, and wait for the others to see it. Return whether the first one reports the same."""
    rank, begun = os.environ["RANK"], time.monotonic()
    store.set(_key(f"failed/{rank}"), text)
    store.compare_set(_key("failed"), "", f"{rank} {text}")
    store.add(_key("joining"), 1)
    while time.monotonic() < begun + _LINGER_SECONDS and store.add(_key("joining"), 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(_POLL_SECONDS)
    limit = time.monotonic() + _SAME_ERROR_SECONDS
    while rank != "0" and time.monotonic() < limit:
        if store.check([_key("failed/0")]):
            return store.get(_key("failed/0")).decode() == text
        time.sleep(_POLL_SECONDS)
    time.sleep(5 * _POLL_SECONDS)  # others look once in a while
    return False


def _key(name: str) -> str:
    return f"horizon_lm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _is_kept_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _common_store() -> dist.TCPStore | None:
    """Return the store of torchrun, or one that the first process keeps. Return None for a single process."""
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    is_ours = not _is_kept_by_torchrun()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _connect(address, port, is_ours and os.environ["RANK"] == "0", _SECONDS if is_ours else _CONNECT_SECONDS)


@cache
def _connect(address: str, port: int, is_server: bool, seconds: float) -> dist.TCPStore:
    store = dist.TCPStore(
        address,
        port,
        is_master=is_server,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set_timeout(timedelta(seconds=_SECONDS))
    return store


def _own_store(common: dist.TCPStore, rank: int, world: int) -> dist.TCPStore:
    """Return the store of this start of the processes. Its port is exchanged through the common one."""
    host, limit = os.environ["MASTER_ADDR"], time.monotonic() + _SECONDS
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
