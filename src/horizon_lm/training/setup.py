"""What a run is made of before its loop: tokenizer, rows, model, optimizer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from horizon_lm.config import DpoConfig, RunConfig, SftConfig, TextConfig
from horizon_lm.data.audit import Finding, audit
from horizon_lm.data.loader import Loader, Sampler
from horizon_lm.data.prepare import Recipe, Report, pack_rows, prepare, summary
from horizon_lm.data.sources import open_source
from horizon_lm.data.table import TokenTable
from horizon_lm.errors import ConfigError, first_line


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


# Tokenizer


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


# Rows


@dataclass(frozen=True)
class Prepared:
    """One data set, or all those that are trained on together.

    Attributes:
        name: for people.
        report: what became of its rows.
        findings: what looks wrong with them.
        rows, packed: those in use, before and after they are packed; the same where they are not.
    """

    name: str
    report: Report
    findings: Sequence[Finding]
    rows: TokenTable
    packed: TokenTable

    def lines(self) -> list[str]:
        """What a user is told."""
        return [f"{self.name}: {summary(self.rows, self.packed)}", *(f"{self.name}: {each}" for each in self.findings)]


@dataclass(frozen=True)
class RunData:
    """The rows of a run.

    Attributes:
        training: those to train on.
        loader: their batches.
        parts: each data set that was prepared.
        held_out: rows to evaluate on, by the name of their data set.
    """

    training: Prepared
    loader: Loader
    parts: Sequence[Prepared]
    held_out: Mapping[str, TokenTable]


def recipe_of(config: RunConfig) -> Recipe:
    """What becomes of the rows of a run."""
    return Recipe(
        objective=config.objective,
        train_on=config.train_on if isinstance(config, SftConfig) else None,
        max_length=config.max_length,
        packing=config.packing_strategy if isinstance(config, TextConfig) and config.packing else None,
        num_proc=config.dataset_num_proc,
        seed=_data_seed(config),
    )


def _held_out_recipe(config: RunConfig) -> Recipe:
    """The same of held-out rows, which may be packed otherwise."""
    recipe = recipe_of(config)
    if not isinstance(config, TextConfig) or config.eval_packing is None:
        return recipe
    return replace(recipe, packing=config.packing_strategy if config.eval_packing else None)


def _data_seed(config: RunConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def load_data(config: RunConfig, tokenizer: Any) -> RunData:
    """The rows to train on, and those held out. Findings are not refused yet.

    Raises:
        ConfigError, DataError: as `prepare` does; and for more rows held out than there are.
    """
    recipe, held_out_recipe = recipe_of(config), _held_out_recipe(config)
    report = prepare(config.datasets or (), tokenizer, recipe)
    rows, parts = report.rows, []
    if config.test_split_size is not None:
        held, rows = _split(rows, config.test_split_size, _data_seed(config))
        parts.append(Prepared("held_out", Report(), (), held, pack_rows(held, held_out_recipe)))
    training = Prepared("training data", report, audit(report, tokenizer), rows, pack_rows(rows, recipe))
    names = [each.name for each in parts]
    for dataset in config.eval_datasets or ():
        names.append(_unused_name(Path(dataset.path).stem, names))
        of_held_out = prepare([dataset], tokenizer, held_out_recipe)
        packed = pack_rows(of_held_out.rows, held_out_recipe)
        parts.append(Prepared(names[-1], of_held_out, audit(of_held_out, tokenizer), of_held_out.rows, packed))
    loader = Loader(training.packed, training_sampler(config, training.packed))
    return RunData(training, loader, [training, *parts], {each.name: each.packed for each in parts})


def _split(rows: TokenTable, size: float, seed: int) -> tuple[TokenTable, TokenTable]:
    number = int(size) if size >= 1 else math.ceil(size * len(rows))
    if number >= len(rows):
        raise ConfigError(f"test_split_size is {size:g}, but there are only {len(rows)} rows; hold fewer out")
    held_out = np.zeros(len(rows), dtype=bool)
    held_out[np.random.default_rng((seed, 0)).permutation(len(rows))[:number]] = True
    return rows.split(held_out)


def _unused_name(name: str, names: Sequence[str]) -> str:
    return name if name not in names else next(n for i in range(2, 1000) if (n := f"{name}_{i}") not in names)


def training_sampler(config: RunConfig, rows: TokenTable) -> Sampler:
    """Which rows each step has."""
    return Sampler(tuple(rows.part_sizes()), config.rows_per_step, _data_seed(config), tuple(rows.weights()))


def sampler_without_tokens(config: RunConfig) -> Sampler | None:
    """The same, about, without tokenizing the rows; None if there are none yet, or they will be packed."""
    if not config.datasets or (isinstance(config, TextConfig) and config.packing):
        return None
    held = config.test_split_size or 0
    sizes = [round(len(open_source(each)) * (each.fraction or 1)) for each in config.datasets]
    sizes = [max(1, round(size * (1 - (held if held < 1 else held / sum(sizes))))) for size in sizes]
    return Sampler(tuple(sizes), config.rows_per_step, 0, tuple(each.weight for each in config.datasets))


# Model and optimizer


def load_model(config: RunConfig) -> Any:
    """The run's model, streamed and in the mode that it is trained in."""
    import torch
    import transformers

    import horizon_lm
    from horizon_lm.model.trainable import freeze

    transformers.set_seed(config.seed)
    model = horizon_lm.from_pretrained(
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
        grad_dtype=None if config.grad_dtype is None else getattr(torch, config.grad_dtype),
    )
    freeze(model, config.trainable)
    # Evaluation mode is training without dropout; nothing else of a model depends on it.
    return model.train(not (isinstance(config, DpoConfig) and config.disable_dropout))


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
