"""Join the processes of a run, which torchrun or something else has started, or has started again."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError, HorizonError

_PORT = "horizon_lm/port"
_SECONDS = 300.0  # until all processes must have joined, as in torch.distributed
_CONNECT_SECONDS = 60.0  # to reach the store of torchrun, which is there before the processes
_ATTEMPT_SECONDS = 5.0
_LINGER_SECONDS = 60.0  # for the others to start, and to see that this process has failed; the store may end with it
_SAME_ERROR_SECONDS = 3.0  # for the first rank to fail in the same way
_POLL_SECONDS = 0.1
_LAST_SECONDS = 0.5  # before a process ends, and perhaps the store with it: time for others to read it


def init_process_group(backend: str) -> None:
    """Initialise torch.distributed from the environment.

    Args:
        backend: backends by device, as in torch.distributed.

    Raises:
        DistError: not all processes have joined in time.
    """
    store = _store_of_start()
    if store is None:
        dist.init_process_group(backend)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world)


@contextmanager
def failing_together() -> Iterator[None]:
    """Context manager: do what comes before a process joins the others. If it fails, the failure is announced and ends the others, too.

    The first process of each machine reports its error, and the others theirs, unless it is the same
    (`HorizonError.is_reported`).
    """
    try:
        yield
    except HorizonError as error:
        with suppress(dist.DistError):  # a store that is gone
            if store := _store_of_start():
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
        if store := _store_of_start():
            _wait_for_all(store)
    except dist.DistError as error:
        raise ConfigError(
            f"the first process cannot be reached at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; it has probably "
            "failed: see the output of the other machines"
        ) from error


def _wait_for_all(store: dist.TCPStore) -> None:
    """Wait until all processes of the run have started; raise ConfigError if one has failed, or some are missing."""
    world, limit = int(os.environ["WORLD_SIZE"]), time.monotonic() + _SECONDS
    store.add("joining", 1)
    while True:
        # Adding 0 reads the number. It is read before "failed", because a failing process writes that before it is counted.
        started = store.add("joining", 0)
        if store.check(["failed"]):
            rank, _, text = store.get("failed").decode().partition(" ")
            time.sleep(_LAST_SECONDS if os.environ["RANK"] == "0" else 0)
            raise ConfigError(f"rank {rank} has failed: {text}")
        if started >= world:
            return
        if time.monotonic() > limit:
            raise ConfigError(f"only {started} of {world} processes have started within {_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def _announce(store: dist.TCPStore, text: str) -> bool:
    """Announce that this process has failed, and return whether the first process reports the same error.

    Wait until all processes have started, so that they see the failure, and then a moment for the error of the first process.
    """
    rank, begun = os.environ["RANK"], time.monotonic()
    store.set(f"failed/{rank}", text)
    store.compare_set("failed", "", f"{rank} {text}")  # unless another process has failed before
    store.add("joining", 1)
    while time.monotonic() < begun + _LINGER_SECONDS and store.add("joining", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(_POLL_SECONDS)
    limit = time.monotonic() + _SAME_ERROR_SECONDS
    while rank != "0" and time.monotonic() < limit:
        if store.check(["failed/0"]):
            return store.get("failed/0").decode() == text
        time.sleep(_POLL_SECONDS)
    time.sleep(_LAST_SECONDS)  # the first process, whose store this may be, lets others read it
    return False


def _store_of_start() -> dist.TCPStore | None:
    """Return the key-value store of this start of the processes, which the first process keeps; None for a single process."""
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    address, port, is_first = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _new_store(address, port, is_first)
    return _open_store(address, port, is_first, _SECONDS)


@cache
def _new_store(address: str, port: int, is_first: bool) -> dist.TCPStore:
    """Return a new store, whose port is exchanged through that of torchrun.

    torchrun keeps one store for all restarts (pytorch issue 135712), in which the addresses of dead processes would be found.
    """
    common, limit = _open_store(address, port, False, _CONNECT_SECONDS), time.monotonic() + _SECONDS
    if is_first:
        store = _open_store(address, 0, True, _SECONDS)
        common.set(_PORT, str(store.port))
        return store
    while True:
        try:
            return _open_store(address, int(common.get(_PORT)), False, _ATTEMPT_SECONDS)
        except dist.DistError:  # the port of a process that has ended
            if time.monotonic() > limit:
                raise


@cache
def _open_store(address: str, port: int, is_server: bool, seconds: float) -> dist.TCPStore:
    """Create the store in this process if it is the server, else connect to it within some seconds. Return the store."""
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
