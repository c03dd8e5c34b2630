"""Build batches with images in threads before they are asked for, so that a run does not wait while images are decoded."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from horizon_lm.common.constants import BATCHES_AHEAD
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.token_dataset import TokenTable


class BatchesAhead:
    """A context manager that builds numbered batches, those after the one that is asked for in threads, if their rows have images.

    Threads, not processes: decoding an image does not hold the interpreter, and a forked process would keep a copy of each weight that
    an update changes. On exit, it waits for the batches that are being built; no thread remains.

    Args:
        build: function from a number to its batch, which may be called in several threads at once.
        end: the number after the last one.
        rows: the rows of the batches.
    """

    def __init__(self, build: Callable[[int], Batch], end: int, rows: TokenTable) -> None:
        self._build, self._end, self._num_ahead = build, end, BATCHES_AHEAD if rows.has_images else 0
        self._threads = ThreadPoolExecutor(BATCHES_AHEAD, "horizon-images")  # starts none before it has work
        self._pending: dict[int, Future[Batch]] = {}

    def __enter__(self) -> "BatchesAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._pending.clear()  # a run may export its model before this object is freed

    def batch(self, number: int) -> Batch:
        """Return the batch of a number, and begin to build the next ones; raise the error with which it could not be built."""
        if not self._num_ahead:
            return self._build(number)
        wanted = range(number, min(number + 1 + self._num_ahead, self._end))
        # Batches that nobody asked for are dropped, so that no more are held.
        self._pending = {each: self._pending.get(each) or self._threads.submit(self._build, each) for each in wanted}
        return self._pending.pop(number).result()
