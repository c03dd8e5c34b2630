"""The output folder of a run. Existing files are kept until something replaces them."""

import json
import os
import shlex
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from horizon_lm.common.disk import Disk, Replacement, delete_folder, free_path, restore_folder, write_file
from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.model.adapter_config import ADAPTER_CONFIG, convert_weights, share_weights
from horizon_lm.model.generation import write_generation_config
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import write_plan
from horizon_lm.runs.checkpoints.new_folder import unwritable
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.text import to_yaml
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.output_folder import (
    RunLock,
    find_second_place,
    holds_a_run,
    output_folder,
    reject_finished_run,
    require_usable,
)
from horizon_lm.runs.training.ranks import Ranks

Contents = dict[str, tuple[int, int, int]]  # inode, bytes and time of the last change of each file


class RunDir:
    """Context manager: ``output_dir`` with ``config.yaml``, ``plan.json``, ``metrics.jsonl`` and, at the end, ``model/``.

    Only the first of several ranks writes into it.

    Args:
        config: settings of the run.
        ranks: the ranks; None for one.
        resumes: the run goes on from a checkpoint.
        disk: the file operations to use.

    Attributes:
        ranks: the ranks.
        settings: the text of ``config.yaml``.
        metrics, samples: ``metrics.jsonl`` and ``samples.jsonl``.
        model_dir: the folder of the trained model.
        second: the folder for the model if ``model_dir`` cannot be written to; None if there is none.
        is_exported: the trained model is there.

    Raises:
        ConfigError: the folder holds a finished run or files that no run has written, another run is writing into it, or it
            is not writable.
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks | None = None, resumes: bool = False, disk: Disk | None = None
    ) -> None:
        self._config, self.ranks, self._resumes, self._disk = config, ranks or Ranks(), resumes, disk or Disk()
        self.path, self.settings = output_folder(config), ""
        self.metrics, self.samples = LineFile(self.path / "metrics.jsonl"), LineFile(self.path / "samples.jsonl")
        self.model_dir, self.is_exported = self.path / "model", False
        self.second: Path | None = None
        self._lock, self._step_exports, self._export_bytes = RunLock(self.path), list[Path](), 0
        self._held_a_run = False  # the folder had an earlier run in it
        self._replaceable: dict[Path, Contents | None] = {}  # folders of an earlier run, as they were
        self._scratch: tempfile.TemporaryDirectory[str] | None = None  # of another rank than the first
        if self.ranks.is_first:
            self._require_usable()

    def __enter__(self) -> Self:
        if not self.ranks.is_first:
            self._scratch = tempfile.TemporaryDirectory(prefix="horizon-lm-rank-")
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def line_files(self) -> list[LineFile]:
        """The files of lines that this rank writes."""
        return [self.metrics, self.samples] if self.ranks.is_first else []

    def _require_usable(self) -> None:
        """Raise ConfigError if the run cannot write into the folder, or may not. An earlier run's model that lost its name gets it back."""
        config = self._config
        self._lock.require_free()
        self._held_a_run = holds_a_run(self.path)
        if self._held_a_run:
            with suppress(OSError):  # a folder that cannot be written to is rejected below
                restore_folder(self._disk, self.model_dir)
        require_usable(config, self._resumes)
        if config.push_to_hub:
            _require_login()

    def take(self, export_bytes: int = 0) -> None:
        """Create the folder, and lock it until the end of the run. Files of an earlier run are left as they are.

        Args:
            export_bytes: bytes of the exported model, for which a second place is found, too.

        Raises:
            ConfigError, DoesNotFitError: the folder or ``fallback_dir`` cannot be written to, or has no room.
        """
        if not self.ranks.is_first:
            return
        self._export_bytes, self.second = export_bytes, find_second_place(self._config, export_bytes)
        try:
            self._disk.make_folder(self.path)
            self._lock.take()
        except OSError as error:
            raise self.problem(error) from error
        reject_finished_run(self._config)  # by a run that was faster
        folders = [self.model_dir, *(self.path.glob("checkpoint-*") if self._held_a_run else ())]
        self._replaceable = {folder: _contents(folder) for folder in folders}

    def elsewhere(self, what: str) -> Path | None:
        """Return a free path in the second place for ``what``, a model or a checkpoint; None if there is no second place."""
        name = Path(os.path.abspath(self.path)).name or "run"
        return None if self.second is None else free_path(self.second / f"{name}-{what}")

    def begin(self, config: RunConfig, plan: Plan) -> None:
        """Write settings and plan, and rename or remove files of an earlier run: only once the model is loaded, and little can fail."""
        if not self.ranks.is_first:
            return
        try:
            for stale in ("trace.json", "predicted_trace.json"):
                self._disk.remove(self.path / stale)
            self.write_settings(config, plan)
            if not self._resumes:
                self._disk.remove(self.samples.path)
                self.metrics.set_aside()
            self._disk.sync(self.path)
        except OSError as error:
            raise self.problem(error) from error

    def write_settings(self, config: RunConfig, plan: Plan) -> None:
        """Write the settings, with the choices of the plan, and the plan."""
        self.settings = to_yaml(config)
        write_file(self._disk, self.path / "config.yaml", self.settings.encode())
        write_plan(plan, config.device, self.path)

    def append_samples(self, line: dict[str, Any]) -> None:
        """Append a line to ``samples.jsonl``."""
        if self.ranks.is_first:
            self.samples.append(json.dumps(line, ensure_ascii=False))

    def write_model(self, model: Any, tokenizer: Any, target: Path) -> str:
        """Write a model. The folder gets its name once it is complete and durable; only then is an old one of ours deleted.

        All ranks call this, because each has a part of the weights. The folder is that of the first one: what libraries write
        on the others, such as PEFT's adapters, goes to a temporary folder.

        Args:
            model, tokenizer: the contents of the folder.
            target: the folder.

        Returns:
            A line about files that are not ours and had the name of the folder; empty if there are none.

        Raises:
            OSError: the folder cannot be written to. It is raised on all ranks. Nothing of it is left.
        """
        import torch

        ranks, dtype = self.ranks, self._config.exported_dtype
        own = target if self._scratch is None else Path(self._scratch.name) / target.name
        new = Replacement(self._disk, own, partial(self._is_ours, target))
        try:
            with ranks.failing_with_first("the folder of the model"):
                new.begin()
                self._disk.make_folder(new.part)
            with ranks.failing_with_first("the export"):
                model.save_pretrained(new.part, dtype=getattr(torch, dtype) if dtype else None)
                if dtype:
                    convert_weights(new.part, dtype)
                share_weights(new.part)
                if ranks.is_first:
                    if (new.part / ADAPTER_CONFIG).is_file():  # PEFT writes none
                        write_generation_config(model.generation_config, new.part)
                    tokenizer.save_pretrained(new.part)
                    new.publish()
        except BaseException:
            new.discard()
            raise
        return "" if new.kept is None else f"{target} is not of this run, and is now {new.kept}"

    def _is_ours(self, target: Path, old: Path) -> bool:
        """Return whether the folder ``old``, which was replaced at ``target``, may be deleted: it is of this run, or of an earlier one and
        has not changed since this one began.
        """
        before = self._replaceable.get(target)
        return target in self._step_exports or (before is not None and before == _contents(old))

    def problem(self, error: Exception, folder: Path | None = None, name: str = "output_dir") -> HorizonError:
        """Return the error of a run that cannot write into ``folder``, by default its own. ``name``: the setting, for the message."""
        return unwritable(name, folder or self.path, error, self._export_bytes)

    def export_and_prune(self, model: Any, tokenizer: Any, step: int) -> str:
        """Export the model after a step as ``checkpoint-STEP``, unless that was done. Then delete the oldest of these exports beyond
        ``save_total_limit``.

        Returns:
            As `write_model`: a line about files that are not ours.
        """
        target = self.path / f"checkpoint-{step}"
        if target in self._step_exports:
            return ""
        line = self.write_model(model, tokenizer, target)
        self._step_exports.append(target)
        while self._config.save_total_limit and len(self._step_exports) > self._config.save_total_limit:
            oldest = self._step_exports.pop(0)
            if self.ranks.is_first:
                delete_folder(self._disk, oldest)
        return line

    def kept_artifacts(self, checkpoint: Path | None) -> str:
        """Return what an interrupted run leaves, and how to go on.

        Args:
            checkpoint: the newest checkpoint that the run can be resumed from; None if there is none.
        """
        if self.is_exported:
            return f"The trained model is in {self.model_dir}"
        if checkpoint is not None:
            elsewhere = "" if checkpoint.parent == self.path else f" with --resume_from_checkpoint {checkpoint}"
            return f"Kept: {checkpoint}. Run the same command again{elsewhere} to go on from there"
        if self._step_exports:
            return (
                f"Kept: the model after an earlier step in {self._step_exports[-1]}. With save_only_model a run cannot be resumed; to start "
                "over, run the same command with --overwrite_output_dir true"
            )
        return f"Kept: {self.metrics.path}. There is no checkpoint yet; run the same command again to start over"

    def push(self) -> str:
        """Upload the exported model, which stays in its folder. Return a line with its address, or about the failure."""
        from huggingface_hub import HfApi

        name = self._config.hub_model_id or self.path.resolve().name
        try:
            api = HfApi()
            repo = api.create_repo(name, private=self._config.hub_private_repo, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id, folder_path=self.model_dir, commit_message="Trained with Horizon-LM"
            )
        except Exception as error:  # network, permissions or hub; not worth failing a finished run
            return f"push_to_hub: the model was not uploaded ({first_line(error)}); it is in {self.model_dir}"
        return f"the trained model is at {repo}"

    def draw_loss(self) -> None:
        """Draw ``loss.png``."""
        from horizon_lm.runs.training.loss_png import write_loss_png

        if self.ranks.is_first:
            write_loss_png(self.metrics.path, self.path / "loss.png")

    def final_message(self, steps_done: int, num_steps: int, num_skipped: int, warning: str, has_template: bool) -> str:
        """Return the last lines of a run: early stop, skipped steps, ``warning``, and how to use the model, as commands that run as they are.

        ``has_template``: the tokenizer has a chat template.
        """
        early = f"stopped by a callback after step {steps_done} of {num_steps}\n" if steps_done < num_steps else ""
        skipped = ""
        if num_skipped:
            skipped = f"steps skipped because their gradient was not finite: {num_skipped} of {steps_done}"
            skipped += "; the model is unchanged\n" if num_skipped == steps_done else "\n"
        folder, merge = shlex.quote(str(self.model_dir)), ""
        trust = " --trust-remote-code" if self._config.trust_remote_code else ""
        unproven = " --allow-unproven-model" if self._config.allow_unproven_model else ""
        if (self.model_dir / ADAPTER_CONFIG).is_file():
            merge = (
                f"Merge the adapters into their base, for a model of its own:\n  horizon-lm merge {folder} OUT{trust}\n"
            )
        arguments = f'"text-generation", {json.dumps(str(self.model_dir))}{", trust_remote_code=True" if trust else ""}'
        prompt = '[{"role": "user", "content": "..."}]' if has_template else '"..."'
        return (
            f"{early}{skipped}{warning}\nThe trained model is in {self.model_dir}. Try it:\n"
            f'  horizon-lm generate {folder} "..."{trust}{unproven}\n'
            f"{merge}Look at the run:\n  horizon-lm report {shlex.quote(str(self.path))}\n"
            f"Use it in Python:\n  from transformers import pipeline\n  print(pipeline({arguments})({prompt}))"
        )


def _contents(folder: Path) -> Contents | None:
    """Return what identifies the files of a folder and their contents; None if there is no folder."""
    if not folder.is_dir():
        return None
    stats = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _require_login() -> None:
    """Raise ConfigError before training if the model could not be uploaded afterwards."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # network or token
        raise ConfigError(
            f"push_to_hub: the hub cannot be used ({first_line(error)}); log in with hf auth login, or remove push_to_hub"
        ) from error
