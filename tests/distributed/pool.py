"""A pool of processes that run functions as the ranks of a training, connected by gloo."""

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher

from tests.support.forks import context

LIMIT = 240  # seconds of a job, below the suite's own limit: a test that it ends would leave its job in the queues
TIMEOUT = timedelta(seconds=LIMIT)  # of gloo, so that a machine that stops for a minute fails nothing


class Pool:
    """Processes that stay, because importing everything takes seconds.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._start()

    def _start(self) -> None:
        self._results: Any = context.Queue()
        self._jobs: list[Any] = [context.Queue() for _ in range(self._size)]
        self._compiling = context.RLock()  # kept until all processes have it
        self._processes = [
            context.Process(target=_work, args=(rank, jobs, self._results, self._compiling), daemon=True)
            for rank, jobs in enumerate(self._jobs)
        ]
        for process in self._processes:
            process.start()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a module as each of ``world`` ranks. Return the results in the order of the ranks.

        Raises:
            RuntimeError: the function has failed on a rank; the message has all tracebacks.
        """
        with tempfile.TemporaryDirectory() as folder:
            for jobs in self._jobs[:world]:
                jobs.put((f"{folder}/store", world, function, args))
            found, limit = {}, time.monotonic() + LIMIT
            while len(found) < world and time.monotonic() < limit:
                with suppress(queue.Empty):
                    rank, result = self._results.get(timeout=1)
                    found[rank] = result
                    if result[0]:  # the others may wait for this rank
                        limit = min(limit, time.monotonic() + 10)
        found |= {rank: ("it has not ended", None) for rank in range(world) if rank not in found}
        failed = {rank: text for rank, (text, _) in found.items() if text}
        if failed:  # a rank may never end, and torch counts the groups that a rank failed to join as joined
            self.close()
            self._start()
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [found[rank][1] for rank in range(world)]

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _work(rank: int, jobs: Any, results: Any, compiling: Any) -> None:
    os.environ.pop("WORLD_SIZE", None)
    torch.set_num_threads(1)
    _compile_in_turn(compiling)
    while (job := jobs.get()) is not None:
        path, world, function, args = job
        os.environ.pop("LOCAL_WORLD_SIZE", None)  # of another job
        try:
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=TIMEOUT)
            # A rank that ends at once would close its connections while others still connect to it.
            dist.barrier()
            results.put((rank, ("", function(rank, *args))))
        except BaseException:
            results.put((rank, (traceback.format_exc(), None)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _compile_in_turn(lock: Any) -> None:
    """Let one process at a time compile kernels, so that the others find them on disk."""
    compile_kernel = Dispatcher.compile

    def in_turn(kernel: Any, signature: Any) -> Any:
        with lock:
            return compile_kernel(kernel, signature)

    Dispatcher.compile = in_turn
