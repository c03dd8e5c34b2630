"""Stream the models that a trainer only evaluates beside the one that it trains: references, teachers and reward models.

TRL loads such a model by its name, or takes one from the user, and moves it to the device as a whole.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from horizon_lm.common.quantities import format_bytes
from horizon_lm.engine.opening.loading import from_pretrained, stream
from horizon_lm.engine.streamed import engine_of, is_streamed
from horizon_lm.errors import ConfigError, DoesNotFitError, ModelNotSupportedError
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


COPY_MODEL = "create_reference_model"  # by which they copy the one that is trained


class EvaluatedModels:
    """A mixin for subclasses of ``transformers.Trainer``: streams each model that accelerate prepares for evaluation alone.

    Attributes:
        _evaluated: these models.
    """

    _evaluated: tuple[Any, ...] = ()

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and replace its `prepare_model`: models that are only evaluated are streamed, not moved."""
        trainer: Any = self
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare = trainer.accelerator.prepare_model

        def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            if evaluation_mode and model is not trainer.model:
                stream_beside(model, trainer.model)
                self._evaluated = (*self._evaluated, model)
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

        trainer.accelerator.prepare_model = prepare_model

    def reserve_device_memory(self) -> None:
        """Compute a token with each streamed model, so that it takes its buffers before the rest of the memory is planned for training."""
        for model in filter(is_streamed, self._evaluated):
            device = engine_of(model).device
            if device.spare_bytes() is not None:
                with torch.no_grad():
                    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device.torch_device))


def stream_beside(model: Any, trained: Any) -> None:
    """Stream a model that is evaluated beside the trained one, and print where its weights are.

    A model that is streamed already is left as it is, and one that cannot be streamed, such as an encoder, stays whole on the device.

    Raises:
        DoesNotFitError: the device has no room for a model that cannot be streamed.
    """
    from transformers import PreTrainedModel

    without_adapters = model.get_base_model() if hasattr(model, "get_base_model") else model
    if is_streamed(model) or not isinstance(without_adapters, PreTrainedModel):
        return
    num_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    name = f"{type(without_adapters).__name__} {without_adapters.config.name_or_path}".strip()
    device = engine_of(trained).device
    try:
        stream(model.requires_grad_(False), str(device.torch_device), _precision(trained, without_adapters.dtype))
    except ModelNotSupportedError as error:
        spare = device.spare_bytes()
        if spare is not None and num_bytes > spare:
            raise DoesNotFitError(
                f"{name} is evaluated in the training and takes {format_bytes(num_bytes)} on the device, which has "
                f"{format_bytes(spare)} left; it is not streamed: {error}"
            ) from error
        print(
            f"{name} is evaluated in the training as a whole on the device, {format_bytes(num_bytes)}; it is not streamed: {error}"
        )
        return
    print(f"{name} is evaluated in the training, and streamed, too: its {format_bytes(num_bytes)} stay in host memory")


def _precision(trained: Any, dtype: torch.dtype = torch.float32) -> str:
    """Return the precision of a model that is evaluated beside the trained one: ``float32`` if both are in float32, else ``bf16``.

    Args:
        trained: the trained model.
        dtype: dtype of the evaluated model; for a model that is read from a folder, the trained one alone decides.
    """
    return "float32" if engine_of(trained).store.precision.name == "float32" and dtype == torch.float32 else "bf16"


def streamed_like(trained: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that replaces TRL's loader of a model by its name: the replacement streams the model to the device of the trained
    model, frozen.
    """

    def replace_loader(_original: Callable[..., Any]) -> Callable[..., Any]:
        def load(name: str, *_classes: Any, **kwargs: Any) -> Any:
            if not name:
                raise ConfigError(
                    "TRL loads the reference from the folder or hub id of the model, and this model has none; write it with "
                    "model.save_pretrained(folder) and open it with horizon_lm.from_pretrained(folder), or leave the reference "
                    "out (beta=0)"
                )
            options = {key: kwargs[key] for key in ("trust_remote_code", "revision") if kwargs.get(key)}
            loaded = from_pretrained(name, str(engine_of(trained).device.torch_device), _precision(trained), **options)
            return loaded.requires_grad_(False)

        return load

    return replace_loader


def copied_from(trained: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that replaces TRL's function for copying a model: the replacement copies the trained model without moving it.

    The copy is streamed from the trained model's folder, and then gets its present weights. Other models are copied as before.
    """

    def replace_copy(original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_model(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not trained or hasattr(model, "peft_config"):
                return original(model, *args, **kwargs)
            copied = streamed_like(model)(original)(model.config.name_or_path)
            copied.load_state_dict(model.state_dict())
            return copied.eval()

        return copy_model

    return replace_copy
