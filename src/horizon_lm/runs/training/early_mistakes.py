"""Find the mistakes of a run that can be seen before torch is imported, which takes seconds, so that all are reported together."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from horizon_lm.common.constants import LANGUAGE_MODEL
from horizon_lm.common.paths import exists, may_be_on_hub, similar_path
from horizon_lm.common.run_folders import require_model_folder
from horizon_lm.errors import ConfigError, HorizonError
from horizon_lm.model.adapter_config import NO_PEFT, require_adapter_config, require_weights
from horizon_lm.model.config_limits import require_sane_config
from horizon_lm.model.files.weight_files import WeightFiles
from horizon_lm.model.folder import require_model_files, require_tokenizer_files
from horizon_lm.model.known_models import find_known
from horizon_lm.runs.checkpoints.finding import has_adapters, require_checkpoint
from horizon_lm.runs.config import DatasetConfig, RunConfig, TextConfig
from horizon_lm.runs.data import trl_compat
from horizon_lm.runs.data.chat_template import read_template
from horizon_lm.runs.data.findings import TRAINING
from horizon_lm.runs.data.first_rows import check_first_rows
from horizon_lm.runs.training.best_model import require_known_metric
from horizon_lm.runs.training.output_folder import output_folder, require_unlocked, require_usable, require_writable
from horizon_lm.runs.training.resumable import checkpoints_to_resume, names_checkpoint, require_same_training
from horizon_lm.runs.training.trackers import require_packages

Check = Callable[[RunConfig], None]


def mistakes_in_plan(config: RunConfig) -> Iterator[HorizonError]:
    """Yield the errors in the inputs of a plan: the model's config, its adapters, the sizes of its weights, and rows that are named."""
    model_checks = [_require_name, _require_config, _require_peft, _require_adapter, _require_headers]
    return _errors(config, [*model_checks, *_checks_of_first_rows(config)])


def mistakes_in_rows(config: RunConfig) -> Iterator[HorizonError]:
    """Yield the errors in the inputs of tokenizing: the model's config and tokenizer, the chat template, and the rows."""
    return _errors(config, [_require_name, _require_config, *_checks_of_rows(config)])


def mistakes_in_run(config: RunConfig) -> Iterator[HorizonError]:
    """Yield the errors of everything that a run needs."""
    checks = [
        _require_name, _require_config, _require_weights, _require_peft, _require_adapter, *_checks_of_rows(config),
        _require_trackers, require_known_metric,
    ]  # fmt: skip
    if os.environ.get("RANK", "0") == "0":  # the only one that writes, and may have begun
        checks += [_require_checkpoint, _require_output, _require_fallback]
    return _errors(config, checks)


def _checks_of_rows(config: RunConfig) -> list[Check]:
    """Return the checks of the inputs of tokenizing, besides the model's config."""
    return [_require_tokenizer, _require_template, _require_trl, *_checks_of_first_rows(config)]


def _checks_of_first_rows(config: RunConfig) -> list[Check]:
    """Return a check of the first rows for each entry of ``datasets`` and ``eval_datasets``."""
    training, evaluation = config.datasets or (), config.eval_datasets or ()
    # A name lets the check reject rows without answers; another entry of the training rows may have some.
    training_name = TRAINING if len(training) == 1 else None
    # Held-out rows, if there are any, have the first name.
    names = config.eval_set_names[len(config.eval_set_names) - len(evaluation) :]
    entries = [*((entry, training_name) for entry in training), *zip(evaluation, names, strict=True)]
    return [partial(_require_rows, entry, name) for entry, name in entries]


def _errors(config: RunConfig, checks: Sequence[Check]) -> Iterator[HorizonError]:
    """Yield the errors of some checks. Skip a check that may not read a file: the run reports that when it reads the file."""
    for check in checks:
        with suppress(OSError):
            try:
                check(config)
            except HorizonError as error:
                yield error


def _require_rows(entry: DatasetConfig, name: str | None, config: RunConfig) -> None:
    check_first_rows(entry, config.objective, name, config.allow_downloads)


def _folder(name: str | None) -> Path | None:
    """Return the local folder of a name; None if there is none, as for a model on the hub, or without a name."""
    folder = Path(name).expanduser() if name is not None and exists(name) else None
    return folder if folder is not None and folder.is_dir() else None


def _model_folder(config: RunConfig) -> Path | None:
    """Return the local folder whose config, tokenizer and weights a run reads; None if it reads a GGUF file, or the hub."""
    return _folder(config.model_name_or_path) if config.gguf_file is None else None


def _require_name(config: RunConfig) -> None:
    """Raise ConfigError if the model is not found, but a folder of a similar name is. Otherwise the hub is asked when it is needed."""
    name = config.model_name_or_path.removesuffix(LANGUAGE_MODEL)
    if config.gguf_file is None and find_known(name) is None and may_be_on_hub(name) and similar_path(name):
        from horizon_lm.model.hub import require_on_hub

        require_on_hub(name)


def _require_config(config: RunConfig) -> None:
    if folder := _model_folder(config):
        require_model_files(folder)
        require_sane_config(folder / "config.json")


def _usable_folder(config: RunConfig) -> Path | None:
    """Return the folder of `_model_folder` if its config can be used; without one, it may be no model at all."""
    return None if any(_errors(config, [_require_config])) else _model_folder(config)


def _require_tokenizer(config: RunConfig) -> None:
    if folder := _usable_folder(config):
        require_tokenizer_files(folder)


def _require_weights(config: RunConfig) -> None:
    if folder := _usable_folder(config):
        WeightFiles(folder).headers()


def _require_headers(config: RunConfig) -> None:
    """Raise the errors of weights, but not if there are none, which a plan does without."""
    if (folder := _model_folder(config)) and WeightFiles.is_in(folder):
        _require_weights(config)


def _require_adapter(config: RunConfig) -> None:
    if folder := _folder(config.adapter_name_or_path):
        require_model_folder(folder)
        require_adapter_config(folder)
        require_weights(folder)


def _require_template(config: RunConfig) -> None:
    path = config.chat_template_path
    if path is not None and exists(path) and (file := Path(path).expanduser()).is_file():
        read_template(file, path)


def _require_trl(config: RunConfig) -> None:
    if isinstance(config, TextConfig) and (config.packing or config.eval_packing):
        trl_compat.require("packing")


def _require_peft(config: RunConfig) -> None:
    if config.use_peft and find_spec("peft") is None:
        raise ConfigError(NO_PEFT)


def _require_trackers(config: RunConfig) -> None:
    require_packages(config.report_to)


def _require_checkpoint(config: RunConfig) -> None:
    wanted = config.resume_from_checkpoint
    if names_checkpoint(config) and not exists(str(wanted)):
        return  # an invalid setting
    require_checkpoint(wanted, output_folder(config))
    for folder in checkpoints_to_resume(config)[-1:]:
        if (saved_adapters := has_adapters(folder)) is not None:  # None if it is damaged
            require_same_training(config, folder, saved_adapters)


def _require_output(config: RunConfig) -> None:
    require_unlocked(output_folder(config))
    require_usable(config, resumes=config.resume_from_checkpoint is not False)


def _require_fallback(config: RunConfig) -> None:
    if config.fallback_dir is not None:
        require_writable("fallback_dir", Path(config.fallback_dir).expanduser())
