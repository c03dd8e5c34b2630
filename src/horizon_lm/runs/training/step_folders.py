"""The folders ``checkpoint-STEP`` of a run: which are kept, which are deleted, and which are of another run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import delete_folder, delete_parts
from horizon_lm.common.run_folders import checkpoints_in, is_checkpoint
from horizon_lm.errors import ConfigError, StreamingError, first_line
from horizon_lm.runs.checkpoints.checkpoint import restore
from horizon_lm.runs.checkpoints.manifest import Manifest, verify_copies
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.run_dir import RunDir
from horizon_lm.runs.training.run_state import ResumePoint, reading


class StepFolders:
    """Checkpoints, or exported models, that a run has written after some of its steps. The oldest are deleted beyond a limit.

    Args:
        run_dir: the folder of the run.
        limit: the number of folders that are kept besides the best one; None for no limit.

    Attributes:
        kept: the folders, oldest first, on the first rank. A thread that has written a checkpoint adds it while others read: the list
            is replaced, and never changed in place.
        replaced: folders of an overwritten run, which are deleted once this one has its first.
        best: the folder that is kept whatever the limit is; None if there is none.
    """

    def __init__(self, run_dir: RunDir, limit: int | None) -> None:
        self._run_dir, self._limit = run_dir, limit
        self.kept: list[Path] = []
        self.replaced: list[Path] = []
        self.best: Path | None = None

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self._run_dir.path / f"checkpoint-{step}"

    def add(self, folder: Path, is_best: bool = False) -> None:
        """Record a new folder, and delete those that it replaces: the oldest beyond the limit, and all of an overwritten run."""
        if is_best:
            self.best = folder
        kept = [*(each for each in self.kept if each != folder), folder]
        deletable = [each for each in kept if each != self.best]
        beyond_limit = deletable[: -self._limit] if self._limit else []
        self.kept = [each for each in kept if each not in beyond_limit]
        for each in (*beyond_limit, *self.replaced):
            delete_folder(self._run_dir.disk, each)
        self.replaced = []

    def set_aside(self, path: Path, report: Callable[[str], None]) -> Path:
        """Rename a folder that is not of this run. Return its new path."""
        aside = self._run_dir.disk.set_aside(path)
        report(f"{path} is of another run, or damaged, and is now {aside.name}")
        return aside


def checkpoints_of(
    config: RunConfig, run_dir: RunDir, point: ResumePoint | None, report: Callable[[str], None]
) -> StepFolders:
    """Return the checkpoints in a run's folder up to ``point``, and rename all others; on the first rank only.

    A checkpoint of a later step, or of another run, would be taken for this run's when it is resumed.

    Args:
        config: settings of the run.
        run_dir: the folder.
        point: the checkpoint that the run goes on from; None for a new run.
        report: prints a line about each renamed checkpoint, and if the best one is missing.
    """
    checkpoints = StepFolders(run_dir, config.save_total_limit)
    if not run_dir.ranks.is_first:
        return checkpoints
    delete_parts(run_dir.disk, run_dir.path, "checkpoint-*")
    last_step = -1  # of a checkpoint that belongs to this run
    if point is not None and point.folder.resolve().parent == run_dir.path.resolve():
        last_step = point.step
    for path in checkpoints_in(run_dir.path):
        if int(path.name.removeprefix("checkpoint-")) <= last_step:
            checkpoints.kept.append(path)
        else:
            aside = checkpoints.set_aside(path, report)
            checkpoints.replaced += [aside] if config.overwrite_output_dir else []
    if point is not None and config.load_best_model_at_end:
        checkpoints.best = _best_checkpoint(point, report)
    return checkpoints


def _best_checkpoint(point: ResumePoint, report: Callable[[str], None]) -> Path | None:
    """Return the best checkpoint of a run that goes on; None if there is none yet, or if it was removed, which is reported."""
    with reading(point):
        step = point.state["best"]["step"]
    if not step:  # there was no evaluation yet
        return None
    best = point.folder.with_name(f"checkpoint-{step}")
    if is_checkpoint(best):
        return best
    report(f"resume: warning: {best}, the best one so far, is missing")
    return None


def load_weights(model: Any, folder: Path, last: Path, ranks: Ranks) -> None:
    """Load the weights of a checkpoint. If that fails, load ``last``, the checkpoint of the present weights. All ranks call this.

    Raises:
        ConfigError: the checkpoint is damaged, or became unreadable meanwhile; the weights are the present ones.
        StreamingError: so did ``last``, and the weights in memory are of two models.
    """
    manifest = verify_copies(ranks.mesh, folder)
    if not (problem := _try_loading(model, folder, manifest, ranks)):
        return
    if problem_of_last := _try_loading(model, last, None, ranks):
        raise StreamingError(
            f"{problem}, and {problem_of_last}, so the weights in memory are of two models, and none was exported. When they can be read "
            f"again: horizon-lm export {folder} OUT, or {last}"
        )
    raise ConfigError(problem)


def _try_loading(model: Any, folder: Path, manifest: Manifest | None, ranks: Ranks) -> str:
    """Load the weights of a checkpoint, and verify it first if there is no manifest. Return the reason if a rank could not read it; empty if
    all could.
    """
    problem = ""
    try:
        restore(folder, manifest or verify_copies(ranks.mesh, folder), model, None)
    except (ConfigError, OSError) as error:
        problem = f"{folder} became unreadable ({first_line(error)})"
    return ranks.agree("the weights of a checkpoint", problem)
