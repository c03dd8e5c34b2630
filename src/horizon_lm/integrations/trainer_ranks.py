"""A Trainer with several processes, of which each keeps a part of a streamed model.

The Trainer expects DistributedDataParallel: a model that is wrapped, gradients that are averaged over the ranks, and files that
the first rank writes alone. A streamed model is not wrapped, sums gradients, and is saved by all ranks together.
"""

from collections.abc import Callable
from typing import Any

from horizon_lm.distributed.mesh import Mesh
from horizon_lm.engine.streamed import engine_of, forward_of
from horizon_lm.errors import ConfigError, StreamingError


def mesh_of(model: Any) -> Mesh:
    """Return the mesh of a streamed model."""
    mesh: Mesh = engine_of(model).mesh
    return mesh


class TrainerRanks:
    """A mixin for subclasses of ``transformers.Trainer``."""

    def prepare_ranks(self) -> None:
        """Let accelerate take the model as it is, and scale losses before they are differentiated, if there are several processes.

        Raises:
            ConfigError: a setting is not supported with several processes.
            StreamingError: the model was streamed for another number of processes.
        """
        trainer: Any = self
        mesh, num_processes = mesh_of(trainer.model), trainer.accelerator.num_processes
        if num_processes != mesh.size:
            raise StreamingError(
                f"the trainer has {num_processes} processes, but the model was streamed for {mesh.size}; "
                "call torch.distributed.init_process_group() before the model is streamed"
            )
        if mesh.size == 1 or getattr(trainer.model, "_is_accelerate_prepared", False):
            return
        _reject_unsupported(trainer)
        trainer.model._is_accelerate_prepared = True  # accelerate would wrap it in DistributedDataParallel
        forward_of(trainer.model).expects_mean_loss = False  # losses are scaled here
        trainer.accelerator.backward = _averaged(trainer.accelerator.backward, mesh.size)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model: all ranks take part, and the first rank writes the files."""
        trainer: Any = self
        if trainer.args.should_save or mesh_of(trainer.model).size == 1:
            super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]
            return
        trainer.model.save_pretrained(output_dir or trainer.args.output_dir, is_main_process=False)


def _averaged(backward: Callable[..., None], num_ranks: int) -> Callable[..., None]:
    """Return an `Accelerator.backward` whose gradients, summed over the ranks, are the gradients of the mean of their losses."""

    def averaged(loss: Any, **kwargs: Any) -> None:
        backward(loss / num_ranks, **kwargs)

    return averaged


def _reject_unsupported(trainer: Any) -> None:
    """Raise ConfigError if a setting of the trainer works with one process only."""
    args = trainer.args
    if getattr(args, "num_generations", None):
        raise ConfigError(
            f"{type(trainer).__name__} generates, and its groups of answers are not proven with several processes; use one process"
        )
    if getattr(args, "sync_ref_model", False):
        raise ConfigError("sync_ref_model reads whole weights, of which each process has a part; use one process")
    if args.load_best_model_at_end and args.save_only_model:
        raise ConfigError(
            "load_best_model_at_end needs whole checkpoints with several processes; set save_only_model=False, or load the best "
            "folder after the training"
        )
