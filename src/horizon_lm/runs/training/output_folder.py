"""Reject an ``output_dir`` that a run may not write into, or cannot. Nothing here needs torch."""

import os
from pathlib import Path

from horizon_lm.common.paths import exists
from horizon_lm.common.resources import takes_files
from horizon_lm.errors import ConfigError
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.text import RUN_CONFIG_HEADER

_RUN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trace.json", "predicted_trace.json", "loss.png", "model",
)  # fmt: skip


def output_folder(config: RunConfig) -> Path:
    """Return the folder of a run."""
    return Path(config.output_dir).expanduser()


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder has the settings file of an earlier run."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as stream:
            return stream.readline().strip() == RUN_CONFIG_HEADER
    except (OSError, UnicodeDecodeError):
        return False


def require_usable(config: RunConfig, resumes: bool) -> None:
    """Raise ConfigError if a run may not write into its folder, or cannot. ``resumes``: it goes on from a checkpoint."""
    folder = output_folder(config)
    if not holds_a_run(folder):
        _reject_foreign_files(folder)
        _reject_inputs(config, folder)
    reject_finished_run(config)
    if not resumes:
        _reject_checkpoints(config, folder)
    require_writable("output_dir", folder)


def _reject_foreign_files(folder: Path) -> None:
    """Raise ConfigError if a run would overwrite a file that no run has written."""
    for name in _RUN_FILES:
        if (folder / name).exists():
            raise ConfigError(
                f"output_dir: {folder / name} was not written by horizon-lm and would be overwritten; choose another folder"
            )


def _reject_inputs(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if the model or rows are in a run's folder: a later run would read the files of this one as its inputs."""
    run_folder = folder.resolve()
    for each in (*(config.datasets or ()), *(config.eval_datasets or ())):
        if not exists(each.path):
            continue
        rows = Path(each.path).expanduser().resolve()
        has_rows = run_folder == rows.parent if rows.is_file() else run_folder.is_relative_to(rows)
        if has_rows:
            raise ConfigError(f"output_dir: {folder} is a folder of the rows in {each.path}; choose another folder")
    for name in (config.model_name_or_path, config.adapter_name_or_path):
        if name is not None and exists(name) and run_folder == Path(name).expanduser().resolve():
            raise ConfigError(f"output_dir: {folder} is the folder of the model to start from; choose another folder")


def reject_finished_run(config: RunConfig) -> None:
    """Raise ConfigError if the folder has a trained model that may not be replaced."""
    if (output_folder(config) / "model").exists() and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {output_folder(config)} holds a finished run; choose another folder, or set "
            "overwrite_output_dir: true to replace its model once the new one is trained"
        )


def _reject_checkpoints(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if a folder has checkpoints of another run, beside which a run that begins anew may not write."""
    checkpoints = sorted(each.name for each in folder.glob("checkpoint-*"))
    if checkpoints and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} holds {checkpoints[0]} of another run; choose another folder, or set "
            "overwrite_output_dir: true to write beside it"
        )


def require_writable(setting: str, folder: Path) -> None:
    """Raise ConfigError, naming the setting, if a folder, or the one in which it would be created, cannot be written to."""
    existing = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    if existing.is_file():
        raise ConfigError(f"{setting}: {existing} is a file; choose another folder")
    if not existing.is_dir() or not os.access(existing, os.W_OK) or not takes_files(existing):
        raise ConfigError(f"{setting}: {existing} cannot be written to; choose another folder")
