"""What a run is made of before its loop, besides its rows: device, tokenizer, model, optimizer."""

import math
import warnings
from pathlib import Path
from typing import Any

from horizon_lm.config import DpoConfig, RunConfig
from horizon_lm.errors import CheckpointWarning, ConfigError, UnprovenModelWarning, first_line
from horizon_lm.plan.plan import Plan
from horizon_lm.plan.residency import ExpectedBatch


def choose_device(name: str) -> str:
    """The device that ``auto`` stands for here; others as they are. ConfigError for one that is not here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use cpu, or auto")
    if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are only {torch.cuda.device_count()} CUDA devices")
    return name


def load_tokenizer(config: RunConfig) -> Any:
    """The tokenizer of the run's model, whose folder is checked on the way.

    Raises:
        ConfigError: no such model, or no tokenizer with it.
        ModelNotSupportedError: not a causal language model.
    """
    from horizon_lm.model import source

    folder = source.local_folder(config.model_name_or_path)
    if config.gguf_file is None:
        source.load_config(folder, config.trust_remote_code)  # refuse before minutes go into the data
    elif not (folder / config.gguf_file).is_file():
        raise ConfigError(f"gguf_file: {folder / config.gguf_file} is missing")
    tokenizer = open_tokenizer(folder, gguf_file=config.gguf_file, trust_remote_code=config.trust_remote_code)
    if config.chat_template_path is not None:
        tokenizer.chat_template = _chat_template(config.chat_template_path)
    return tokenizer


def _chat_template(path: str) -> Any:
    """A chat template from a file, or of the tokenizer of a model. ConfigError if there is none."""
    from horizon_lm.model import source

    file = Path(path).expanduser()
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template_path: {path} cannot be read ({first_line(error)})") from error
    try:
        template = open_tokenizer(source.local_folder(path)).chat_template
    except ConfigError as error:
        raise ConfigError(
            f"chat_template_path: {path} is neither a file, nor the folder or hub id of a model with a tokenizer"
        ) from error
    if template is None:
        raise ConfigError(f"chat_template_path: the tokenizer of {path} has no chat template")
    return template


def open_tokenizer(folder: Path, **options: Any) -> Any:
    """The tokenizer in a folder; ConfigError if it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **{k: v for k, v in options.items() if v})
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model_name_or_path: {folder} has no tokenizer that can be read ({first_line(error)}); copy "
            "tokenizer.json and tokenizer_config.json into it"
        ) from error


def check_weights(config: RunConfig) -> list[str]:
    """Check the headers of the weights of the run's model, if they are on this machine; return what is worth a warning.

    Raises:
        ConfigError: weights that do not fit the model's config, or cannot be read.
    """
    from horizon_lm.model import source
    from horizon_lm.store.check import check_folder

    folder = source.folder_here(config.model_name_or_path)
    if folder is None or config.gguf_file is not None:
        return []
    model_config = source.load_config(folder, config.trust_remote_code)
    options = {"trust_remote_code": config.trust_remote_code or None}
    return check_folder(source.skeleton_of(model_config, str(folder), **options), folder)


def load_model(config: RunConfig) -> Any:
    """The run's model, streamed and in the mode that it is trained in. What `check_weights` returned is not said again."""
    import transformers

    from horizon_lm.model.trainable import freeze

    transformers.set_seed(config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        warnings.simplefilter("ignore", UnprovenModelWarning)  # the plan has said it
        model = _open(config)
    freeze(model, config.trainable)
    # Evaluation mode is training without dropout; nothing else of a model depends on it.
    return model.train(not (isinstance(config, DpoConfig) and config.disable_dropout))


def expect(model: Any, plan: Plan) -> None:
    """Tell a streamed model the largest batch of its run, so that buffers need not be replaced by larger ones on the way."""
    batch = ExpectedBatch(plan.step.tokens, plan.request.distinct_tokens)
    model._horizon.engine.expect(batch)


def _open(config: RunConfig) -> Any:
    import torch

    import horizon_lm

    return horizon_lm.from_pretrained(
        config.model_name_or_path,
        device=choose_device(config.device),
        precision=config.precision,
        device_micro_batch_size=config.device_micro_batch_size,
        head=config.head,
        head_chunk_tokens=config.head_chunk_tokens,
        boundaries=config.boundaries,
        held_blocks=config.held_blocks,
        held_graphs=config.held_graphs,
        mlp_chunk_tokens=config.mlp_chunk_tokens,
        compile=config.compile,
        device_memory=config.device_memory,
        gguf_file=config.gguf_file,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=config.attn_implementation,
        allow_unproven_model=config.allow_unproven_model,
        grad_dtype=None if config.grad_dtype is None else getattr(torch, config.grad_dtype),
    )


def build_optimizer(model: Any, config: RunConfig, num_steps: int) -> tuple[Any, Any]:
    """AdamW and the schedule of its learning rate."""
    from transformers import get_scheduler

    import horizon_lm

    optimizer = horizon_lm.AdamW(
        model,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm or None,
        params=_decay_groups(model, config.weight_decay),
        seed=config.seed,
        moments=config.moments,
        non_finite=config.non_finite,
        max_consecutive_skips=config.max_consecutive_skips,
        update_in_backward=config.update_in_backward,
    )
    num_warmup_steps = in_steps(config.warmup_steps, num_steps)
    try:
        scheduler = get_scheduler(
            config.lr_scheduler_type, optimizer, num_warmup_steps, num_steps, config.lr_scheduler_kwargs
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_kwargs: {config.lr_scheduler_type} refuses them: {first_line(error)}"
        ) from error
    return optimizer, scheduler


def _decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]] | None:
    """transformers' rule: biases and the weights of norms do not decay."""
    if not weight_decay:
        return None
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    not_decayed = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(model, [nn.LayerNorm], not_decayed))
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in params if name in decayed], "weight_decay": weight_decay},
        {"params": [param for name, param in params if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def in_steps(number_or_share: float, num_steps: int) -> int:
    """transformers' rule for settings that are a number of steps, or a share of all steps below 1."""
    return int(number_or_share) if number_or_share >= 1 else math.ceil(number_or_share * num_steps)
