"""Compute the reference of preference trainers before training.

TRL compares the policy with the model that it started from. By default it loads that model a second time, onto the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.integrations.trainer_ranks import mesh_of
from horizon_lm.runs.objective.reference import model_key

HASH_MODEL = "hash_module"  # by which TRL's trainers name the reference that they keep on disk
PRECOMPUTE = "precompute_ref_log_probs"


def prepare_reference(arguments: Mapping[str, Any]) -> None:
    """Set ``precompute_ref_log_probs`` in the arguments of a trainer that would otherwise load a reference model, or compute
    the reference in each step with the adapters off.

    Args:
        arguments: of the trainer's constructor, by name.

    Raises:
        ConfigError: the trainer would copy adapters, of which several processes have parts.
    """
    from datasets import Dataset

    args, model = arguments.get("args"), arguments["model"]
    if mesh_of(model).size > 1 and hasattr(args, PRECOMPUTE) and hasattr(model, "peft_config"):
        raise ConfigError(
            "trainers of preferences copy adapters for their reference, of which each process has a part; train with "
            "horizon-lm (objective: dpo), which needs no copy, or with one process"
        )
    datasets = [arguments.get("train_dataset"), *_eval_sets(arguments.get("eval_dataset"))]
    can_precompute = all(isinstance(each, Dataset) for each in datasets) and not hasattr(model.config, "vision_config")
    if mesh_of(model).size > 1:  # the first rank writes a file, which the others do not find if rows are in memory
        can_precompute = can_precompute and all(each.cache_files for each in datasets)
    is_constant = not getattr(args, "sync_ref_model", False)
    is_left_to_trl = getattr(args, PRECOMPUTE, None) is False and arguments.get("ref_model") is None
    if is_left_to_trl and is_constant and can_precompute:
        setattr(args, PRECOMPUTE, True)
        print(
            f"{PRECOMPUTE}=True: the reference is the model with its present weights, computed once before training, and takes no "
            "memory then"
        )


def _eval_sets(dataset: Any) -> list[Any]:
    """Return the eval sets of a trainer, of which there may be none, one or several by name."""
    if dataset is None:
        return []
    return list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]


def hash_of_parts(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a replacement for a function that hashes a model's weights, of which several processes have parts."""

    def hash_model(model: Any) -> str:
        return original(model) if mesh_of(model).size == 1 else model_key(model)

    return hash_model
