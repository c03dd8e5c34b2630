"""The output folder of a run. Existing files are kept until something replaces them."""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.config.text import RUN_CONFIG_HEADER, to_yaml
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.plan.plan import Plan
from horizon_lm.plan.render import write_plan

_RUN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trace.json", "predicted_trace.json", "loss.png", "model",
)  # fmt: skip


class RunDir:
    """The folder ``output_dir``: ``config.yaml``, ``plan.json``, ``metrics.jsonl`` and, after the last step,
    ``model/``.

    Raises:
        ConfigError: the folder holds a finished run or files that no run has written, or it is not writable.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output_dir).expanduser()
        self.model_dir, self.metrics_file = self.path / "model", self.path / "metrics.jsonl"
        self.trace_file = self.path / "trace.json"
        self.samples_file = self.path / "samples.jsonl"
        self._foreign_checkpoints: list[Path] = []
        if not self._holds_a_run():
            self._reject_foreign_files()
            self._foreign_checkpoints += self.path.glob("checkpoint-*")
        self._save_total_limit, self._saved = config.save_total_limit, list[Path]()
        self._dtype = config.exported_dtype
        if self.model_dir.exists() and not config.overwrite_output_dir:
            raise ConfigError(
                f"output_dir: {self.path} holds a finished run; choose another folder, or set "
                "overwrite_output_dir: true to replace its model once the new one is trained"
            )
        checkpoints = sorted(folder.name for folder in self.path.glob("checkpoint-*"))
        if checkpoints and not config.overwrite_output_dir:
            raise ConfigError(
                f"output_dir: {self.path} holds {checkpoints[0]} of another run; choose another folder, or set "
                "overwrite_output_dir: true to write beside it"
            )
        existing = next(folder for folder in (self.path, *self.path.resolve().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(f"output_dir: {existing} cannot be written to; choose another folder")
        if config.push_to_hub:
            _require_login()

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

    def begin(self, config: RunConfig, plan: Plan) -> None:
        """Create the folder, write settings and plan, and rename the metrics of an earlier run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: {self.path} cannot be created ({error.strerror})") from error
        part = self.path / ".config.yaml.part"
        part.write_text(to_yaml(config), encoding="utf-8")
        part.rename(self.path / "config.yaml")
        for stale in (self.trace_file, self.samples_file, self.path / "predicted_trace.json"):
            stale.unlink(missing_ok=True)
        write_plan(plan, config.device, self.path)
        if self.metrics_file.exists():
            number = 1
            while (earlier := self.path / f"metrics-{number}.jsonl").exists():
                number += 1
            self.metrics_file.rename(earlier)

    def append_samples(self, line: dict[str, Any]) -> None:
        """Append a line to ``samples.jsonl``."""
        with self.samples_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def export(self, model: Any, tokenizer: Any) -> None:
        """Export the model. The folder gets its name once it is complete; only then is an old model deleted."""
        self._write(model, tokenizer, self.model_dir)

    def _write(self, model: Any, tokenizer: Any, target: Path) -> None:
        import torch

        part, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "old"))
        if old.exists() and not target.exists():  # an earlier run was killed between the two renames below
            old.rename(target)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(part, dtype=getattr(torch, self._dtype) if self._dtype else None)
        tokenizer.save_pretrained(part)
        if target.exists():
            target.rename(old)
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def save(self, model: Any, tokenizer: Any, step: int) -> None:
        """Export a checkpoint after a step, and delete the oldest checkpoints beyond ``save_total_limit``."""
        target = self.path / f"checkpoint-{step}"
        if target in self._foreign_checkpoints:
            target.rename(target.with_name(f"{target.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        self._write(model, tokenizer, target)
        self._saved.append(target)
        while self._save_total_limit and len(self._saved) > self._save_total_limit:
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)

    def kept_artifacts(self) -> str:
        """Describe what an interrupted run leaves behind, and how to start it again."""
        if not self._saved:
            return f"Kept: {self.metrics_file}. No model was exported; run the same command again to start over"
        return (
            f"Kept: {self.metrics_file}, and the model after an earlier step in {self._saved[-1]}. A run cannot be resumed "
            "yet; to start over, run the same command with --overwrite_output_dir true"
        )

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
        """Draw ``loss.png``. Write errors are ignored, because they must not fail a finished run."""
        from horizon_lm.report.loss_png import write_loss_png

        with suppress(OSError):
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
