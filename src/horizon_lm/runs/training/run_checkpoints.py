"""The checkpoints of a run: written in the background, and the oldest deleted once a newer one is on disk."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import Disk, delete_folder, delete_parts
from horizon_lm.common.quantities import format_bytes, format_seconds
from horizon_lm.common.run_folders import checkpoints_in, is_checkpoint
from horizon_lm.errors import ConfigError, StreamingError, first_line
from horizon_lm.runs.checkpoints.checkpoint import restore
from horizon_lm.runs.checkpoints.manifest import verify_copies
from horizon_lm.runs.checkpoints.saving import RateLimit, Saving
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.run_state import ResumePoint, reading


class RunCheckpoints:
    """Writes and deletes the checkpoints in a run's folder.

    Args:
        config: settings of the run.
        folder: the run's folder.
        print_fn: prints a line of progress.
        model: the model.
        write: `save_checkpoint` with all that is saved but the state of the run.
        point: the checkpoint that the run goes on from; None for a new run.
        ranks: the ranks that write each checkpoint together. The first one decides, prints and deletes.
        disk: file operations, for tests.
    """

    def __init__(
        self, config: RunConfig, folder: Path, print_fn: Callable[[str], None], model: Any, write: Callable[..., Saving],
        point: ResumePoint | None, ranks: Ranks | None = None, disk: Disk | None = None,
    ) -> None:  # fmt: skip
        self._ranks = ranks or Ranks()
        self._folder, self._print, self._disk = folder, print_fn, disk or Disk()
        self._model, self._write = model, partial(write, disk=self._disk)
        self._limit, self._rate_limit = config.save_total_limit, RateLimit(config.save_bandwidth)
        self._replaced: list[Path] = []  # checkpoints of an overwritten run; deleted once this one has its first
        self._kept = self._take_over(point, config.overwrite_output_dir)
        self._running: tuple[int, Saving] | None = None
        self._seconds: float | None = None  # that the last checkpoint took
        self.elsewhere: Path | None = None  # the newest checkpoint outside of the run's folder
        # Kept whatever the limit is.
        self.best = self._best_of(point) if point is not None and config.load_best_model_at_end else None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint on disk."""
        return self.elsewhere or (self._kept[-1] if self._kept else None)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._folder / f"checkpoint-{step}"

    def _take_over(self, point: ResumePoint | None, overwrites: bool) -> list[Path]:
        """Return the folder's checkpoints up to ``point``, rename all others, and delete unfinished ones; on the first rank only.

        A checkpoint of a later step, or of another run, would be taken for this run's when it is resumed.
        """
        if not self._ranks.is_first:
            return []
        delete_parts(self._disk, self._folder, "checkpoint-*")  # of an interrupted run
        last_step = -1  # of a checkpoint that belongs to this run
        if point is not None and point.folder.resolve().parent == self._folder.resolve():
            last_step = point.step
        kept = []
        for path in checkpoints_in(self._folder):
            if int(path.name.removeprefix("checkpoint-")) <= last_step:
                kept.append(path)
            else:
                aside = self._set_aside(path)
                self._replaced += [aside] if overwrites else []
        return kept

    def _set_aside(self, path: Path) -> Path:
        aside = self._disk.set_aside(path)
        self._print(f"{path} is of another run, or damaged, and is now {aside.name}")
        return aside

    def _best_of(self, point: ResumePoint) -> Path | None:
        """Return the best checkpoint of a run that goes on; None if there is none yet, or if it was removed."""
        with reading(point):
            step = point.state["best"]["step"]
        if not step:  # there was no evaluation yet
            return None
        best = point.folder.with_name(f"checkpoint-{step}")
        if is_checkpoint(best):
            return best
        self._print(f"resume: warning: {best}, the best one so far, is missing")
        return None

    def save(self, step: int, state: Mapping[str, Any], best: bool = False) -> None:
        """Begin to write the checkpoint of a step, unless it is written already. First wait until the one before is on disk."""
        self.wait()
        try:
            target = self._claim_folder(step)
            if target is None:
                self.best = self.path(step) if best else self.best
                return
            published = partial(self._record_and_prune, target, is_best=best)
            saving = self._write(target, state=state, published=published, wait=False, rate_limit=self._rate_limit)
            self._running = step, saving  # whose end or failure `report` prints
        except Exception as error:  # of the disk, or of a tokenizer's writer
            self._report_failure(step, error)

    def save_and_wait(self, step: int, state: Mapping[str, Any], elsewhere: Path | None) -> Path | None:
        """Write the checkpoint of a step in the run's folder or, if that fails, elsewhere. Return its folder; None if both fail.

        Args:
            step, state: as in `save`.
            elsewhere: a folder of another disk; None if there is none. With several ranks it is never used.
        """
        self.save(step, state)
        self.wait()
        regular = self.path(step)
        # `save` raises nothing, but adds a written checkpoint to the list, which only the first rank has.
        written = self._ranks.of_first("the checkpoint", str(regular) if regular in self._kept else None)
        if written is not None:
            return Path(written)
        if elsewhere is None or self._ranks.size > 1:
            return None
        try:
            self._write(elsewhere, state=state)
        except Exception as error:
            self._print(f"warning: {elsewhere} was not written either ({first_line(error)})")
            return None
        self.elsewhere = elsewhere
        return elsewhere

    def _claim_folder(self, step: int) -> Path | None:
        """Return the folder for a step's checkpoint; None if the checkpoint is written already.

        A folder of this name that is not of this run is renamed. If that fails, OSError is raised on all ranks.
        """
        target, problem, is_kept = self.path(step), "", False
        if self._ranks.is_first:
            is_kept = target in self._kept
            try:
                if target.exists() and not is_kept:
                    self._set_aside(target)
            except OSError as error:
                problem = first_line(error)
        name, is_kept, problem = self._ranks.of_first("a checkpoint", [str(target), is_kept, problem])
        if problem:
            raise OSError(problem)
        return None if is_kept else Path(name)

    def report(self) -> None:
        """Print a line about a checkpoint that was written, or could not be, since the last call."""
        if self._running is None:
            return
        step, saving = self._running
        if not saving.done:
            return
        self._running = None
        if saving.error is not None:
            self._report_failure(step, saving.error)
            return
        self._seconds = saving.seconds
        self._print(f"{saving.folder}: {format_bytes(saving.num_bytes)} in {format_seconds(saving.seconds)}")

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the running checkpoint is on disk, or at most these seconds, and report it."""
        if self._running is not None:
            _, saving = self._running
            saving.wait_until_done(seconds)
        self.report()

    def seconds(self) -> float | None:
        """Return the seconds that the last checkpoint took, which the next one will take; None if none was written yet."""
        return self._seconds

    def load(self, folder: Path, last: Path) -> None:
        """Load the weights of a checkpoint. If that fails, load ``last``, the checkpoint of the present weights.

        Raises:
            ConfigError: the checkpoint is damaged, or became unreadable meanwhile.
            StreamingError: so did ``last``, and the weights in memory are of two models.
        """
        if not (problem := self._try_loading(folder)):
            return
        if problem_of_last := self._try_loading(last):
            raise StreamingError(
                f"{problem}, and {problem_of_last}, so the weights in memory are of two models, and none was exported. When they can be read "
                f"again: horizon-lm export {folder} OUT, or {last}"
            )
        raise ConfigError(problem)

    def _try_loading(self, folder: Path) -> str:
        """Load the weights of a checkpoint into the model. Return the reason if a rank could not read it; empty if all could."""
        problem = ""
        manifest = verify_copies(self._ranks.mesh, folder)
        try:
            restore(folder, manifest, self._model, None)
        except (ConfigError, OSError) as error:
            problem = f"{folder} became unreadable ({first_line(error)})"
        return self._ranks.agree("the weights of a checkpoint", problem)

    def _record_and_prune(self, folder: Path, is_best: bool) -> None:
        """Record a new checkpoint, and delete those that it replaces: the oldest beyond the limit, and all of an overwritten run.

        The thread that has written the checkpoint calls this, and the next `save` waits for it. Until then others read at most
        `last`, so the list of checkpoints is replaced and never changed in place.
        """
        if is_best:
            self.best = folder
        self._kept = [*(path for path in self._kept if path != folder), folder]
        deletable = [path for path in self._kept if path != self.best]
        beyond_limit = deletable[: -self._limit] if self._limit else []
        for oldest in beyond_limit:
            self._kept = [path for path in self._kept if path != oldest]
            delete_folder(self._disk, oldest)
        while self._replaced:
            delete_folder(self._disk, self._replaced.pop())

    def _report_failure(self, step: int, error: BaseException) -> None:
        last = f"the last one is {self.last}" if self.last else "there is none yet"
        self._print(f"warning: the checkpoint of step {step} was not written ({first_line(error)}); {last}")


def write_side_files(folder: Path, tokenizer: Any, run_file: str) -> None:
    """Write the tokenizer and the run file into a checkpoint."""
    tokenizer.save_pretrained(folder)
    (folder / "run.yaml").write_text(run_file, encoding="utf-8")
