"""The objective of a run, ready for its rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from horizon_lm.config import DpoConfig, RunConfig, SftConfig, TextConfig
from horizon_lm.data.loader import Batch
from horizon_lm.data.table import TokenTable
from horizon_lm.errors import ConfigError
from horizon_lm.objective.base import Objective, OwnObjective
from horizon_lm.training.reporter import Reporter
from horizon_lm.training.rows import RunData


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is learned.

    Attributes:
        training: of the rows to train on.
        held_out: of each held-out data set.
    """

    training: Objective
    held_out: Mapping[str, Objective]


def require_callable(own: Any) -> None:
    """ConfigError for an objective of one's own that is none."""
    if own is not None and not callable(own):
        raise ConfigError(
            f"objective is {own!r}, but in a call it is a function of the model and a batch; the setting of that name goes "
            'into the file, or into a mapping: train({"objective": "dpo", ...})'
        )


def make_objectives(
    config: RunConfig, model: Any, data: RunData, reporter: Reporter, own: Callable[..., Any] | None = None
) -> Objectives:
    """The objectives of a run. Before preferences are learned, the reference is computed with ``model`` as it is.

    Args:
        own: a user's function to train with, as `OwnObjective` has it.
    """
    if isinstance(config, DpoConfig):
        return _dpo(config, model, data, reporter, own)
    from horizon_lm.objective import tokens

    return Objectives(OwnObjective(own) if own else _of_tokens(config), dict.fromkeys(data.held_out, tokens.likelihood))


def _of_tokens(config: RunConfig) -> Objective:
    """The loss to train with; that of held-out rows is always the likelihood, of which perplexity is made."""
    from horizon_lm.objective import tokens

    if isinstance(config, SftConfig) and config.loss_type == "dft":
        return tokens.dft
    if isinstance(config, TextConfig) and config.label_smoothing_factor:
        return tokens.SmoothedNll(config.label_smoothing_factor)
    return tokens.nll


def _dpo(
    config: DpoConfig, model: Any, data: RunData, reporter: Reporter, own: Callable[..., Any] | None
) -> Objectives:
    from horizon_lm.objective.dpo import Dpo
    from horizon_lm.objective.reference import ReferenceCache, lookup

    cache = ReferenceCache(model, reporter.say)

    def of(name: str, rows: TokenTable, batch_size: int) -> Objective:
        with reporter.progress(f"reference of {name}") as advance:
            return Dpo(config, lookup(cache.logprobs(rows, batch_size, advance)))

    if cache.problem:
        reporter.say(f"reference: {cache.problem}, so it will have to be computed again in the next run")
    learn = OwnObjective(own) if own else of("training data", data.training.packed, config.reference_batch_size)
    size = config.per_device_eval_batch_size
    return Objectives(learn, {name: of(name, rows, size) for name, rows in data.held_out.items()})


def check_gradients(model: Any, objectives: Objectives, batch: Batch, config: RunConfig, reporter: Reporter) -> None:
    """Compare some blocks with plain autograd in a backward of a batch, and leave the model as it was.

    Raises:
        GradientMismatchError: a gradient is off by more than rounding.
    """
    if not config.check_gradients:
        return
    model._horizon.check_gradients(config.check_gradients)
    objectives.training(model, batch).value.backward()
    model.zero_grad()
    reporter.say(
        f"check_gradients: {config.check_gradients} blocks have the gradients of plain autograd on this device"
    )
