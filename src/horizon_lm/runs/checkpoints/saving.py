"""Write a checkpoint in the background, from the slabs in which the model lives.

Nothing is copied: a unit's slabs do not change until its next update, and the schedule lets that update wait for the unit's
file (`schedule.between.save`). Files are written under a temporary name; the folder gets its own name once everything in it
is on disk.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from horizon_lm.common.disk import Disk, Replacement, write_file
from horizon_lm.common.run_folders import MANIFEST, UNITS, is_checkpoint
from horizon_lm.common.units import Unit
from horizon_lm.device.host_threads import DISK_THREADS
from horizon_lm.device.transfers import Link, Move
from horizon_lm.errors import first_line, warn
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.runs.checkpoints.manifest import FileEntry, Manifest, TensorEntry
from horizon_lm.runs.checkpoints.unit_file import UnitFile, hash_file

STATE = "training_state.json"
_POLL_SECONDS = 0.02  # until the other ranks have written their parts
# What a rank hands over to the first one: the entries of its files and of its tensors, and its error; empty if it has none.
_ENTRIES = TypeAdapter(tuple[dict[str, FileEntry], list[TensorEntry], str])


def file_name(slab: str, rank: int, num_ranks: int) -> str:
    """Return the path inside a checkpoint of the file of a slab, given by its name: one for each rank that owns a part of it."""
    return f"{UNITS}/{slab}.safetensors" if num_ranks == 1 else f"{UNITS}/{slab}.rank{rank}.safetensors"


def _entries_file(rank: int) -> str:
    """Return the name of the file by which a rank hands the entries of its files to the first one."""
    return f"rank{rank}.json"


class RateLimit:
    """A limit on the bytes that several threads write per second. None for no limit."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait until these bytes may be written."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + num_bytes / self._rate
        time.sleep(max(0.0, start - now))


@dataclass
class Saving:
    """A checkpoint that is being written.

    Attributes:
        folder: the folder that it will have.
        num_bytes: bytes of all its files, of all ranks, once the first rank has written it; otherwise 0.
        error: the reason why it could not be written; its files are removed, and earlier checkpoints are intact.
        seconds: time from the beginning to the end.
        issue: issues the writing of units that were left to a later pass.
        wait_for_moves: waits until the units are written; on a simulated device, this call writes them.
    """

    folder: Path
    num_bytes: int = 0
    error: BaseException | None = None
    seconds: float = 0.0
    issue: Callable[[], None] = lambda: None
    wait_for_moves: Callable[[], None] = lambda: None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        """True once the checkpoint is on disk, or could not be written."""
        return self._done.is_set()

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint is on disk or could not be written. Return false if the timeout (in seconds) came first."""
        if not self.done:
            self.issue()
        if timeout is None:
            self.wait_for_moves()  # it knows no timeout
        return self._done.wait(timeout)

    def wait(self) -> None:
        """Wait until the checkpoint is on disk, and raise the error if it could not be written."""
        self.wait_until_done()
        if self.error is not None:
            raise self.error


@dataclass
class CheckpointWriter:
    """Writes one checkpoint: units in several threads, then the other files, the manifest, and the folder's name.

    Args:
        folder: the folder to write.
        files: the layout of each slab's file.
        manifest: the manifest, to which files and tensors are added.
        contents: the contents of the other files, by name.
        published: called when the checkpoint is on disk.
        disk: file operations.
        rate_limit: limits the bytes per second.
        rank, num_ranks: the rank of this process, and the number of ranks that write a part of the checkpoint. The first one
            writes the manifest, once the others have handed over what they wrote.
    """

    folder: Path
    files: Mapping[Slab, UnitFile]
    manifest: Manifest
    contents: Mapping[str, bytes]
    published: Callable[[], None]
    disk: Disk
    rate_limit: RateLimit
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        self.saving = Saving(self.folder)
        self._replacement = Replacement(self.disk, self.folder, _is_replaceable)
        self._part = self._replacement.part  # the folder under its temporary name
        self._entries: dict[str, FileEntry] = {}
        self._tensors: dict[Slab, list[TensorEntry]] = {}
        self._num_left, self._num_writing = len(self.files), 0  # files to be written, and threads that write one
        self._changed = threading.Condition()  # held to change either
        self._began = time.perf_counter()

    def prepare(self, add_files: Callable[[Path], None]) -> None:
        """Create the folder under its temporary name, and add files that must be written before the training goes on."""
        try:
            self._replacement.begin()
            self.disk.make_folder(self._part / UNITS)
            add_files(self._part)
        except BaseException as error:
            self.abandon(error)
            self.discard()
            raise

    def end_without_files(self) -> Saving:
        """End a checkpoint of which this process writes nothing."""
        self._end()
        return self.saving

    def moves(self) -> dict[Unit, list[Move]]:
        """Return the moves that write the files of each unit."""
        moves: dict[Unit, list[Move]] = {}
        for slab, file in self.files.items():
            moves.setdefault(slab.unit, []).append(_Write(self._write(slab, file), self._writing))
        return moves

    def write_units(self) -> None:
        """Write all units' files now, while nothing changes them."""
        with ThreadPoolExecutor(DISK_THREADS) as threads:
            for slab, file in self.files.items():
                threads.submit(deque, self._write(slab, file), 0)  # runs the iterator to its end

    def attempt(self, call: Callable[[], None]) -> None:
        """Run a call that issues the moves or waits for them. Its error, such as one of an earlier update, ends the checkpoint."""
        try:
            call()
        except Exception as error:
            self.abandon(error)
            self.discard()

    def abandon(self, error: BaseException) -> None:
        """Mark the checkpoint as failed, unless it was before: the threads stop writing at their next chunk."""
        self.saving.error = self.saving.error or error

    def discard(self) -> None:
        """End an abandoned checkpoint, although some moves have not run, and remove its files."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_writing == 0)
        if not self.saving.done:
            self._end()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context manager: count a thread as writing, until whose end `discard` removes no file."""
        with self._changed:
            self._num_writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_writing -= 1
                self._changed.notify_all()

    def _write(self, slab: Slab, file: UnitFile) -> Iterator[None]:
        """Write a slab's file, a chunk at a time. An error is kept: it must not reach the update that waits for this."""
        try:
            if self.saving.error is None:
                yield from self._write_file(slab, file)
        except Exception as error:
            self.abandon(error)
        with self._changed:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._finish()

    def _write_file(self, slab: Slab, file: UnitFile) -> Iterator[None]:
        """Write and hash a slab's file, chunk by chunk, and add its entries for the manifest; stop once the checkpoint has
        failed. Yield after each chunk, because a simulated device does other work in between (`_Write`).
        """
        name, digest = file_name(slab.name, self.rank, self.num_ranks), xxhash.xxh3_128()
        with self.disk.create(self._part / name, direct=True) as output:
            for chunk in file.chunks():
                if self.saving.error is not None:
                    return
                self.rate_limit.wait(len(chunk))
                output.write(chunk)
                digest.update(chunk)
                yield
        self._entries[name] = FileEntry(file.num_bytes, digest.hexdigest())
        self._tensors[slab] = list(_tensor_entries(name, file))

    def _finish(self) -> None:
        """Publish the checkpoint, unless anything has failed, and end it."""
        try:
            if self.saving.error is None and self.rank == 0:
                self._publish()
            elif self.saving.error is None:
                self._hand_over_entries()
        except Exception as error:
            self.saving.error = error
        self._end()

    def _end(self) -> None:
        """End the checkpoint. Of one that has failed, remove the files."""
        if self.saving.error is not None:
            self._remove_or_report()
        self.saving.seconds = time.perf_counter() - self._began
        self.saving._done.set()

    def _hand_over_entries(self, error: str = "") -> None:
        """Write the entries of this rank's files, or its error, for the first rank, which adds the entries to the manifest."""
        content = _ENTRIES.dump_json((self._entries, self._own_tensors(), error))
        write_file(self.disk, self._part / _entries_file(self.rank), content)

    def _own_tensors(self) -> list[TensorEntry]:
        """Return the entries of the tensors that this rank has written, in the order of the slabs."""
        return [entry for slab in self.files for entry in self._tensors.get(slab, ())]

    def _publish(self) -> None:
        """Write the other files and the manifest, make everything durable, and give the folder its name. Wait for other ranks first."""
        part, disk = self._part, self.disk
        others = self._take_over_entries()
        for name, content in self.contents.items():
            with disk.create(part / name) as output:
                output.write(content)
        for path in sorted(path for path in part.rglob("*") if path.is_file()):
            name = path.relative_to(part).as_posix()
            if name not in self._entries:
                self._entries[name] = FileEntry(path.stat().st_size, hash_file(path))
        manifest = replace(self.manifest, files=self._entries, tensors=self._own_tensors() + others)
        with disk.create(part / MANIFEST) as output:
            output.write(manifest.to_json())
        self.saving.num_bytes = manifest.num_bytes
        self._replacement.publish()
        if self._replacement.kept is not None:
            warn(f"{self.saving.folder} was no checkpoint, and is now {self._replacement.kept}", RuntimeWarning)
        self.published()

    def _take_over_entries(self) -> list[TensorEntry]:
        """Wait until the other ranks have written their parts, and take over their entries (`_hand_over_entries`): add the entries of files
        to this rank's, return the entries of tensors, and remove the files that held both.

        Raises:
            OSError: another rank could not write its part.
        """
        tensors = list[TensorEntry]()
        for rank in range(1, self.num_ranks):
            path = self._part / _entries_file(rank)
            while not path.is_file():
                if self.saving.error is not None:
                    raise self.saving.error
                time.sleep(_POLL_SECONDS)
            files, of_rank, error = _ENTRIES.validate_json(path.read_bytes())
            if error:
                raise OSError(f"rank {rank} could not write its part: {error}")
            self._entries |= files
            tensors += of_rank
            self.disk.remove(path)
        return tensors

    def _remove_or_report(self) -> None:
        """Remove the files of a failed checkpoint on the first rank. Other ranks write their error into a file for it instead."""
        if self.rank:
            with suppress(OSError):
                self._hand_over_entries(first_line(self.saving.error) if self.saving.error else "stopped")
            return
        self._replacement.discard()


@dataclass(frozen=True, slots=True)
class _Write:
    """The writing of one file, as a move, or of some of its chunks, as one of several moves on a simulated device."""

    chunks: Iterator[None]  # writes a chunk at each step; moves of one file share it
    writing: Callable[[], AbstractContextManager[None]]
    most: int | None = None  # chunks that this move writes; None for all that are left
    host_bytes: int = 0  # nothing crosses the link

    def run(self, link: Link) -> None:
        with self.writing():
            deque(islice(self.chunks, self.most), 0)

    def split(self, parts: int) -> list[Move]:
        if self.most is not None:  # it is split already
            return [self]
        return [*(replace(self, most=1) for _ in range(parts)), self]  # this move writes all chunks that are left


def _is_replaceable(old: Path) -> bool:
    """Return whether a file or folder that has the name of a checkpoint may be deleted: another checkpoint, or nothing."""
    return old.is_dir() and (is_checkpoint(old) or not any(old.iterdir()))


def _tensor_entries(name: str, file: UnitFile) -> Iterable[TensorEntry]:
    """Yield the manifest's entries for the tensors of a file, with hashes of their bytes in memory. A part has its place in the whole."""
    for tensor, entry in file.entries.items():
        part, digest = entry.part, xxhash.xxh3_64_hexdigest(entry.memory)
        shape = part.whole or part.shape
        yield TensorEntry(
            file=name, tensor=tensor, start=part.first, length=part.numel, dtype=entry.dtype, shape=shape, offset=entry.start,
            xxh3_64=digest,
        )  # fmt: skip
