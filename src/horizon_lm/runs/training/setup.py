"""The device, tokenizer and model of a run."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.common.paths import exists
from horizon_lm.common.quantities import counted
from horizon_lm.common.streaming_options import StreamingOptions
from horizon_lm.distributed.rendezvous import is_first_of_machine
from horizon_lm.engine.streamed import engine_of, forward_of
from horizon_lm.errors import CheckpointWarning, ConfigError, UnprovenModelWarning
from horizon_lm.model.source import ModelSource
from horizon_lm.runs.config import DpoConfig, RunConfig, TextConfig
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.chat_template import read_template
from horizon_lm.runs.data.tokenizer_opening import open_tokenizer
from horizon_lm.runs.training.energy import EnergyMeter
from horizon_lm.runs.training.objectives import Objectives
from horizon_lm.runs.training.reporter import Reporter


def choose_device(name: str, elsewhere: str = "") -> str:
    """Return the device of this process: ``auto`` is a GPU if there is one, and each process of torchrun has its own GPU.

    Args:
        name: the device of the settings.
        elsewhere: a further remedy if there is no GPU.

    Raises:
        ConfigError: this machine does not have it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use cpu, or auto{elsewhere}")
    if name == "cuda" and (local := os.environ.get("LOCAL_RANK")):
        name = f"cuda:{local}"
    if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but torch finds only {counted(torch.cuda.device_count(), 'CUDA device')}"
        )
    return name


def load_tokenizer(config: RunConfig, model: ModelSource) -> Any:
    """Load the tokenizer of the run's model.

    Args:
        config: settings of the run.
        model: the model, whose files are on this machine.

    Raises:
        ConfigError: there is no tokenizer, or no chat template at the place that the settings name.
    """
    assert model.folder is not None
    tokenizer = open_tokenizer(model.folder, gguf_file=config.gguf_file, trust_remote_code=config.trust_remote_code)
    if config.chat_template_path is not None:
        tokenizer.chat_template = _chat_template(config.chat_template_path)
    return tokenizer


def _chat_template(path: str) -> Any:
    """Read a chat template from a file, or from the tokenizer of a model. Raise ConfigError if there is none."""
    from horizon_lm.model import hub

    if exists(path) and (file := Path(path).expanduser()).is_file():
        return read_template(file, path)
    try:
        template = open_tokenizer(hub.local_folder(path)).chat_template
    except ConfigError as error:
        raise ConfigError(
            f"chat_template_path: {path} is neither a file, nor the folder or hub id of a model with a tokenizer"
        ) from error
    if template is None:
        raise ConfigError(f"chat_template_path: the tokenizer of {path} has no chat template")
    return template


def check_weights(config: RunConfig, model: ModelSource) -> list[str]:
    """Check the headers of the model's weights, if they are on this machine, and return warnings.

    Raises:
        ConfigError: the weights do not fit the model's config, or cannot be read.
    """
    from horizon_lm.model.files.checkpoint_loader import check_folder

    if model.folder is None or config.gguf_file is not None:
        return []
    return check_folder(model.skeleton(), model.folder, model.quantization)


def load_model(config: RunConfig, source: ModelSource, reads_weights: bool = True, mesh: Any = None) -> Any:
    """Load the streamed model of a run in training mode. Warnings already returned by `check_weights` are not repeated.

    Args:
        config: settings of the run.
        source: the model, whose files are on this machine.
        reads_weights: read the weights; otherwise a checkpoint will restore them.
        mesh: the ranks that train together; None for those of torch.distributed.
    """
    import transformers
    from transformers.integrations import activate_neftune

    from horizon_lm.engine.opening.model_opening import open_model

    transformers.set_seed(config.seed)
    with warnings.catch_warnings():
        if config.gguf_file is None:  # `check_weights` has not read a GGUF file
            warnings.simplefilter("ignore", CheckpointWarning)
        warnings.simplefilter("ignore", UnprovenModelWarning)  # already in the lines of the plan
        model = open_model(_open_request(config, source, reads_weights, mesh))
    if isinstance(config, TextConfig) and config.neftune_noise_alpha is not None:
        activate_neftune(model, config.neftune_noise_alpha)  # embeddings run their hooks, as in a plain model
    # Evaluation mode makes a model train without dropout and changes nothing else.
    return model.train(not (isinstance(config, DpoConfig) and config.disable_dropout))


def reject_images(model: Any, given: RunConfig, config: RunConfig) -> None:
    """Let training steps with images raise StreamingError, if a run freezes components because its rows have none.

    Args:
        model: the streamed model.
        given: the settings as the user has set them.
        config: the settings with those that were settled when the rows were read.
    """
    from horizon_lm.model.adapter_kinds import adapted_model
    from horizon_lm.model.components import frozen_components, reject_gradients

    if unreached := frozen_components(config) - frozen_components(given):
        reject_gradients(adapted_model(model), unreached)


def has_dropout(model: Any) -> bool:
    """Return whether a model in its present mode drops values: a dropout module, or a rate in its config, is above 0."""
    settings = model.config.get_text_config().to_dict()
    in_config = [value for name, value in settings.items() if name.endswith(("dropout", "pdrop"))]
    in_modules = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return model.training and any(isinstance(each, float) and each > 0 for each in in_config + in_modules)


def _open_request(config: RunConfig, source: ModelSource, reads_weights: bool, mesh: Any) -> Any:
    """Return the request to open the model of a run, with its adapters."""
    from horizon_lm.engine.opening.model_opening import OpenRequest
    from horizon_lm.model.adapters import Adapters
    from horizon_lm.model.components import frozen_components
    from horizon_lm.model.freezing import freeze
    from horizon_lm.model.quantization import requested_quantization

    adapters = Adapters.of(config)
    return OpenRequest(
        name=config.model_name_or_path, source=source, gguf_file=config.gguf_file,
        trust_remote_code=config.trust_remote_code, adapters=adapters,
        # The base of adapters is frozen in any case.
        freeze=None if adapters is not None else partial(freeze, trainable=config.trainable, frozen=frozen_components(config)),
        reads_weights=reads_weights or adapters is not None,  # a checkpoint has the adapters alone
        options={
            "device": choose_device(config.device), **StreamingOptions.of(config), "device_mesh": mesh,
            "attn_implementation": config.attn_implementation, "allow_unproven_model": config.allow_unproven_model,
            "quantization_config": requested_quantization(config),
        },
    )  # fmt: skip


def open_meter(model: Any) -> EnergyMeter:
    """Return a meter of the energy of the model's device and, in one process of each machine, of the host."""
    device = engine_of(model).device.torch_device
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return EnergyMeter(gpu, with_host=is_first_of_machine())


def check_gradients(model: Any, objectives: Objectives, batch: Batch, config: RunConfig, reporter: Reporter) -> None:
    """Compare the gradients of some blocks with plain autograd on a batch. The model is left unchanged.

    Raises:
        GradientMismatchError: a gradient differs by more than rounding errors.
    """
    if not config.check_gradients:
        return
    forward_of(model).check_gradients(config.check_gradients)  # they are compared in the next pass
    objectives.training(model, batch).value.backward()
    model.zero_grad()
    reporter.print(
        f"check_gradients: the gradients of {counted(config.check_gradients, 'block')} equal those of plain autograd on this device"
    )
