"""The output folder of a run: its lock, and the files that a run writes besides its checkpoints and models.

=======================================  ================================  =========================================
file                                     written                           by
=======================================  ================================  =========================================
``config.yaml``, ``plan.json``           before the first step             `RunDir`
``predicted_trace.json``                 with ``plan.json``                `RunDir`
``trace.json``                           after ``trace_steps``             `tracing`
``metrics.jsonl``, ``samples.jsonl``     after steps, as `intervals` says  `step_log`, `evaluation`, `sampling`
``checkpoint-STEP``                      after steps, and before an end    `saver` says when, `keeping` where
``bad-batches``                          for a step that is not finite     `bad_rows`
``model``, ``loss.png``                  at the end                        `keeping`, `step_log`
=======================================  ================================  =========================================
"""

import json
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from horizon_lm.common.disk import Disk, restore_folder, write_file
from horizon_lm.errors import HorizonError
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import write_plan
from horizon_lm.runs.checkpoints.new_folder import unwritable
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.text import to_yaml
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.output_folder import (
    find_second_place,
    holds_a_run,
    locked,
    output_folder,
    reject_finished_run,
    require_unlocked,
    require_usable,
)
from horizon_lm.runs.training.ranks import Ranks

Contents = dict[str, tuple[int, int, int]]  # inode, bytes and time of the last change of each file


class RunDir:
    """Context manager: ``output_dir`` with ``config.yaml``, ``plan.json``, ``metrics.jsonl`` and ``samples.jsonl``.

    Only the first of several ranks writes into it. Files of an earlier run are kept until something replaces them.

    Args:
        config: settings of the run.
        ranks: the ranks; None for one.
        resumes: the run goes on from a checkpoint.
        disk: the file operations to use.

    Attributes:
        ranks, disk, path: the ranks, the file operations, and the folder.
        settings: the text of ``config.yaml``.
        metrics, samples: ``metrics.jsonl`` and ``samples.jsonl``.
        second_place: a folder for a model or checkpoint that cannot be written into this one, which `take` finds on the first rank; None if
            there is none.

    Raises:
        ConfigError: the folder holds a finished run or files that no run has written, another run is writing into it, or it
            is not writable.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks | None = None, resumes: bool = False, disk: Disk | None = None
    ) -> None:
        self._config, self.ranks, self._resumes, self.disk = config, ranks or Ranks(), resumes, disk or Disk()
        self.path, self.settings = output_folder(config), ""
        self.metrics, self.samples = LineFile(self.path / "metrics.jsonl"), LineFile(self.path / "samples.jsonl")
        self.second_place: Path | None = None
        self._export_bytes = 0
        self._held = ExitStack()  # the lock of the folder, or the folder below
        self._scratch: Path | None = None  # for what libraries write on another rank than the first
        self._held_a_run = False  # the folder had an earlier run in it
        self._earlier: dict[Path, Contents | None] = {}  # its models and checkpoints, as they were
        if self.ranks.is_first:
            self._require_usable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    @property
    def line_files(self) -> list[LineFile]:
        """The files of lines that this rank writes."""
        return [self.metrics, self.samples] if self.ranks.is_first else []

    def _require_usable(self) -> None:
        """Raise ConfigError if the run cannot write into the folder, or may not. An earlier run's model that lost its name gets it back."""
        require_unlocked(self.path)
        self._held_a_run = holds_a_run(self.path)
        if self._held_a_run:
            with suppress(OSError):  # a folder that cannot be written to is rejected below
                restore_folder(self.disk, self.path / "model")
        require_usable(self._config, self._resumes)

    def take(self, export_bytes: int = 0) -> None:
        """Create the folder, and lock it until the end of the run. Files of an earlier run are left as they are.

        Args:
            export_bytes: bytes of the exported model, for which a second place is found, too.

        Raises:
            ConfigError, DoesNotFitError: the folder or ``fallback_dir`` cannot be written to, or has no room.
        """
        if not self.ranks.is_first:
            self._scratch = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="horizon-lm-rank-")))
            return
        self._export_bytes, self.second_place = export_bytes, find_second_place(self._config, export_bytes)
        try:
            self.disk.make_folder(self.path)
            self._held.enter_context(locked(self.path))
        except OSError as error:
            raise self.problem(error) from error
        reject_finished_run(self._config)  # by a run that was faster
        if self._held_a_run:
            folders = [self.path / "model", *self.path.glob("checkpoint-*")]
            self._earlier = {folder: _contents(folder) for folder in folders}

    def own_path(self, target: Path) -> Path:
        """Return the path at which this rank writes a folder that all ranks write: ``target`` on the first one, on others a temporary one."""
        return target if self._scratch is None else self._scratch / target.name

    def is_unchanged(self, target: Path, old: Path) -> bool:
        """Return whether the folder ``old``, which had the name ``target``, is of an earlier run and has not changed since `take`."""
        before = self._earlier.get(target)
        return before is not None and before == _contents(old)

    def begin(self, config: RunConfig, plan: Plan) -> None:
        """Write settings and plan, and rename or remove files of an earlier run: only once the model is loaded, and little can fail."""
        if not self.ranks.is_first:
            return
        try:
            for stale in ("trace.json", "predicted_trace.json"):
                self.disk.remove(self.path / stale)
            self.write_settings(config, plan)
            if not self._resumes:
                self.disk.remove(self.samples.path)
                self.metrics.set_aside()
            self.disk.sync(self.path)
        except OSError as error:
            raise self.problem(error) from error

    def write_settings(self, config: RunConfig, plan: Plan) -> None:
        """Write the settings, with the choices of the plan, and the plan."""
        self.settings = to_yaml(config)
        write_file(self.disk, self.path / "config.yaml", self.settings.encode())
        write_plan(plan, config.device, self.path)

    def append_samples(self, line: dict[str, Any]) -> None:
        """Append a line to ``samples.jsonl``."""
        if self.ranks.is_first:
            self.samples.append(json.dumps(line, ensure_ascii=False))

    def draw_loss(self) -> None:
        """Draw ``loss.png``."""
        from horizon_lm.runs.training.loss_png import write_loss_png

        if self.ranks.is_first:
            write_loss_png(self.metrics.path, self.path / "loss.png")

    def problem(self, error: Exception, folder: Path | None = None, name: str = "output_dir") -> HorizonError:
        """Return the error of a run that cannot write into ``folder``, by default its own. ``name``: the setting, for the message."""
        return unwritable(name, folder or self.path, error, self._export_bytes)


def _contents(folder: Path) -> Contents | None:
    """Return what identifies the files of a folder and their contents; None if there is no folder."""
    if not folder.is_dir():
        return None
    stats = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
