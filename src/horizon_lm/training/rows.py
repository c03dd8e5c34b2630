"""The rows of a run: those to train on, and those held out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from horizon_lm.config import RunConfig, SftConfig, TextConfig
from horizon_lm.data.checks import Finding, also_trained_on, audit
from horizon_lm.data.loader import Loader, Sampler
from horizon_lm.data.preprocess import PreprocessConfig, Report, cut_rows, pack_rows, prepare, summary
from horizon_lm.data.sources import open_source
from horizon_lm.data.token_dataset import TokenTable
from horizon_lm.errors import ConfigError


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


def preprocess_config(config: RunConfig) -> PreprocessConfig:
    """What becomes of the rows of a run."""
    return PreprocessConfig(
        objective=config.objective,
        train_on=config.train_on if isinstance(config, SftConfig) else None,
        max_length=config.max_length,
        packing=config.packing_strategy if isinstance(config, TextConfig) and config.packing else None,
        num_proc=config.dataset_num_proc,
        seed=_data_seed(config),
    )


def _eval_preprocess_config(config: RunConfig) -> PreprocessConfig:
    """The same of held-out rows, which may be packed otherwise."""
    recipe = preprocess_config(config)
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
    recipe, held_out_recipe = preprocess_config(config), _eval_preprocess_config(config)
    report = prepare(config.datasets or (), tokenizer, recipe)
    rows, parts = report.rows, []
    if config.test_split_size is not None:
        held, rows = _split(rows, config.test_split_size, _data_seed(config))
        held = cut_rows(held, held_out_recipe)
        found = also_trained_on(held, rows)
        parts.append(Prepared("held_out", Report(), found, held, pack_rows(held, held_out_recipe)))
    training = Prepared("training data", report, audit(report, tokenizer), rows, pack_rows(rows, recipe))
    names = [each.name for each in parts]
    for dataset in config.eval_datasets or ():
        names.append(_unused_name(Path(dataset.path).stem, names))
        of_held_out = prepare([dataset], tokenizer, held_out_recipe)
        packed = pack_rows(of_held_out.rows, held_out_recipe)
        found = [*audit(of_held_out, tokenizer), *also_trained_on(of_held_out.rows, rows)]
        parts.append(Prepared(names[-1], of_held_out, found, of_held_out.rows, packed))
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
    sizes = [max(1, round(size * (1 - (held if held < 1 else held / max(1, sum(sizes)))))) for size in sizes]
    return Sampler(tuple(sizes), config.rows_per_step, 0, tuple(each.weight for each in config.datasets))
