"""The objective of a run, ready for its rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horizon_lm.config import DpoConfig, RunConfig, SftConfig, TextConfig
from horizon_lm.objective.base import Objective
from horizon_lm.training.metrics import Reporter
from horizon_lm.training.setup import RunData


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is learned.

    Attributes:
        training: of the rows to train on.
        held_out: of each held-out data set.
    """

    training: Objective
    held_out: Mapping[str, Objective]


def make_objectives(config: RunConfig, model: Any, data: RunData, reporter: Reporter) -> Objectives:
    """The objectives of a run. Before preferences are learned, the reference is computed with ``model`` as it is."""
    if isinstance(config, DpoConfig):
        return _dpo(config, model, data, reporter)
    learn, judge = _of_tokens(config)
    return Objectives(learn, dict.fromkeys(data.held_out, judge))


def _of_tokens(config: RunConfig) -> tuple[Objective, Objective]:
    """The loss to train with, and that of held-out rows: always the likelihood, of which perplexity is made."""
    from horizon_lm.objective import tokens

    if isinstance(config, SftConfig) and config.loss_type == "dft":
        return tokens.dft, tokens.nll
    if isinstance(config, TextConfig) and config.label_smoothing_factor:
        return tokens.SmoothedNll(config.label_smoothing_factor), tokens.nll
    return tokens.nll, tokens.nll


def _dpo(config: DpoConfig, model: Any, data: RunData, reporter: Reporter) -> Objectives:
    from horizon_lm.model import source
    from horizon_lm.objective.dpo import Dpo
    from horizon_lm.objective.reference import lookup, model_key, reference_logprobs

    key = model_key(
        source.local_folder(config.model_name_or_path), config.gguf_file, config.precision, model.config._attn_implementation,
        str(model._horizon.engine.options.compute_dtype), config.device.partition(":")[0],
    )  # fmt: skip
    batch_size = config.precompute_ref_batch_size or config.per_device_train_batch_size

    def of(name: str, rows: Any) -> Objective:
        with reporter.progress(f"reference of {name}") as advance:
            return Dpo(config, lookup(reference_logprobs(model, rows, batch_size, key, advance)))

    learn = of("training data", data.loader.rows)
    return Objectives(learn, {name: of(name, rows) for name, rows in data.held_out.items()})
