"""Build the device, tokenizer, model, optimizer and objective of a run."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from horizon_lm.config import DpoConfig, RunConfig, SftConfig, TextConfig
from horizon_lm.data.batch import Batch
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.distributed.rendezvous import is_first_of_machine
from horizon_lm.energy import EnergyMeter
from horizon_lm.engine.streamed import engine_of, forward_of
from horizon_lm.errors import CheckpointWarning, ConfigError, HorizonError, UnprovenModelWarning, first_line
from horizon_lm.model.source import ModelSource
from horizon_lm.objective.base import CustomObjective, Objective
from horizon_lm.paths import exists
from horizon_lm.planning.plan import Plan
from horizon_lm.planning.residency import ExpectedBatch
from horizon_lm.quantities import counted
from horizon_lm.streaming_options import StreamingOptions
from horizon_lm.training.intervals import num_steps_of
from horizon_lm.training.reporter import Reporter
from horizon_lm.training.rows import RunData

_LARGEST_TOKEN = 2**31 - 1  # rows are kept as int32


def choose_device(name: str) -> str:
    """Return the device of this process: ``auto`` is a GPU if there is one, and each process of torchrun has its own GPU.

    Raises:
        ConfigError: this machine does not have it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use cpu, or auto")
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
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template_path: {path} cannot be read ({first_line(error)})") from error
    try:
        template = open_tokenizer(hub.local_folder(path)).chat_template
    except ConfigError as error:
        raise ConfigError(
            f"chat_template_path: {path} is neither a file, nor the folder or hub id of a model with a tokenizer"
        ) from error
    if template is None:
        raise ConfigError(f"chat_template_path: the tokenizer of {path} has no chat template")
    return template


def open_tokenizer(folder: Path, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """Load the tokenizer in a folder. Raise ConfigError if there is none."""
    from transformers import AutoTokenizer

    from horizon_lm.data.encoding_panics import report_panics
    from horizon_lm.data.template_limits import limit_templates
    from horizon_lm.data.token_growth import require_little_growth, require_little_growth_of_file
    from horizon_lm.model.folder import code_remedy, gguf_remedy, require_model_files

    limit_templates()
    report_panics()
    require_model_files(folder)
    require_little_growth_of_file(folder / "tokenizer.json")
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        # trust_remote_code is passed even if it is False: without it, transformers asks on standard input.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest > _LARGEST_TOKEN:
            raise ValueError(f"it has a token with the number {largest:,}")
        require_little_growth(tokenizer, folder / "tokenizer.json")
        return tokenizer
    except HorizonError:
        raise
    except Exception as error:  # the parsers of transformers and tokenizers raise anything
        raise ConfigError(
            f"{folder} has no tokenizer that can be read ({first_line(error)})"
            f"{code_remedy(error) or gguf_remedy(folder) or '; copy tokenizer.json and tokenizer_config.json into it'}"
        ) from error


def check_weights(config: RunConfig, model: ModelSource) -> list[str]:
    """Check the headers of the model's weights, if they are on this machine, and return warnings.

    Raises:
        ConfigError: the weights do not fit the model's config, or cannot be read.
    """
    from horizon_lm.store.checkpoint_loader import check_folder

    if model.folder is None or config.gguf_file is not None:
        return []
    return check_folder(model.skeleton(), model.folder, model.quantization)


def load_model(config: RunConfig, source: ModelSource, reads_weights: bool = True, mesh: Any = None) -> Any:
    """Load the streamed model of a run in training mode. Warnings already returned by `check_weights` are not repeated.

    Args:
        config: settings of the run.
        source: the model, whose files are on this machine.
        reads_weights: read the weights; otherwise a checkpoint will restore them.
        mesh: the ranks that train together; None for one.
    """
    import transformers
    from transformers.integrations import activate_neftune

    from horizon_lm.model.freezing import freeze

    transformers.set_seed(config.seed)
    with warnings.catch_warnings():
        if config.gguf_file is None:  # such a file is not checked before
            warnings.simplefilter("ignore", CheckpointWarning)
        warnings.simplefilter("ignore", UnprovenModelWarning)  # already in the lines of the plan
        model = _open(config, source, reads_weights, mesh)
    freeze(model, config.trainable)
    if isinstance(config, TextConfig) and config.neftune_noise_alpha is not None:
        activate_neftune(model, config.neftune_noise_alpha)  # embeddings run their hooks, as in a plain model
    # Evaluation mode makes a model train without dropout and changes nothing else.
    return model.train(not (isinstance(config, DpoConfig) and config.disable_dropout))


def has_dropout(model: Any) -> bool:
    """Return whether a model in its present mode drops values: in a module, or as its config says."""
    settings = model.config.get_text_config().to_dict()
    in_config = [value for name, value in settings.items() if name.endswith(("dropout", "pdrop"))]
    in_modules = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return model.training and any(isinstance(each, float) and each > 0 for each in in_config + in_modules)


def reserve_buffers(model: Any, plan: Plan) -> None:
    """Announce the largest batch of a run, so that no buffer has to be replaced by a larger one later."""
    engine_of(model).expect_batch(ExpectedBatch(plan.step.tokens, plan.request.distinct_tokens))


def _open(config: RunConfig, source: ModelSource, reads_weights: bool, mesh: Any) -> Any:
    """Open the model of a run, with its adapters."""
    from horizon_lm.engine.opening.model_opening import OpenRequest, open_model
    from horizon_lm.model.adapters import Adapters
    from horizon_lm.model.quantization import requested_quantization

    adapters = Adapters.of(config)
    request = OpenRequest(
        name=config.model_name_or_path,
        source=source,
        gguf_file=config.gguf_file,
        trust_remote_code=config.trust_remote_code,
        adapters=adapters,
        reads_weights=reads_weights or adapters is not None,  # a checkpoint has the adapters alone
        options={
            "device": choose_device(config.device), **StreamingOptions.of(config), "device_mesh": mesh,
            "attn_implementation": config.attn_implementation, "allow_unproven_model": config.allow_unproven_model,
            "quantization_config": requested_quantization(config),
        },
    )  # fmt: skip
    return open_model(request)


def build_optimizer(model: Any, config: RunConfig, num_steps: int) -> tuple[Any, Any]:
    """Build the optimizer of a run and its learning-rate scheduler."""
    from horizon_lm.optim.choosing import make_optimizer

    optimizer = make_optimizer(
        config.optim, model, config, max_grad_norm=config.max_grad_norm or None,
        params=_decay_groups(model, config.weight_decay), seed=config.seed, moments=config.moments,
        non_finite=config.non_finite, max_consecutive_skips=config.max_consecutive_skips,
        update_in_backward=config.update_in_backward,
    )  # fmt: skip
    return optimizer, _build_scheduler(optimizer, config, num_steps)


def _build_scheduler(optimizer: Any, config: RunConfig, num_steps: int) -> Any:
    from transformers import get_scheduler

    num_warmup_steps = num_steps_of(config.warmup_steps, num_steps)
    with _calling_schedule(config):
        return get_scheduler(
            config.lr_scheduler_type, optimizer, num_warmup_steps, num_steps, config.lr_scheduler_kwargs
        )


@contextmanager
def _calling_schedule(config: RunConfig) -> Iterator[None]:
    """Context manager: raise ConfigError for what the code of a schedule raises about its arguments."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"lr_scheduler_kwargs: rejected by {config.lr_scheduler_type}: {first_line(error)}"
        ) from error


_RATES = 100  # of a schedule that are computed
_SMALLEST_PEAK = 0.001  # share of the learning rate that a run reaches at least


def require_sane_schedule(config: RunConfig, num_steps: int) -> None:
    """Raise ConfigError if the learning rate of a run never gets near its peak, or is not between 0 and the peak."""
    num_warmup_steps = num_steps_of(config.warmup_steps, num_steps)
    # A few steps of a run are often tried with the warm-up of the whole run, so a warm-up that does not end is no mistake yet.
    if num_warmup_steps * _SMALLEST_PEAK > num_steps:
        raise ConfigError(
            f"warmup_steps: {num_warmup_steps:,}: the learning rate would not reach {_SMALLEST_PEAK:.1%} of its peak in the "
            f"{counted(num_steps, 'step')} of the run; set a fraction, such as 0.03"
        )
    given = config.lr_scheduler_kwargs or {}
    for name in ("num_cycles", "num_decay_steps"):
        if isinstance(given.get(name), int | float) and given[name] > num_steps:
            raise ConfigError(
                f"lr_scheduler_kwargs: {name}: {given[name]:g}: is more than the {counted(num_steps, 'step')} of the run; set a smaller number"
            )
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=config.learning_rate)
    scheduler = _build_scheduler(optimizer, config, num_steps)
    for step in range(0, num_steps, -(-num_steps // _RATES)):
        with _calling_schedule(config):
            share = scheduler.lr_lambdas[0](step)
        if not (isinstance(share, int | float) and 0 <= share <= 1 + 1e-9):
            raise ConfigError(
                f"lr_scheduler_kwargs: the learning rate of step {step + 1:,} would be {share:g} times learning_rate; correct them"
            )


def _decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]] | None:
    """Return the parameter groups by transformers' rule: no weight decay for biases and norms. None without decay."""
    if not weight_decay:
        return None
    from transformers.trainer_pt_utils import get_parameter_names

    from horizon_lm.optim.choosing import decay_groups

    not_decayed = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return decay_groups(model, set(get_parameter_names(model, [nn.LayerNorm], not_decayed)), weight_decay)


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
    if isinstance(config, DpoConfig):
        return _dpo_objectives(config, model, data, reporter, custom_loss, reference)
    from horizon_lm.objective import sft

    training = CustomObjective(custom_loss) if custom_loss else _token_objective(config)
    return Objectives(training, dict.fromkeys(data.eval_sets, sft.likelihood))


def _token_objective(config: RunConfig) -> Objective:
    """Return the training loss. Eval sets always use the plain likelihood, so that perplexity can be computed."""
    from horizon_lm.objective import sft

    if isinstance(config, SftConfig) and config.loss_type == "dft":
        return sft.dft
    if isinstance(config, TextConfig) and config.label_smoothing_factor:
        return sft.SmoothedNll(config.label_smoothing_factor)
    return sft.nll


def _dpo_objectives(
    config: DpoConfig, model: Any, data: RunData, reporter: Reporter, custom_loss: Callable[..., Any] | None,
    saved: Mapping[str, torch.Tensor] | None,
) -> Objectives:  # fmt: skip
    """Return the objectives of DPO, with the log-probabilities of the reference for their rows, computed or saved."""
    from horizon_lm.objective.dpo import Dpo
    from horizon_lm.objective.reference import ReferenceCache, lookup

    cache = ReferenceCache(model, reporter.print) if saved is None else None
    values: dict[str, torch.Tensor] = {}

    def reference(name: str, rows: TokenTable, batch_size: int) -> np.ndarray:
        if cache is None:
            return _saved_reference(saved or {}, name, rows)
        with reporter.progress(f"reference of {name}") as advance:
            return cache.logprobs(rows, batch_size, advance)

    def objective_of(name: str, rows: TokenTable, batch_size: int) -> Objective:
        found = reference(name, rows, batch_size)
        values[rows.content_hash] = torch.from_numpy(found)
        return Dpo(config, lookup(found))

    if cache is not None and cache.problem:
        reporter.print(f"reference: {cache.problem}, so the next run will compute it again")
    if custom_loss:
        training: Objective = CustomObjective(custom_loss)
    else:
        training = objective_of("training data", data.training.packed, config.reference_batch_size)
    size = config.per_device_eval_batch_size
    eval_sets = {name: objective_of(name, rows, size) for name, rows in data.eval_sets.items()}
    return Objectives(training, eval_sets, values)


def _saved_reference(saved: Mapping[str, torch.Tensor], name: str, rows: TokenTable) -> np.ndarray:
    """Return the reference of some rows from a checkpoint, whose weights are not those of the reference any more."""
    if rows.content_hash not in saved:
        raise ConfigError(
            f"the rows of {name} are not in the checkpoint, so it has no reference for them; resume with the same rows"
        )
    return saved[rows.content_hash].numpy()


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
    forward_of(model).check_gradients(config.check_gradients)
    objectives.training(model, batch).value.backward()
    model.zero_grad()
    reporter.print(
        f"check_gradients: the gradients of {counted(config.check_gradients, 'block')} equal those of plain autograd on this device"
    )
