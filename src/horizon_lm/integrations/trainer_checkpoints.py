"""Checkpoints of a Trainer that trains a streamed model.

Folders, rotation, ``trainer_state.json`` and the weights of ``save_pretrained`` are the Trainer's. Beside them lies the exact
state, in our format: masters, moments, and the scheduler as JSON. Nothing of it is read through pickle.
"""

from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.model.adapters import load_adapters
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from horizon_lm.runs.checkpoints.plain_state import to_plain

FOLDER = "horizon"  # in a checkpoint of the Trainer


class TrainerCheckpoints:
    """A mixin for subclasses of ``transformers.Trainer``: save and load the state of a streamed model and of our optimizers."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler. Before training, reject one whose state could not be saved, if checkpoints will have it."""
        trainer: Any = self
        scheduler = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        saves = getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy) != "no"
        if trainer.streamed_optimizer is not None and saves and not trainer.args.save_only_model:
            kind = type(getattr(scheduler, "scheduler", scheduler)).__name__
            to_plain(scheduler.state_dict(), f"the state of the scheduler {kind}")
        return scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the exact state in our format, if the optimizer is one of ours."""
        trainer: Any = self
        optimizer = trainer.streamed_optimizer
        if optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = {"scheduler": trainer.lr_scheduler.state_dict()}
        save_checkpoint(Path(output_dir) / FOLDER, trainer.model, optimizer, state=state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights, unless `_load_optimizer_and_scheduler` will load them with the exact state."""
        if not _state_folder(resume_from_checkpoint).is_dir():  # of another optimizer, or with save_only_model
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the exact state, with the weights. Raise ConfigError if a checkpoint and the trainer have optimizers of two kinds."""
        trainer: Any = self
        if checkpoint is None:
            return
        if trainer.streamed_optimizer is None:
            if _state_folder(checkpoint).is_dir():
                own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate has wrapped it
                raise ConfigError(
                    f"{checkpoint} was saved with an optimizer of horizon_lm, and this trainer has {type(own).__name__}; go on "
                    "with the same optim, or load the checkpoint's weights with from_pretrained, and train from there"
                )
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if not _state_folder(checkpoint).is_dir():
            raise ConfigError(
                f"{checkpoint} has no {FOLDER}/, the state of the optimizer: it was saved with save_only_model, or by another "
                "trainer. Load its weights with from_pretrained, and train from there."
            )
        # The Trainer restores random states itself, after the batches that it skips.
        state = load_checkpoint(_state_folder(checkpoint), trainer.model, trainer.streamed_optimizer, random=False)
        trainer.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint: from our state in it, else its adapters, else as the Trainer does."""
        trainer: Any = self
        checkpoint = trainer.state.best_model_checkpoint
        state_folder = _state_folder(checkpoint)
        if state_folder.is_dir():
            # All bits of the masters, which model.safetensors may not have.
            load_checkpoint(state_folder, trainer.model, random=False)
        elif hasattr(trainer.model, "peft_config"):
            load_adapters(trainer.model, Path(checkpoint))  # PEFT would replace parameters
        else:
            super()._load_best_model()  # type: ignore[misc]


def _state_folder(checkpoint: str) -> Path:
    """Return the folder of our state in a checkpoint of the Trainer."""
    return Path(checkpoint) / FOLDER
