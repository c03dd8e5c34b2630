"""A training run, from a `RunConfig` to a model in a folder."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.config import DatasetConfig, RunConfig
from horizon_lm.errors import ConfigError, NonFiniteError, NonFiniteWarning, first_line
from horizon_lm.interrupts import Interrupts
from horizon_lm.metrics import Metrics, Reporter
from horizon_lm.plan.text import summary_lines
from horizon_lm.preflight.admission import Admission
from horizon_lm.preflight.run import settle
from horizon_lm.run_folder import RunFolder
from horizon_lm.tracing import Tracing


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left.

    Attributes:
        output_dir, model_dir: its folder, and that of the trained model.
        num_steps: optimizer steps.
        eval_loss_before, eval_loss_after: held-out loss per token; None without eval_datasets.
    """

    output_dir: Path
    model_dir: Path
    num_steps: int
    eval_loss_before: float | None
    eval_loss_after: float | None


def train(config: RunConfig, say: Callable[[str], None] | None = None) -> RunResult:
    """Fine-tune a model and export it to ``<output_dir>/model``.

    Args:
        config: the run.
        say: prints a line of progress; None for standard output.

    Raises:
        ConfigError, DataError, DoesNotFitError: before the first step.
        NonFiniteError: a loss or gradient is NaN or infinite; the step is not applied, and nothing is exported.
        InterruptedRunError: SIGINT or SIGTERM, at the end of a step.
    """
    config = config.model_copy(update={"device": choose_device(config.device)})
    folder = RunFolder(config)
    with Interrupts() as interrupts, Reporter(say) as reporter:
        reporter.say(f"run folder: {folder.path}")
        admission = Admission(config)
        admission.refuse_hopeless()
        tokenizer = load_tokenizer(config)
        loader = load_training_rows(config, tokenizer, reporter)
        held_out = load_rows("held-out data", config.eval_datasets or (), config, tokenizer, reporter)
        num_steps = config.max_steps if config.max_steps > 0 else loader.sampler.num_steps(config.num_train_epochs)
        plan = admission.admit(loader, held_out, num_steps)
        for line in summary_lines(plan):
            reporter.say(line)
        config = settle(config, plan)
        folder.begin(config, plan)
        model = load_model(config)
        optimizer, scheduler = build_optimizer(model, config, num_steps)
        metrics = Metrics(num_steps, loader.sampler.steps_per_epoch, _steps(config.logging_steps, num_steps) or 1)
        tracing = Tracing(model, config.trace_steps, num_steps, folder.trace_file)

        reporter.begin(folder.metrics_file, num_steps)
        interrupts.wait_for_boundary()
        loss_before = evaluate(model, held_out, config, reporter, step=0)
        for step in range(1, num_steps + 1):
            interrupts.check(step - 1, num_steps, folder.metrics_file)
            tracing.before_step(step)
            batch = loader.batch(step - 1)
            loss = compute_loss(model, batch)
            loss_value = finite(loss, step, batch, config, folder)
            loss.backward()
            update(optimizer, step, batch, folder, reporter)
            if metrics.add(step, loss_value, batch):
                learning_rate = scheduler.get_last_lr()[0]
                reporter.write(metrics.line(step, optimizer, learning_rate, _device_bytes_peak(model)))
            scheduler.step()
            optimizer.zero_grad()
            reporter.advance(loss_value)
        tracing.finish(num_steps)
        loss_after = evaluate(model, held_out, config, reporter, step=num_steps)
        folder.export(model, tokenizer)
        folder.draw_loss()
        reporter.stop_bar()
        reporter.say(folder.how_to_use())
    return RunResult(folder.path, folder.model_dir, num_steps, loss_before, loss_after)


# Before the loop


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
    return open_tokenizer(folder, gguf_file=config.gguf_file, trust_remote_code=config.trust_remote_code)


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


def load_rows(
    name: str, datasets: Sequence[DatasetConfig], config: RunConfig, tokenizer: Any, reporter: Reporter
) -> list[Any]:
    """Tokenized rows of some files, with a word about what was cut or left out."""
    from horizon_lm.data.formats import read_conversations
    from horizon_lm.data.tokenize import tokenize_rows

    if not datasets:
        return []
    rows, report = tokenize_rows(read_conversations(datasets), tokenizer, config.max_length)
    for line in report.lines(config.max_length):
        reporter.say(f"{name}: {line}")
    return rows


def load_training_rows(config: RunConfig, tokenizer: Any, reporter: Reporter) -> Any:
    """The loader of the run's training rows."""
    from horizon_lm.data.loader import Loader, Sampler

    rows = load_rows("training data", config.datasets, config, tokenizer, reporter)
    seed = config.seed if config.data_seed is None else config.data_seed
    return Loader(rows, Sampler(len(rows), config.rows_per_step, seed))


def count_steps(config: RunConfig) -> int | None:
    """Optimizer steps of a run, without tokenizing its rows; None if it has none yet."""
    from horizon_lm.data.formats import read_conversations
    from horizon_lm.data.loader import Sampler

    if config.max_steps > 0:
        return config.max_steps
    if not config.datasets:
        return None
    num_rows = sum(1 for _ in read_conversations(config.datasets))
    return Sampler(num_rows, config.rows_per_step, 0).num_steps(config.num_train_epochs)


def load_model(config: RunConfig) -> Any:
    """The run's model, streamed and in training mode."""
    import torch
    import transformers

    import horizon_lm

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
    return model.train()


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
    num_warmup_steps = _steps(config.warmup_steps, num_steps)
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


def _steps(number_or_share: float, num_steps: int) -> int:
    """transformers' rule for settings that are a number of steps, or a share of all steps below 1."""
    return int(number_or_share) if number_or_share >= 1 else math.ceil(number_or_share * num_steps)


# A step


def compute_loss(model: Any, batch: Any) -> Any:
    """Mean loss per trained token of a batch, with its graph."""
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        num_items_in_batch=batch.num_trained,
    )
    return output.loss


def finite(loss: Any, step: int, batch: Any, config: RunConfig, folder: RunFolder) -> float:
    """The loss as a number; NonFiniteError if it is NaN or infinite, unless such steps are left out."""
    value = float(loss.item())
    if not math.isfinite(value) and config.non_finite == "raise":
        raise NonFiniteError(_non_finite(f"the loss is {value}", step, batch, folder))
    return value


def update(optimizer: Any, step: int, batch: Any, folder: RunFolder, reporter: Reporter) -> None:
    """An optimizer step; it refuses gradients that are not finite, and this tells where they come from."""
    try:
        skipped = optimizer.num_skipped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, with the rows
            optimizer.step()
    except NonFiniteError as error:
        if optimizer.torn:
            raise NonFiniteError(f"{error} Rows of this step: {_places(batch)}") from error
        raise NonFiniteError(_non_finite("the gradient is not finite", step, batch, folder)) from error
    if optimizer.num_skipped > skipped:
        reporter.say(f"step {step}: skipped, because the gradient is not finite. Its rows: {_places(batch)}")


def _places(batch: Any) -> str:
    return ", ".join(batch.places[:8]) + (", ..." if len(batch.places) > 8 else "")


def _non_finite(what: str, step: int, batch: Any, folder: RunFolder) -> str:
    places = _places(batch)
    before = f"as step {step - 1} left them" if step > 1 else "as they were loaded"
    remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
    return (
        f"step {step}: {what}. The weights are {before}, nothing was exported, and the metrics so far are in "
        f"{folder.metrics_file}. Remedy: {remedy}, or look at the rows of this step: {places}"
    )


def evaluate(model: Any, rows: list[Any], config: RunConfig, reporter: Reporter, step: int) -> float | None:
    """Mean loss per token of held-out rows, written as a line of metrics; None without rows."""
    import torch

    from horizon_lm.data.loader import in_order

    if not rows:
        return None
    total, num_trained = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in in_order(rows, config.per_device_eval_batch_size):
            total += compute_loss(model, batch).item() * batch.num_trained
            num_trained += batch.num_trained
    model.train()
    loss = total / num_trained
    if not math.isfinite(loss):
        raise NonFiniteError(f"after step {step}: the held-out loss is {loss}; nothing was exported")
    reporter.write({"step": step, "eval_loss": loss, "eval_tokens": num_trained})
    return loss


def _device_bytes_peak(model: Any) -> int:
    import horizon_lm

    return int(horizon_lm.stats(model)["device_bytes_peak"])
