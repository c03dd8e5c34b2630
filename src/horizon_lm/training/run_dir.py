"""The output folder of a run. Existing files are kept until something replaces them."""

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from horizon_lm.config import RunConfig
from horizon_lm.config.text import RUN_CONFIG_HEADER, to_yaml
from horizon_lm.disk import Disk, part_of, replace_folder, restore_folder, write_file
from horizon_lm.errors import ConfigError, DoesNotFitError, HorizonError, first_line
from horizon_lm.planning.plan import Plan
from horizon_lm.planning.render import write_plan
from horizon_lm.quantities import format_bytes, format_seconds
from horizon_lm.resources import disk_free
from horizon_lm.training.line_file import LineFile
from horizon_lm.training.run_lock import RunLock

_RUN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trace.json", "predicted_trace.json", "loss.png", "model",
)  # fmt: skip
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DISK_SECONDS = 600.0  # to make room on a full disk before the trained model is given up
_RETRY_SECONDS = 5.0


class RunDir:
    """Context manager: ``output_dir`` with ``config.yaml``, ``plan.json``, ``metrics.jsonl`` and, at the end, ``model/``.

    Args:
        config: settings of the run.
        resumes: the run goes on from a checkpoint.
        disk: the file operations to use.

    Attributes:
        settings: the text of ``config.yaml``.

    Raises:
        ConfigError: the folder holds a finished run or files that no run has written, another run is writing into it, or it
            is not writable.
    """

    def __init__(self, config: RunConfig, resumes: bool = False, disk: Disk | None = None) -> None:
        self.path, self._disk, self.settings = Path(config.output_dir).expanduser(), disk or Disk(), ""
        self._lock = RunLock(self.path)
        self._lock.require_free()
        self.model_dir, self.metrics_file = self.path / "model", self.path / "metrics.jsonl"
        self.trace_file = self.path / "trace.json"
        self.samples, self._resumes = LineFile(self.path / "samples.jsonl"), resumes
        self._foreign_checkpoints: list[Path] = []
        if not self._holds_a_run():
            self._reject_foreign_files()
            self._foreign_checkpoints += self.path.glob("checkpoint-*")
        self._save_total_limit, self._saved = config.save_total_limit, list[Path]()
        self._dtype, self._export_bytes, self._is_exported = config.exported_dtype, 0, False
        self._overwrites = config.overwrite_output_dir
        with suppress(OSError):  # a folder that cannot be written to is rejected below
            restore_folder(self._disk, self.model_dir)
        self._reject_finished_run()
        checkpoints = sorted(folder.name for folder in self.path.glob("checkpoint-*"))
        if checkpoints and not config.overwrite_output_dir and not resumes:
            raise ConfigError(
                f"output_dir: {self.path} holds {checkpoints[0]} of another run; choose another folder, or set "
                "overwrite_output_dir: true to write beside it"
            )
        existing = next(folder for folder in (self.path, *self.path.resolve().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(f"output_dir: {existing} cannot be written to; choose another folder")
        if config.push_to_hub:
            _require_login()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _reject_finished_run(self) -> None:
        if self.model_dir.exists() and not self._overwrites:
            raise ConfigError(
                f"output_dir: {self.path} holds a finished run; choose another folder, or set "
                "overwrite_output_dir: true to replace its model once the new one is trained"
            )

    def _holds_a_run(self) -> bool:
        """Return whether the folder has the settings file of an earlier run."""
        try:
            with (self.path / "config.yaml").open(encoding="utf-8") as stream:
                return stream.readline().strip() == RUN_CONFIG_HEADER
        except (OSError, UnicodeDecodeError):
            return False

    def _reject_foreign_files(self) -> None:
        """Raise ConfigError if a run would overwrite a file that no run has written."""
        for name in _RUN_FILES:
            if (self.path / name).exists():
                raise ConfigError(
                    f"output_dir: {self.path / name} was not written by horizon-lm and would be overwritten; choose another folder"
                )

    def take(self) -> None:
        """Create the folder, and lock it until the end of the run. Files of an earlier run are left as they are."""
        try:
            self._disk.make_folder(self.path)
            self._lock.take()
        except OSError as error:
            raise self._unwritable(error) from error
        self._reject_finished_run()  # by a run that was faster

    def begin(self, config: RunConfig, plan: Plan) -> None:
        """Write settings and plan, and rename the metrics of an earlier run. The model must be loaded: nothing is left to fail."""
        self._export_bytes = next(item.num_bytes for item in plan.disk.items if item.name == "exported model")
        try:
            for stale in (self.trace_file, self.path / "predicted_trace.json"):
                self._disk.remove(stale)
            self.write_settings(config, plan)
            if not self._resumes:
                self._disk.remove(self.samples.path)
                LineFile(self.metrics_file).set_aside()
            self._disk.sync(self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def write_settings(self, config: RunConfig, plan: Plan) -> None:
        """Write the settings, with the choices of the plan, and the plan."""
        self.settings = to_yaml(config)
        write_file(self._disk, self.path / "config.yaml", self.settings.encode())
        write_plan(plan, config.device, self.path)

    def append_samples(self, line: dict[str, Any]) -> None:
        """Append a line to ``samples.jsonl``."""
        self.samples.append(json.dumps(line, ensure_ascii=False))

    def export(
        self,
        model: Any,
        tokenizer: Any,
        report: Callable[[str], None],
        stopped: Callable[[], bool],
        save_on_fault: Callable[[], str],
    ) -> None:
        """Export the model. The folder gets its name once it is complete and durable; only then is an old one deleted.

        A full disk is reported, and the export is tried again while there is hope that somebody makes room.

        Args:
            model, tokenizer: the contents of the folder.
            report: called with a line for people.
            stopped: returns whether the run was asked to stop, which ends the waiting.
            save_on_fault: saves what it can, and returns a sentence about what is kept.

        Raises:
            DoesNotFitError: the disk is full.
            ConfigError: the folder cannot be written to.
        """
        until, waits = time.monotonic() + _FULL_DISK_SECONDS, False
        while True:
            try:
                self._write(model, tokenizer, self.model_dir)
                self._is_exported = True
                return
            except Exception as error:
                failure = error
            if stopped() or time.monotonic() > until or not self._is_full(failure):
                break
            if not waits:
                waits = True
                report(f"{self._unwritable(failure)} Trying again for {format_seconds(_FULL_DISK_SECONDS)}.")
            time.sleep(_RETRY_SECONDS)
        kept = save_on_fault()
        if isinstance(failure, OSError):
            raise type(problem := self._unwritable(failure))(f"{problem} {kept}") from failure
        failure.add_note(kept)
        raise failure

    def _write(self, model: Any, tokenizer: Any, target: Path) -> None:
        import torch

        def fill(part: Path) -> None:
            model.save_pretrained(part, dtype=getattr(torch, self._dtype) if self._dtype else None)
            tokenizer.save_pretrained(part)

        restore_folder(self._disk, target)
        try:
            replace_folder(self._disk, target, fill)
        except BaseException:
            with suppress(OSError):
                restore_folder(self._disk, target)
                self._disk.remove(part_of(target))
            raise

    def _is_full(self, error: Exception) -> bool:
        """Return whether an export failed because there is no space. The tokenizer's writer raises an error of its own."""
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in _NO_SPACE
        with suppress(OSError):
            return disk_free(self.path) < self._export_bytes
        return False

    def _unwritable(self, error: Exception) -> HorizonError:
        """Return the error of a run whose folder cannot be written to."""
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        if not self._is_full(error):
            return ConfigError(f"output_dir: {self.path} cannot be written to ({reason}).")
        free = ""
        with suppress(OSError):
            free = f"; {format_bytes(disk_free(self.path))} are free"
        needed = f"the exported model takes {format_bytes(self._export_bytes)}" if self._export_bytes else "make room"
        return DoesNotFitError(f"output_dir: no space is left for {self.path} ({reason}): {needed}{free}.")

    def save(self, model: Any, tokenizer: Any, step: int) -> None:
        """Export a checkpoint after a step, and delete the oldest checkpoints beyond ``save_total_limit``."""
        target = self.path / f"checkpoint-{step}"
        if target in self._foreign_checkpoints:
            self._disk.set_aside(target)
        self._write(model, tokenizer, target)
        self._saved.append(target)
        while self._save_total_limit and len(self._saved) > self._save_total_limit:
            self._disk.remove(self._saved.pop(0))

    @property
    def is_exported(self) -> bool:
        """True once the trained model is in its folder."""
        return self._is_exported

    def kept_artifacts(self, checkpoint: Path | None) -> str:
        """Return what an interrupted run leaves, and how to go on.

        Args:
            checkpoint: the newest checkpoint that the run can be resumed from; None if there is none.
        """
        if self._is_exported:
            return f"The trained model is in {self.model_dir}"
        if checkpoint is not None:
            return f"Kept: {checkpoint}. Run the same command again to go on from there"
        if self._saved:
            return (
                f"Kept: the model after an earlier step in {self._saved[-1]}. With save_only_model a run cannot be resumed; to start "
                "over, run the same command with --overwrite_output_dir true"
            )
        return f"Kept: {self.metrics_file}. There is no checkpoint yet; run the same command again to start over"

    def push(self, config: RunConfig) -> str:
        """Upload the exported model and return its address, or a message if the upload fails; the local model
        is kept.
        """
        from huggingface_hub import HfApi

        name = config.hub_model_id or self.path.resolve().name
        try:
            api = HfApi()
            repo = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id, folder_path=self.model_dir, commit_message="Trained with Horizon-LM"
            )
        except Exception as error:  # network, permissions or hub; not worth failing a finished run
            return f"push_to_hub: the model was not uploaded ({first_line(error)}); it is in {self.model_dir}"
        return f"the trained model is at {repo}"

    def draw_loss(self) -> None:
        """Draw ``loss.png``."""
        from horizon_lm.report.loss_png import write_loss_png

        write_loss_png(self.metrics_file, self.path / "loss.png")

    def final_message(self, steps_done: int, num_steps: int, num_skipped: int, warning: str) -> str:
        """Return the last lines of a run: early stop, skipped steps, a warning, the model's folder and how to
        use it.
        """
        early = f"stopped by a callback after step {steps_done} of {num_steps}\n" if steps_done < num_steps else ""
        skipped = ""
        if num_skipped:
            skipped = f"steps skipped because their gradient was not finite: {num_skipped} of {steps_done}"
            skipped += "; the model is unchanged\n" if num_skipped == steps_done else "\n"
        return (
            f"{early}{skipped}{warning}\nThe trained model is in {self.model_dir}. Try it:\n"
            f'  horizon-lm generate {self.model_dir} "..."\n'
            f"Look at the run:\n  horizon-lm report {self.path}\n"
            "Use it in Python:\n"
            "  from transformers import pipeline\n"
            f'  print(pipeline("text-generation", "{self.model_dir}")([{{"role": "user", "content": "..."}}]))'
        )


def _require_login() -> None:
    """Raise ConfigError before training if the model could not be uploaded afterwards."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # network or token
        raise ConfigError(
            f"push_to_hub: the hub cannot be used ({first_line(error)}); log in with hf auth login, or remove push_to_hub"
        ) from error
