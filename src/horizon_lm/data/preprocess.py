"""From the entries of ``datasets`` to tokens on disk, made once and found again by what they were made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from horizon_lm.config import DatasetConfig
from horizon_lm.data.conversations import RowError
from horizon_lm.data.formats import OPTIONAL, Form, find_form, rename
from horizon_lm.data.packing import cut, pack
from horizon_lm.data.sources import Source, digest, open_source, progress_bars
from horizon_lm.data.token_dataset import Part, TokenTable
from horizon_lm.data.tokenize import ExampleTokenizer, Tokens
from horizon_lm.errors import DataError

VERSION = 6  # of what is cached
_MAX_SHOWN = 5  # problems listed in one error
_TEXT_AT_ONCE = 4 * 2**20  # bytes
_ROWS_LOOKED_AT = 1000  # for fields that not every row has
_PLACES_SHOWN = 3  # rows of one kind in a report
CUT, MISSING_EOS, CUT_ANSWER, DROPPED_BY_TEMPLATE, PLAIN = (
    1,
    2,
    4,
    8,
    16,
)  # bits of a row's flags, as `Report` tells them


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    """What becomes of rows.

    Attributes:
        objective, train_on, max_length: of the run.
        packing: the strategy; None for rows as they are.
        num_proc: processes; None for one.
        seed: of the choice of a fraction.
    """

    objective: str
    train_on: str | None = None
    max_length: int | None = None
    packing: str | None = None
    num_proc: int | None = None
    seed: int = 0


@dataclass
class ExampleCounts:
    """Rows of some kind: how many, and where the first of them come from."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, indices: np.ndarray, place: Callable[[int], str]) -> None:
        self.count += len(indices)
        self.places += [place(int(index)) for index in indices[: _PLACES_SHOWN - len(self.places)]]

    def __str__(self) -> str:
        return ", ".join(self.places) + (", ..." if self.count > len(self.places) else "")


@dataclass
class Report:
    """What became of the rows of some data sets.

    Attributes:
        rows: those that are trained on.
        read: how many there were, of which the following tell.
        cut, cut_answer: rows that lost their end, and those of them that lost tokens to train on.
        left_out: rows that have nothing to train on.
        missing_eos: rows with an answer that no end-of-turn token follows.
        dropped_by_template: rows with messages, thoughts or tools that the chat template leaves out.
        plain: prompts and completions as text, to which the chat template that there is is not applied.
    """

    rows: TokenTable = field(default_factory=lambda: TokenTable([]))
    read: int = 0
    cut: ExampleCounts = field(default_factory=ExampleCounts)
    cut_answer: ExampleCounts = field(default_factory=ExampleCounts)
    left_out: ExampleCounts = field(default_factory=ExampleCounts)
    missing_eos: ExampleCounts = field(default_factory=ExampleCounts)
    dropped_by_template: ExampleCounts = field(default_factory=ExampleCounts)
    plain: ExampleCounts = field(default_factory=ExampleCounts)


@dataclass
class _Problems:
    """Rows that cannot be used: how many, and what is wrong with the first of them."""

    count: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        self.told += [text][: _MAX_SHOWN - len(self.told)]

    def add_all(self, source: Source, table: Any) -> None:
        """Those of a table of tokens."""
        import pyarrow.compute as pc

        problems = table.data.column("problem")
        wrong = np.flatnonzero(pc.is_valid(problems).to_numpy())
        self.count += len(wrong)
        for index in map(int, wrong[: _MAX_SHOWN - len(self.told)]):
            self.told.append(f"{source.place(index)}: {problems[index].as_py()}")

    def reject(self) -> None:
        """DataError with all that is told."""
        if self.count:
            heading = "" if self.count == 1 else f"{self.count:,} rows cannot be used:\n"
            more = f"\n... and {self.count - _MAX_SHOWN:,} more" if self.count > _MAX_SHOWN else ""
            raise DataError(heading + "\n".join(self.told) + more)


def prepare(datasets: Sequence[DatasetConfig], tokenizer: Any, recipe: PreprocessConfig) -> Report:
    """Read, tokenize and cut the rows of some data sets.

    Raises:
        ConfigError: the tokenizer cannot do what the rows need.
        DataError: files or rows that cannot be used, or no row with anything to train on.
    """
    report, parts, problems = Report(), [], _Problems()
    with progress_bars():
        for config in datasets:
            source = open_source(config)
            table = _tokenized(source, _form(source, recipe, problems), tokenizer, recipe)
            if table is not None:
                problems.add_all(source, table)
                parts.append(_used(source, table, recipe, report))
    problems.reject()
    report.rows = TokenTable(parts)
    if not len(report.rows):
        raise DataError(
            f"no row has a token to train on within max_length {recipe.max_length}, or answers are empty ({report.left_out})"
        )
    return report


def cut_rows(rows: TokenTable, recipe: PreprocessConfig) -> TokenTable:
    """Rows that were left long to be packed, cut where a recipe does not pack them."""
    length = recipe.max_length
    if recipe.packing is not None or length is None or not len(rows) or int(rows.lengths.max()) <= length:
        return rows
    with progress_bars():
        return TokenTable([cut(part, length) for part in rows.parts if len(part)])


def pack_rows(rows: TokenTable, recipe: PreprocessConfig) -> TokenTable:
    """The rows of each data set packed as a recipe says; as they are if it says nothing."""
    if recipe.packing is None:
        return rows
    with progress_bars():
        return TokenTable([pack(part, recipe.packing, recipe.max_length or 0) for part in rows.parts if len(part)])


def summary(rows: TokenTable, packed: TokenTable) -> str:
    """How much there is, in a line."""
    tokens, targets = int(packed.num_tokens.sum()), int(packed.num_targets.sum())
    count = f"{len(rows):,} rows" if packed is rows else f"{len(rows):,} rows in {len(packed):,} packed rows"
    if left_out := sum(len(part.table) - len(part) for part in packed.parts) if packed is not rows else 0:
        count += f" ({left_out:,} more have nothing to train on)"
    return f"{count}, {tokens:,} tokens, {targets:,} of them trained on ({targets / max(1, tokens):.0%})"


def _form(source: Source, recipe: PreprocessConfig, problems: _Problems) -> Form | None:
    """The form of a data set, as its first row shows it."""
    try:
        first = source.row(0)
        _require_columns(source)
        return find_form(_renamed(first, source), source.config.format, recipe.objective, source.config.columns or ())
    except RowError as error:  # without a form every further row would say the same
        problems.add(f"{source.place(0)}: {error}")
        return None


def _require_columns(source: Source) -> None:
    """RowError for an optional field under a name that none of the first rows has."""
    optional = {theirs for ours, theirs in (source.config.columns or {}).items() if ours in OPTIONAL}
    some = (source.row(index) for index in range(min(_ROWS_LOOKED_AT, len(source))))
    for row in some if optional else ():
        optional -= set(row) if isinstance(row, dict) else set()
        if not optional:
            return
    if optional:
        raise RowError(
            f"field {min(optional)!r}, which columns names, is in none of the first {_ROWS_LOOKED_AT:,} rows"
        )


def _renamed(row: Any, source: Source) -> Any:
    return rename(row, source.config.columns) if source.config.columns and isinstance(row, dict) else row


def _tokenized(source: Source, form: Form | None, tokenizer: Any, recipe: PreprocessConfig) -> Any:
    """The tokens of all rows, from the cache if they are there."""
    import datasets

    if form is None:
        return None
    fingerprint = digest(
        VERSION, source.fingerprint, source.config.columns, form.name, recipe.objective, recipe.train_on,
        _length_of_rows(recipe), _state(tokenizer),
    )  # fmt: skip
    pair = recipe.objective == "dpo"
    features = {
        **{name: datasets.List(datasets.Value("int32")) for name in ("input_ids", *(["rejected_ids"] if pair else []))},
        **{
            name: datasets.List(datasets.Value("bool")) for name in ("trained", *(["rejected_trained"] if pair else []))
        },
        "num_targets": datasets.Value("int32"),
        "flags": datasets.Value("int8"),
        "problem": datasets.Value("string"),
    }
    make = ExampleTokenizer(tokenizer, recipe.train_on, _length_of_rows(recipe))
    return source.table.map(
        partial(_tokenize_rows, source=source.without_table(), form=form, make=make, num_sequences=1 + pair),
        batched=True,
        batch_size=_rows_at_once(source.table),
        num_proc=recipe.num_proc,
        remove_columns=source.table.column_names,
        features=datasets.Features(features),
        new_fingerprint=fingerprint,
        load_from_cache_file=True,
        desc=f"tokenizing {source.config.path}",
    )


def _rows_at_once(table: Any) -> int:
    """Rows of a batch: a few MiB of text, however long each is."""
    return max(1, min(200, _TEXT_AT_ONCE * len(table) // max(1, table.data.nbytes)))


def _length_of_rows(recipe: PreprocessConfig) -> int | None:
    """To what rows are cut before they are packed; some ways of packing keep the rest."""
    return recipe.max_length if recipe.packing in (None, "bfd") else None


def _state(tokenizer: Any) -> list[Any]:
    """What of a tokenizer decides on its tokens."""
    import tokenizers
    import transformers

    from horizon_lm.data import trl_compat

    return [
        transformers.__version__, tokenizers.__version__, trl_compat.version(), type(tokenizer).__name__,
        digest(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.name_or_path,
        tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.split_special_tokens,
    ]  # fmt: skip


def _tokenize_rows(
    columns: dict[str, list[Any]], *, source: Source, form: Form, make: ExampleTokenizer, num_sequences: int
) -> dict[str, list[Any]]:
    """A batch of rows. What is wrong with a row is written down in its place: all are to be told at once."""
    made: list[tuple[list[Tokens], str | None]] = []
    for row in source.rows(columns):
        try:
            if not isinstance(row, dict):
                find_form(row, None, "sft")  # says what it is
            made.append((make.tokenize(form.convert(_renamed(row, source))), None))
        except RowError as error:
            made.append(([Tokens(np.zeros(0, np.int32), np.zeros(0, bool))] * num_sequences, str(error)))
    sequences = [tokens for tokens, _ in made]
    result: dict[str, list[Any]] = {
        "num_targets": [_targets(each) for each in sequences],
        "flags": [_flags(each) for each in sequences],
        "problem": [problem for _, problem in made],
    }
    for index, (ids, trained) in enumerate(
        (("input_ids", "trained"), ("rejected_ids", "rejected_trained"))[:num_sequences]
    ):
        result[ids] = [each[index].ids for each in sequences]
        result[trained] = [each[index].trained for each in sequences]
    return result


def _targets(sequences: Sequence[Tokens]) -> int:
    """Targets of a row; of a preference of which one answer has none, none."""
    numbers = [each.num_targets for each in sequences]
    return sum(numbers) if all(numbers) else 0


def _flags(sequences: Sequence[Tokens]) -> int:
    kinds = {
        CUT: any(each.is_cut for each in sequences),
        MISSING_EOS: not all(each.ends for each in sequences),
        CUT_ANSWER: any(each.lost_targets for each in sequences),
        DROPPED_BY_TEMPLATE: not all(each.whole for each in sequences),
        PLAIN: any(each.without_template for each in sequences),
    }
    return sum(bit for bit, is_so in kinds.items() if is_so)


def _used(source: Source, table: Any, recipe: PreprocessConfig, report: Report) -> Part:
    """The rows of a data set that are used, counted."""
    chosen = np.arange(len(table))
    if source.config.fraction is not None:
        number = max(1, round(source.config.fraction * len(table)))
        chosen = np.sort(np.random.default_rng((recipe.seed, len(table))).permutation(len(table))[:number])
    report.read += len(chosen)
    flags, targets = (table.data.column(name).to_numpy() for name in ("flags", "num_targets"))
    report.cut.add(chosen[(flags[chosen] & CUT) != 0], source.place)
    report.missing_eos.add(chosen[(flags[chosen] & MISSING_EOS) != 0], source.place)
    report.left_out.add(chosen[targets[chosen] == 0], source.place)
    chosen = chosen[targets[chosen] > 0]
    report.plain.add(chosen[(flags[chosen] & PLAIN) != 0], source.place)
    report.dropped_by_template.add(chosen[(flags[chosen] & DROPPED_BY_TEMPLATE) != 0], source.place)
    report.cut_answer.add(chosen[(flags[chosen] & CUT_ANSWER) != 0], source.place)
    return Part(table, source.place, chosen, source.config.weight)
