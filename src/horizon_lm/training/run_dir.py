"""The folder of a run: what is there before is kept until there is something to take its place."""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.config.text import OF_A_RUN, to_yaml
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.plan.plan import Plan
from horizon_lm.plan.render import write_plan

_LEFT_BY_A_RUN = (
    "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trace.json", "predicted_trace.json", "loss.png", "model",
)  # fmt: skip


class RunDir:
    """``output_dir`` with ``config.yaml``, ``plan.json``, ``metrics.jsonl`` and, when the run is finished, ``model/``.

    Raises:
        ConfigError: a finished run is there, or what no run has made, or the folder cannot be written.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output_dir).expanduser()
        self.model_dir, self.metrics_file = self.path / "model", self.path / "metrics.jsonl"
        self.trace_file = self.path / "trace.json"
        self.samples_file = self.path / "samples.jsonl"
        self._foreign: list[Path] = []
        if not self._is_of_a_run():
            self._refuse_to_replace()
            self._foreign += self.path.glob("checkpoint-*")
        self._keep, self._saved = config.save_total_limit, list[Path]()
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
        there = next(folder for folder in (self.path, *self.path.resolve().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"output_dir: {there} cannot be written to; choose another folder")
        if config.push_to_hub:
            _require_login()

    def _is_of_a_run(self) -> bool:
        """The settings in it are those of an earlier run."""
        try:
            with (self.path / "config.yaml").open(encoding="utf-8") as stream:
                return stream.readline().strip() == OF_A_RUN
        except (OSError, UnicodeDecodeError):
            return False

    def _refuse_to_replace(self) -> None:
        """ConfigError for a folder that no run has made, with something under a name that a run writes to."""
        for name in _LEFT_BY_A_RUN:
            if (self.path / name).exists():
                raise ConfigError(
                    f"output_dir: {self.path / name} is not of a run of ours, and would be lost; choose another folder"
                )

    def begin(self, config: RunConfig, plan: Plan) -> None:
        """Make the folder with the settings and the plan, and move an earlier run's metrics aside."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: {self.path} cannot be made ({error.strerror})") from error
        whole = self.path / ".config.yaml.part"
        whole.write_text(to_yaml(config), encoding="utf-8")
        whole.rename(self.path / "config.yaml")
        for stale in (self.trace_file, self.samples_file, self.path / "predicted_trace.json"):
            stale.unlink(missing_ok=True)
        write_plan(plan, config.device, self.path)
        if self.metrics_file.exists():
            number = 1
            while (aside := self.path / f"metrics-{number}.jsonl").exists():
                number += 1
            self.metrics_file.rename(aside)

    def keep_samples(self, line: dict[str, Any]) -> None:
        """Add answers to ``samples.jsonl``."""
        with self.samples_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def export(self, model: Any, tokenizer: Any) -> None:
        """Write the model's folder; it has its name when it is complete, and only then an old one goes."""
        self._write(model, tokenizer, self.model_dir)

    def _write(self, model: Any, tokenizer: Any, target: Path) -> None:
        import torch

        part, old = (target.with_name(f".{target.name}.{what}") for what in ("part", "old"))
        if old.exists() and not target.exists():  # killed between the two renames below
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
        """Export the model as it is after a step, and let older exports go that are too many."""
        target = self.path / f"checkpoint-{step}"
        if target in self._foreign:
            target.rename(target.with_name(f"{target.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        self._write(model, tokenizer, target)
        self._saved.append(target)
        while self._keep and len(self._saved) > self._keep:
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)

    def kept_artifacts(self) -> str:
        """Of a run that does not come to its end, and how to begin it again."""
        if not self._saved:
            return f"Kept: {self.metrics_file}. No model was exported; run the same command again to start over"
        return (
            f"Kept: {self.metrics_file}, and the model as it was in {self._saved[-1]}. A run cannot be resumed yet; to start "
            "over, run the same command with --overwrite_output_dir true"
        )

    def push(self, config: RunConfig) -> str:
        """Upload the exported model; a sentence of where it is. What fails here is said: the model is safe in its folder."""
        from huggingface_hub import HfApi

        name = config.hub_model_id or self.path.resolve().name
        try:
            api = HfApi()
            repo = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id, folder_path=self.model_dir, commit_message="Trained with Horizon-LM"
            )
        except Exception as error:  # of the network, of permissions, of the hub: the run is finished in any case
            return f"push_to_hub: the model was not uploaded ({first_line(error)}); it is in {self.model_dir}"
        return f"the trained model is at {repo}"

    def draw_loss(self) -> None:
        """A picture of the metrics. The run is finished: what goes wrong here is not worth an error."""
        from horizon_lm.report.loss_png import write_loss_png

        with suppress(OSError):
            write_loss_png(self.metrics_file, self.path / "loss.png")

    def final_message(self, steps_done: int, num_steps: int, num_skipped: int) -> str:
        """Why a run ended before its time, what it left out, where its model is, and how to use it."""
        early = f"stopped by a callback after step {steps_done} of {num_steps}\n" if steps_done < num_steps else ""
        skipped = ""
        if num_skipped:
            skipped = f"{num_skipped} of {steps_done} steps were skipped, because their gradient was not finite"
            skipped += "; the model is the one that the run began with\n" if num_skipped == steps_done else "\n"
        return (
            f"{early}{skipped}\nthe trained model is in {self.model_dir}; try it:\n"
            f'  horizon-lm generate {self.model_dir} "..."\n'
            f"and look at the run:\n  horizon-lm report {self.path}\n"
            "or in Python:\n"
            "  from transformers import pipeline\n"
            f'  print(pipeline("text-generation", "{self.model_dir}")([{{"role": "user", "content": "..."}}]))'
        )


def _require_login() -> None:
    """ConfigError before hours of training, if its model could not be uploaded."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # of the network, or of a token
        raise ConfigError(
            f"push_to_hub: the hub is not to be had ({first_line(error)}); log in with hf auth login, or leave push_to_hub out"
        ) from error
