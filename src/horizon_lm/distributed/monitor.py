"""Notice a rank that dies, fails or hangs, and end the others with its name.

Collectives do not notice it: a rank waits half an hour for one that is gone, and then reports neither which one nor why. So each
rank reports every second that it is alive, and how far it is, through a key-value store of the first rank.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from horizon_lm.distributed.mesh import ProcessMesh
from horizon_lm.errors import InterruptedRunError

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 12.0  # without a beat, after which a rank is dead: beats need no lock that the training could hold
_END_SECONDS = 5.0  # for the training to end by itself, once another rank has
_SAME_FAILURE_SECONDS = 2.0  # for the first rank to fail in the same way
_FAILED = "failed"


def leave_failures_to_monitor() -> None:
    """Keep torch from ending this process when NCCL fails or waits long, unless the user wants that; before a group is created.

    When a rank dies, NCCL reports an error to the others within a second, and torch's watchdog aborts them, which names no rank. The
    watchdog's own watchdog aborts them after 8 minutes, earlier than ``rank_timeout``.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


class Monitor:
    """A thread that watches the other ranks of a run.

    Args:
        mesh: the ranks.
        hang_seconds: time for which a rank may be behind the others without going on; None for no limit.
        end: ends this process with an exit code.
    """

    def __init__(self, mesh: ProcessMesh, hang_seconds: float | None, end: Callable[[int], None] = os._exit) -> None:
        self._mesh, self._end = mesh, end
        self._progress = Progress(hang_seconds)
        self.watches_progress = False  # while all ranks do the same, at the same time
        address = os.environ.get("MASTER_ADDR", "localhost")
        port = 0
        if mesh.rank == 0:  # the system chooses a free port
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
        port = mesh.exchange("the port of the monitor", port)[0]
        timeout = timedelta(seconds=_SILENT_SECONDS)
        self._store = dist.TCPStore(address, port, mesh.size, mesh.rank == 0, timeout, wait_for_workers=False)
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}  # the last beat of each rank, and when it came
        self._message = ""
        self._thread = threading.Thread(target=self._run, name="horizon-ranks", daemon=True)
        self._thread.start()

    def stop(self, failure: str = "") -> bool:
        """Stop watching, because this rank has finished or, with a ``failure``, has failed for this reason.

        The other ranks are informed. The first rank, which keeps the store, waits some seconds until they have read it.

        Returns:
            True if the first rank has failed for the same reason, and reports it.
        """
        self._stopped.set()
        self._thread.join(_SILENT_SECONDS)
        is_reported = False
        with suppress(Exception):
            if failure:
                self._store.set(f"{_FAILED}/{self._mesh.rank}", failure)
            if failure and not self._message:
                self._store.set(_FAILED, f"rank {self._mesh.rank} has failed: {failure}")
            is_reported = bool(failure) and self._first_fails_alike(failure)
            self._store.set(f"done/{self._mesh.rank}", "1")
        if self._mesh.rank == 0:  # this process keeps the store, so it waits until the others have read it
            limit = time.monotonic() + _END_SECONDS
            while time.monotonic() < limit and not self._all_done():
                time.sleep(0.05)
        return is_reported

    def _first_fails_alike(self, failure: str) -> bool:
        """Return whether the first rank fails for the same reason within a moment."""
        limit = time.monotonic() + _SAME_FAILURE_SECONDS
        while self._mesh.rank and time.monotonic() < limit:
            if self._store.check([f"{_FAILED}/0"]):
                return self._store.get(f"{_FAILED}/0").decode() == failure
            time.sleep(0.05)
        return False

    def reason(self) -> str:
        """Wait until it is known which rank has ended, and return a message about it: the reason why a collective has failed."""
        limit = time.monotonic() + 2 * _SILENT_SECONDS
        while not self._message and time.monotonic() < limit and self._thread.is_alive():
            time.sleep(0.1)
        return self._message or "another rank has ended"

    def _all_done(self) -> bool:
        """Return whether all ranks have stopped watching."""
        with suppress(Exception):
            return all(self._store.check([f"done/{rank}"]) for rank in range(self._mesh.size))
        return False

    def _run(self) -> None:
        """Send a beat every second, and read the beats of other ranks, until one ends; then end this process, unless it ends by itself."""
        beats = 0
        while not self._stopped.wait(_BEAT_SECONDS):
            beats += 1
            message = self._beat(beats)
            if message and not self._stopped.is_set():
                self._message = message
                with suppress(Exception):
                    self._store.set(_FAILED, message)
                if not self._stopped.wait(_END_SECONDS):
                    with suppress(OSError, ValueError):
                        print(f"error: rank {self._mesh.rank} ends, because {message}", file=sys.stderr, flush=True)
                    self._end(InterruptedRunError.exit_code)
                return

    def _beat(self, number: int) -> str:
        """Report that this rank is alive, and how far. Return a message if another rank has ended, failed or hangs, else nothing."""
        try:
            self._store.set(f"beat/{self._mesh.rank}", json.dumps([number, self._mesh.progress, self._mesh.place]))
            return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else self._find_lost()
        except Exception:  # the store is gone, and with it the first rank
            return "rank 0 has ended, or cannot be reached"

    def _find_lost(self) -> str:
        """Read the beats of the other ranks, and return a message about one that is dead or hangs; empty if all are well."""
        now, progress_of_ranks = time.monotonic(), {}
        for rank in range(self._mesh.size):
            if rank == self._mesh.rank:
                progress_of_ranks[rank] = (self._mesh.progress, self._mesh.place)
                continue
            if self._store.check([f"done/{rank}"]):
                continue
            beat = self._store.get(f"beat/{rank}").decode() if self._store.check([f"beat/{rank}"]) else ""
            last_beat, since = self._seen.get(rank, ("", now))
            if beat != last_beat:
                since = now
            self._seen[rank] = beat, since
            if now - since > _SILENT_SECONDS:
                return f"rank {rank} has died: it has not answered for {_SILENT_SECONDS:.0f} s"
            if beat:
                _, count, place = json.loads(beat)
                progress_of_ranks[rank] = count, place
        is_watching = self.watches_progress and len(progress_of_ranks) == self._mesh.size
        return self._progress.find_hanging(progress_of_ranks if is_watching else {}, now)


class Progress:
    """The progress of all ranks, as one of them sees it.

    Args:
        limit: seconds for which a rank may be behind the others without going on; None for no limit.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._last: dict[int, tuple[int, float]] = {}  # by rank: agreements, and since when it is behind with these

    def find_hanging(self, progress: Mapping[int, tuple[int, str]], now: float) -> str:
        """Return a message about a rank that hangs; empty without one.

        A rank hangs if it is behind the others and its number of agreements does not change. A rank whose number changes may be behind
        at every call: the numbers of other ranks arrive later than this rank's own.

        Args:
            progress: the number of agreements that each rank has reached, and the place of the last one; empty while ranks are not
                watched.
            now: the time in seconds.
        """
        if not progress or self._limit is None:
            self._last.clear()
            return ""
        most = max(count for count, _ in progress.values())
        for rank, (count, place) in progress.items():
            last_count, since = self._last.get(rank, (count, now))
            if count != last_count or count == most:
                since = now
            self._last[rank] = count, since
            if now - since > self._limit:
                return f"rank {rank} hangs: it has been at {place} for {self._limit:.0f} s, and others are further"
        return ""
