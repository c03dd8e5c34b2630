"""The objectives of a run: its training loss, and the losses of its eval sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config import DpoConfig, RunConfig, SftConfig, TextConfig
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.objective.base import CustomObjective, Objective
from horizon_lm.runs.training.reporter import Reporter
from horizon_lm.runs.training.rows import RunData


@dataclass(frozen=True, slots=True)
class Objectives:
    """The objectives of a run.

    Attributes:
        training: the objective of the training rows.
        eval_sets: the objective of each eval set, by name.
        reference: log-probabilities of DPO's reference, float32 (n, 2), by the content hash of their rows.
    """

    training: Objective
    eval_sets: Mapping[str, Objective]
    reference: Mapping[str, torch.Tensor] = field(default_factory=dict)


def require_callable(custom_loss: Any) -> None:
    """Raise ConfigError if a custom loss is not a function."""
    if custom_loss is not None and not callable(custom_loss):
        raise ConfigError(
            f"objective is {custom_loss!r}, but in a call it is a function of the model and a batch; the setting of that name "
            'goes into the file, or into a mapping: train({"objective": "dpo", ...})'
        )


def make_objectives(
    config: RunConfig, model: Any, data: RunData, reporter: Reporter, custom_loss: Callable[..., Any] | None = None,
    reference: Mapping[str, torch.Tensor] | None = None,
) -> Objectives:  # fmt: skip
    """Return the objectives of a run. For DPO, compute the reference with ``model`` before it is trained.

    Args:
        config: settings of the run.
        model: the streamed model.
        data: the rows.
        reporter: reporter that shows the progress of the reference.
        custom_loss: a user's function to train with, as for `CustomObjective`.
        reference: DPO's reference from a checkpoint; None to compute it.
    """
    custom = CustomObjective(custom_loss) if custom_loss else None
    if isinstance(config, DpoConfig):
        return _dpo_objectives(config, model, data, reporter, custom, reference)
    from horizon_lm.runs.objective import sft

    return Objectives(custom or _token_objective(config), dict.fromkeys(data.eval_sets, sft.likelihood))


def _token_objective(config: RunConfig) -> Objective:
    """Return the training loss. Eval sets always use the plain likelihood, so that perplexity can be computed."""
    from horizon_lm.runs.objective import sft

    if isinstance(config, SftConfig) and config.loss_type == "dft":
        return sft.dft
    if isinstance(config, TextConfig) and config.label_smoothing_factor:
        return sft.SmoothedNll(config.label_smoothing_factor)
    return sft.nll


def _dpo_objectives(
    config: DpoConfig, model: Any, data: RunData, reporter: Reporter, custom: Objective | None,
    saved_reference: Mapping[str, torch.Tensor] | None,
) -> Objectives:  # fmt: skip
    """Return the objectives of DPO, with the reference's log-probabilities of their rows, which are computed unless they were saved. The
    arguments are the same as in `make_objectives`.
    """
    from horizon_lm.runs.objective.dpo import Dpo
    from horizon_lm.runs.objective.reference import ReferenceCache, lookup

    # New adapters change nothing yet, but adapters from a folder are a part of the model that the run starts from.
    with_adapters = config.adapter_name_or_path is not None
    cache = ReferenceCache(model, reporter.print, with_adapters) if saved_reference is None else None
    reference: dict[str, torch.Tensor] = {}  # of all rows, for the checkpoints

    def objective_of(name: str, rows: TokenTable, batch_size: int) -> Objective:
        """Return the loss of these rows, and add their log-probabilities to ``reference``."""
        if cache is None:
            assert saved_reference is not None
            logprobs = _saved_reference(saved_reference, name, rows)
        else:
            with reporter.progress(f"reference of {name}") as advance:
                logprobs = cache.logprobs(rows, batch_size, advance)
        reference[rows.content_hash] = torch.from_numpy(logprobs)
        return Dpo(config, lookup(logprobs))

    if cache is not None and cache.problem:
        reporter.print(f"reference: {cache.problem}, so the next run will compute it again")
    training = custom or objective_of("training data", data.training.packed, config.reference_batch_size)
    size = config.per_device_eval_batch_size
    eval_sets = {name: objective_of(name, rows, size) for name, rows in data.eval_sets.items()}
    return Objectives(training, eval_sets, reference)


def _saved_reference(saved_reference: Mapping[str, torch.Tensor], name: str, rows: TokenTable) -> np.ndarray:
    """Return the reference's log-probabilities of some rows, which a resumed run cannot compute again: its weights were trained."""
    if rows.content_hash not in saved_reference:
        raise ConfigError(
            f"the rows of {name} are not in the checkpoint, so it has no reference for them; resume with the same rows"
        )
    return saved_reference[rows.content_hash].numpy()
