"""Find the checkpoints that a run may go on from, by its settings and the names of files. Nothing here needs torch."""

from collections.abc import Sequence
from pathlib import Path

from horizon_lm.common.run_folders import checkpoints_in
from horizon_lm.runs.checkpoints.finding import named_checkpoint, require_same_kind
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.output_folder import output_folder


def names_checkpoint(config: RunConfig) -> bool:
    """Return whether ``resume_from_checkpoint`` is the path of a checkpoint, or of a run."""
    return config.resume_from_checkpoint not in (True, False, "auto")


def begins_anew(config: RunConfig) -> bool:
    """Return whether a run ignores all checkpoints: if it shall, or by default in the folder of a finished run or one to be overwritten."""
    if config.resume_from_checkpoint != "auto":
        return config.resume_from_checkpoint is False
    return config.overwrite_output_dir or (output_folder(config) / "model").exists()


def checkpoints_to_resume(config: RunConfig) -> list[Path]:
    """Return the checkpoints that a run may go on from, the preferred one last."""
    if begins_anew(config):
        return []
    if names_checkpoint(config):
        return [named_checkpoint(str(config.resume_from_checkpoint))]
    return checkpoints_in(output_folder(config))


def remedy_of_changes(config: RunConfig, of_state: Sequence[str] = ()) -> str:
    """Return the remedy for settings that differ from a checkpoint's.

    Args:
        config: the settings of the run.
        of_state: the changed settings with which the checkpoint's state cannot be loaded.
    """
    if of_state:
        return (
            f"restore {', '.join(of_state)}, without which the checkpoint's state cannot be loaded{_remedy_elsewhere(config)}, "
            "or start from its export (horizon-lm export)"
        )
    return f"restore them{_remedy_elsewhere(config)}, or set resume_with_changes: true to go on with the changes"


def _remedy_elsewhere(config: RunConfig) -> str:
    """Return the remedy that only a run without a demanded checkpoint has: in another folder, it begins anew."""
    return ", choose another output_dir" if config.resume_from_checkpoint == "auto" else ""


def require_same_training(config: RunConfig, folder: Path, saved_adapters: bool) -> None:
    """Raise ConfigError if a checkpoint is of adapters and a run trains all weights, or the reverse, which no setting allows."""
    if saved_adapters:
        restore, start = (
            "set use_peft and the lora settings as there",
            "merged with its base (horizon-lm export, merge)",
        )
    else:
        restore, start = "remove use_peft and the lora settings", "as model_name_or_path (horizon-lm export)"
    remedy = f". Remedy: {restore}{_remedy_elsewhere(config)}, or start from its export {start}"
    require_same_kind(folder, saved_adapters, config.use_peft, remedy)
