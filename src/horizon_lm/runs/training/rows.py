"""Prepare the training rows and the eval sets of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.common.quantities import counted
from horizon_lm.errors import ConfigError, DataError
from horizon_lm.model.positions import Positions
from horizon_lm.runs.config import RunConfig, SftConfig, TextConfig
from horizon_lm.runs.data.chat_template import today
from horizon_lm.runs.data.checks import check_lengths, check_overlap
from horizon_lm.runs.data.findings import TRAINING, Finding, Findings, cut_before_answer, describe, no_row_left
from horizon_lm.runs.data.loader import Loader, Sampler
from horizon_lm.runs.data.packing import pack_rows, with_images
from horizon_lm.runs.data.preprocess import PreprocessConfig, Report, prepare
from horizon_lm.runs.data.sources import open_source
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.data.tokenize import origin
from horizon_lm.runs.data.vision import Vision


@dataclass(frozen=True)
class PreparedData:
    """An eval set, or all training rows.

    Attributes:
        name: name of the data in messages.
        findings: likely mistakes in the rows.
        rows: the rows in use.
        packed: the same rows after packing; ``rows`` without packing.
    """

    name: str
    findings: Sequence[Finding]
    rows: TokenTable
    packed: TokenTable


@dataclass(frozen=True)
class RunData:
    """The rows of a run.

    Attributes:
        report: numbers of training rows that were read, truncated and left out.
        training: the training rows.
        loader: batches of the training rows.
        parts: the training rows and each eval set, with their findings.
        eval_sets: the packed rows of each eval set, by name.
        origin: what the tokens depend on besides the rows and the settings (`tokenize.origin`).
    """

    report: Report
    training: PreparedData
    loader: Loader
    parts: Sequence[PreparedData]
    eval_sets: Mapping[str, TokenTable]
    origin: Mapping[str, str]

    def findings(self) -> list[tuple[str, Finding]]:
        """Return likely mistakes, each with the name of the data that it was found in."""
        return [(part.name, finding) for part in self.parts for finding in part.findings]

    def lines(self) -> list[str]:
        """Return summaries and findings as lines for people."""
        date = [f"chat template: prints the date of the run, {self.origin['date']}"] if "date" in self.origin else []
        return [
            *date,
            *(f"{part.name}: {_summary(part.rows, part.packed)}" for part in self.parts),
            *(line for _, line in self.finding_lines()),
        ]

    def finding_lines(self) -> list[tuple[Finding, str]]:
        """Return each finding with its line for people."""
        found = self.findings()
        texts = describe(finding for _, finding in found)
        return [
            (finding, f"{'error' if finding.is_error else 'warning'}: {name}: {text}")
            for (name, finding), text in zip(found, texts, strict=True)
        ]


def _summary(rows: TokenTable, packed: TokenTable) -> str:
    """Describe the number of rows, tokens and targets in one line. ``packed``: the packed rows; ``rows`` themselves without packing."""
    tokens, targets = int(packed.num_tokens.sum()), int(packed.num_targets.sum())
    count = counted(len(rows), "row")
    if packed is not rows:
        count += f" in {counted(len(packed), 'packed row')}"
        if without_targets := sum(len(part.table) - len(part) for part in packed.parts):
            count += f" ({without_targets:,} more without a token to train on)"
    return f"{count}, {tokens:,} tokens, {targets:,} trained on ({targets / max(1, tokens):.0%})"


def preprocess_config(config: RunConfig, day: str | None = None) -> PreprocessConfig:
    """Return the settings of a run that determine how its rows are tokenized and packed. ``day``: see `PreprocessConfig`."""
    return PreprocessConfig(
        objective=config.objective, train_on=config.train_on if isinstance(config, SftConfig) else None,
        max_length=config.max_length, num_proc=config.dataset_num_proc, seed=_data_seed(config),
        packing=config.packing_strategy if isinstance(config, TextConfig) and config.packing else None, day=day,
        chat_template=config.chat_template_path, allow_downloads=config.allow_downloads,
    )  # fmt: skip


def _eval_preprocess_config(config: RunConfig, preprocess: PreprocessConfig) -> PreprocessConfig:
    """Return the settings for eval sets: those of the training rows, but packed by ``eval_packing`` if that is set."""
    if not isinstance(config, TextConfig) or config.eval_packing is None:
        return preprocess
    return replace(preprocess, packing=config.packing_strategy if config.eval_packing else None)


def _data_seed(config: RunConfig) -> int:
    """Return the seed of the rows' order and of the held-out rows."""
    return config.seed if config.data_seed is None else config.data_seed


def require_rows(config: RunConfig) -> None:
    """Raise DataError if a file or dataset of a run is missing, cannot be read or has no rows."""
    for each in (*(config.datasets or ()), *(config.eval_datasets or ())):
        open_source(each)


def load_data(
    config: RunConfig, tokenizer: Any, positions: Positions | None = None, rows_per_step: int | None = None,
    rank: int = 0, num_ranks: int = 1, day: str | None = None, vision: Vision | None = None,
) -> RunData:  # fmt: skip
    """Prepare the training rows and the eval sets. Errors among the findings are returned, not raised.

    Args:
        config: settings of the run.
        tokenizer: the model's tokenizer.
        positions: the positions of the model; None if they are not limited.
        rows_per_step: rows of a step of all ranks; None for the rows of one rank.
        rank, num_ranks: the rank that gets its part of each step, and the number of ranks.
        day: the date that chat templates print; None for today's.
        vision: the processor of images; None for a model of text.

    Raises:
        ConfigError, DataError: as `prepare` does; ConfigError also if ``test_split_size`` leaves no training rows, and DataError if no
            row can be used.
    """
    day = day or today()
    settings = preprocess_config(config, day)
    eval_settings = _eval_preprocess_config(config, settings)
    report, held_out = prepare(config.datasets or (), tokenizer, settings, vision=vision), None
    rows = report.rows
    if config.test_split_size is not None and len(rows):
        held_out, rows = _split(report, config.test_split_size, _data_seed(config))
    evaluated = []
    if held_out is not None:
        evaluated.append(_read_held_out(config, tokenizer, settings, eval_settings, held_out, vision))
    evaluated += [prepare([each], tokenizer, eval_settings, vision=vision) for each in config.eval_datasets or ()]
    training = _pack(TRAINING, rows, report.findings, settings, positions)
    eval_parts = []
    for name, each in zip(config.eval_set_names, evaluated, strict=True):
        findings = [*each.findings, *check_overlap(each.rows, rows, eval_settings.row_limit)]
        eval_parts.append(_pack(name, each.rows, findings, eval_settings, positions))
    sampler = training_sampler(config, training.packed, rows_per_step)
    loader = Loader(training.packed, sampler, rank, num_ranks, config.rows_kept_together)
    eval_sets = {each.name: each.packed for each in eval_parts}
    return RunData(report, training, loader, [training, *eval_parts], eval_sets, origin(tokenizer, day))


def _read_held_out(
    config: RunConfig, tokenizer: Any, training: PreprocessConfig, evaluation: PreprocessConfig, rows: TokenTable,
    vision: Vision | None,
) -> Report:  # fmt: skip
    """Return the held-out rows. If training or eval sets alone pack whole rows, they are tokenized again, and cut as rows of eval sets are.

    Args:
        config, tokenizer, vision: as in `load_data`.
        training, evaluation: settings for the training rows and for eval sets.
        rows: the held-out rows as they were tokenized with the training rows, whose findings are theirs, too.
    """
    if evaluation.row_limit == training.row_limit:
        return Report(rows, len(rows), Findings(), [])
    return prepare(config.datasets or (), tokenizer, evaluation, [part.indices for part in rows.parts], vision)


def _pack(
    name: str, rows: TokenTable, findings: Sequence[Finding], settings: PreprocessConfig, positions: Positions | None
) -> PreparedData:
    """Pack rows. Return them with all findings: the given ones, answers that packing cuts, and rows that are longer than ``positions``.

    Raises:
        DataError: no row is left, or some have images that packing would cut.
    """
    if settings.packing not in (None, "bfd") and (images := with_images(rows)).count:
        raise DataError(
            f"{name}: packing_strategy: {settings.packing} cuts rows, but images are never cut: {images.count:,} rows have images "
            f"({images}); set packing_strategy: bfd"
        )
    packed, cut = pack_rows(rows, settings.packing, settings.max_length)
    findings = [*([cut_before_answer(cut)] if cut.count else []), *findings]
    if not len(packed):
        raise no_row_left(name, findings)
    return PreparedData(name, [*check_lengths(packed, positions), *findings], rows, packed)


def _split(report: Report, size: float, seed: int) -> tuple[TokenTable, TokenTable]:
    """Return the rows that are held out, drawn by ``seed``, and the others. ``size``: the number held out or, below 1, their share."""
    rows = report.rows
    num_held_out = int(size) if size >= 1 else math.ceil(size * len(rows))
    if num_held_out >= len(rows):
        causes = [str(each) for each in report.findings if each.leaves_out]
        if not causes:
            problem, remedy = f"the dataset has only {counted(len(rows), 'row')}", "set a smaller number"
        else:
            used = f"only {len(rows):,} of {counted(report.num_read, 'row')} {'is' if len(rows) == 1 else 'are'} used"
            problem, remedy = "; ".join([used, *causes]), "or set a smaller number"
        raise ConfigError(f"test_split_size is {size:g}, but {problem}; {remedy}")
    held_out = np.zeros(len(rows), dtype=bool)
    held_out[np.random.default_rng((seed, 0)).permutation(len(rows))[:num_held_out]] = True
    return rows.split(held_out)


def training_sampler(config: RunConfig, rows: TokenTable, rows_per_step: int | None = None) -> Sampler:
    """Return the sampler that chooses the rows of each step.

    Args:
        config: settings of the run.
        rows: the packed rows of all datasets.
        rows_per_step: rows of a step of all ranks; None for those of one rank.
    """
    return Sampler(
        sizes=tuple(rows.part_sizes()), rows_per_step=rows_per_step or config.rows_per_step,
        seed=_data_seed(config), weights=tuple(rows.weights()),
    )  # fmt: skip


def estimate_sampler(config: RunConfig, num_ranks: int = 1) -> Sampler | None:
    """Return a sampler with about as many rows as the run's, made from the sizes of the datasets alone: its order is another one.
    Return None without datasets, or if packing will change the number of rows.
    """
    if not config.datasets or (isinstance(config, TextConfig) and config.packing):
        return None
    sizes = [round(len(open_source(each)) * (each.fraction or 1)) for each in config.datasets]
    held_out = config.test_split_size or 0  # a share of all rows, or their number
    share_held_out = held_out if held_out < 1 else held_out / max(1, sum(sizes))
    sizes = [max(1, round(size * (1 - share_held_out))) for size in sizes]
    return Sampler(
        sizes=tuple(sizes), rows_per_step=config.rows_per_step * num_ranks,
        seed=0, weights=tuple(each.weight for each in config.datasets),
    )  # fmt: skip
