"""Tokenize the entries of ``datasets`` to disk, with a cache keyed by everything that the tokens depend on."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from horizon_lm.common.quantities import counted
from horizon_lm.common.visible import visible
from horizon_lm.errors import DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data import trl_compat
from horizon_lm.runs.data.chat_template import prints_date, today
from horizon_lm.runs.data.conversations import Example, RowError
from horizon_lm.runs.data.findings import ExampleCounts
from horizon_lm.runs.data.formats import OPTIONAL_FIELDS, RowFormat, find_format, rename_fields, require_fields
from horizon_lm.runs.data.packing import pack, rows_without_targets
from horizon_lm.runs.data.row_fields import reject_other_rows, reject_placeholders, unused_fields
from horizon_lm.runs.data.sources import Source, cannot_be_cached, digest, open_source, progress_bars
from horizon_lm.runs.data.table_cache import discard_altered_beside, record
from horizon_lm.runs.data.token_dataset import Part, TokenTable
from horizon_lm.runs.data.tokenize import LEFT_OUT, ExampleTokenizer, RowFlag, Tokens, flags_of_row
from horizon_lm.runs.data.workers import ending_with_us

_CACHE_VERSION = 15  # version of the cached tables; increase it when their content changes
_MAX_FAULTS_SHOWN = 5  # maximum number of faults listed in one error
_BATCH_BYTES = 4 * 2**20  # text per batch of tokenization
_MAX_ROW_CHARS = 1 << 24  # maximum length of a row's text: about four million tokens
_PROBLEM = (
    "fault",
    "problem",
)  # columns of a token table for what is wrong with an invalid row: its kind, and a message
ROWS_INSPECTED = 1000  # rows searched for optional fields
_MAX_TYPED = (
    0.01  # occurrences of an end token inside of answers, for each at an end, that somebody may have typed into texts
)


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    """Options of preprocessing.

    Attributes:
        objective, train_on, max_length: settings of the run.
        packing: packing strategy, or None for unpacked rows.
        num_proc: number of processes; None for one.
        seed: seed for sampling a fraction of the rows.
        day: the date that chat templates print; None for today's.
        chat_template: where the chat template is from, for messages; None for the model's own.
    """

    objective: str
    train_on: str | None = None
    max_length: int | None = None
    packing: str | None = None
    num_proc: int | None = None
    seed: int = 0
    day: str | None = None
    chat_template: str | None = None


@dataclass
class Report:
    """The result of preprocessing some datasets.

    Attributes:
        rows: the rows that are used.
        read: number of rows read.
        flagged: rows with each flag. A flag of `LEFT_OUT` keeps a row from being used.
        unused: rows with fields that are not used, among the first ones of each dataset.
        unused_fields: the names of these fields.
    """

    rows: TokenTable = field(default_factory=lambda: TokenTable([]))
    read: int = 0
    flagged: dict[RowFlag, ExampleCounts] = field(default_factory=lambda: {flag: ExampleCounts() for flag in RowFlag})
    unused: ExampleCounts = field(default_factory=ExampleCounts)
    unused_fields: set[str] = field(default_factory=set)

    def end_tokens(self) -> list[int]:
        """Return the tokens that end the answers that are trained on, the most frequent one first.

        A token that also occurs inside of answers is left out, such as the token between the reasoning and the answer of gpt-oss, unless it
        occurs there so rarely that somebody may have typed it.
        """
        ends, inner = (Counter[int](), Counter[int]())
        for part in self.rows.parts:
            for counts, name in ((ends, "ends"), (inner, "inner")):
                rows = part.table.data.column(name).take(part.indices)
                counts.update(rows.combine_chunks().flatten().to_pylist())
        return [token for token, count in ends.most_common() if inner[token] <= _MAX_TYPED * count]


class Rows(Protocol):
    """Rows of one entry of ``datasets``, each of which has a place."""

    @property
    def config(self) -> DatasetConfig: ...
    def __len__(self) -> int: ...
    def row(self, index: int) -> Any: ...
    def place(self, index: int) -> str: ...


class Problems:
    """Invalid rows, counted by their fault."""

    def __init__(self) -> None:
        self._messages: dict[str, list[str]] = {}  # by fault: the first message, and another one if there is any
        self._rows: dict[str, ExampleCounts] = {}

    def add(self, source: Rows, rows: Iterable[tuple[int, str, str]]) -> None:
        """Count invalid rows of a dataset. ``rows``: the index, the fault and the message of each."""
        indices: dict[str, list[int]] = {}
        for index, fault, message in rows:
            indices.setdefault(fault, []).append(index)
            messages = self._messages.setdefault(fault, [message])
            if len(messages) == 1 and message != messages[0]:
                messages.append(message)
        for fault, indices_of_fault in indices.items():
            self._rows.setdefault(fault, ExampleCounts()).add(np.array(indices_of_fault), source.place)

    def add_all(self, source: Source, table: Any) -> None:
        """Count the rows of a tokenized table that have a text in the column ``problem``."""
        import pyarrow.compute as pc

        columns = [table.data.column(name) for name in _PROBLEM]
        invalid = np.flatnonzero(pc.is_valid(columns[0]).to_numpy())
        texts = (column.take(invalid).to_pylist() for column in columns)
        self.add(source, zip(invalid.tolist(), *texts, strict=True))

    def reject(self, chat_template: str | None = None) -> None:
        """Raise DataError if any row is invalid, with a line for each fault and its rows. ``chat_template``: as in `PreprocessConfig`."""
        if not self._rows:
            return
        lines, num_unlisted = [], sum(rows.count for rows in self._rows.values())
        for fault, rows in [*self._rows.items()][:_MAX_FAULTS_SHOWN]:
            row_count = f" ({rows.count:,} rows)" if rows.count > 1 else ""
            differs = " (in the first of them)" if len(self._messages[fault]) > 1 else ""
            template = f" (chat_template_path: {chat_template})" if chat_template and "chat template" in fault else ""
            lines.append(f"{rows}{row_count}: {self._messages[fault][0]}{template}{differs}")
            num_unlisted -= rows.count
        if num_unlisted:
            lines.append(f"... and {num_unlisted:,} more")
        if len(lines) > 1:
            lines.insert(0, f"{sum(rows.count for rows in self._rows.values()):,} invalid rows:")
        raise DataError("\n".join(lines))


def prepare(
    datasets: Sequence[DatasetConfig],
    tokenizer: Any,
    options: PreprocessConfig,
    chosen: Sequence[np.ndarray] | None = None,
) -> Report:
    """Read, tokenize and truncate the rows of some datasets, and leave out those that cannot be trained on.

    Args:
        datasets: the datasets.
        tokenizer: the model's tokenizer.
        options: settings of the run.
        chosen: the indices of the rows of each dataset that are to be used; None for those that the datasets select.

    Raises:
        ConfigError: the rows need a chat template, character offsets or TRL, which are missing.
        DataError: files or rows are invalid.
    """
    report, parts, problems = Report(), [], Problems()
    with progress_bars(), ending_with_us():
        for number, config in enumerate(datasets):
            source = open_source(config)
            try:
                row_format = find_row_format(source, options.objective)
            except RowError as error:  # every further row would give the same error
                problems.add(source, [(0, error.fault, str(error))])
                continue
            table = _tokenize_source(source, row_format, tokenizer, options)
            _count_unused(source, row_format, report)
            problems.add_all(source, table)
            indices = _choose_rows(source, options) if chosen is None else chosen[number]
            parts.append(_select_rows(source, table, indices, report))
    problems.reject(options.chat_template)
    report.rows = TokenTable(parts)
    return report


def pack_rows(rows: TokenTable, options: PreprocessConfig) -> tuple[TokenTable, ExampleCounts]:
    """Pack the rows of each dataset, or return them unchanged if ``options`` pack none. Also return the rows that packing has cut so that
    none of their tokens can be trained on.
    """
    lost = ExampleCounts()
    if options.packing is None:
        return rows, lost
    parts = []
    with progress_bars():
        for part in (part for part in rows.parts if len(part)):
            packed = pack(part, options.packing, options.max_length or 0)
            lost.add(rows_without_targets(part, packed), part.place)
            parts.append(packed)
    return TokenTable(parts), lost


def summary(rows: TokenTable, packed: TokenTable) -> str:
    """Describe the number of rows, tokens and targets in one line. ``packed``: the packed rows; ``rows`` themselves without packing."""
    tokens, targets = int(packed.num_tokens.sum()), int(packed.num_targets.sum())
    count = counted(len(rows), "row")
    if packed is not rows:
        count += f" in {counted(len(packed), 'packed row')}"
        if without_targets := sum(len(part.table) - len(part) for part in packed.parts):
            count += f" ({without_targets:,} more without a token to train on)"
    return f"{count}, {tokens:,} tokens, {targets:,} trained on ({targets / max(1, tokens):.0%})"


def find_row_format(source: Rows, objective: str) -> RowFormat:
    """Return the format of a dataset, recognized from its first row. Raise RowError if no format matches."""
    first, config = source.row(0), source.config
    _require_optional_columns(source)
    return find_format(_with_expected_names(first, config), config.format, objective, config.columns or ())


def _require_optional_columns(source: Rows) -> None:
    """Raise RowError if ``columns`` names an optional field that none of the first rows has."""
    optional = {theirs for ours, theirs in (source.config.columns or {}).items() if ours in OPTIONAL_FIELDS}
    for index in range(min(ROWS_INSPECTED, len(source))):
        if not optional:
            return
        row = source.row(index)
        optional -= set(row) if isinstance(row, dict) else set()
    if optional:
        raise RowError(f"field {min(optional)!r} of columns is in none of the first {ROWS_INSPECTED:,} rows")


def _count_unused(source: Source, row_format: RowFormat, report: Report) -> None:
    """Add the rows with fields that are not used, among the first rows of a dataset, and the names of the fields to the report."""
    used = {*row_format.fields(), *(source.config.columns or {}).values()}
    unused_of_rows = [unused_fields(source.row(index), used) for index in range(min(ROWS_INSPECTED, len(source)))]
    report.unused_fields.update(*unused_of_rows)
    report.unused.add(np.flatnonzero([bool(unused) for unused in unused_of_rows]), source.place)


def read_example(row: Any, config: DatasetConfig, row_format: RowFormat, objective: str) -> Example:
    """Return the example in a row of a dataset; raise RowError if it is invalid."""
    require_fields(row)
    _reject_huge(row)
    renamed = _with_expected_names(row, config)
    reject_other_rows(renamed, objective)
    example = row_format.convert(renamed)
    reject_placeholders(example)
    return example


def _with_expected_names(row: Any, config: DatasetConfig) -> Any:
    """Return a row with the expected names of its fields, as ``columns`` gives them; other values than objects as they are."""
    return rename_fields(row, config.columns) if config.columns and isinstance(row, dict) else row


def _tokenize_source(source: Source, row_format: RowFormat, tokenizer: Any, options: PreprocessConfig) -> Any:
    """Return the token table of a dataset, cached if it was made before. Delete altered tables first; raise DataError if none can be cached."""
    length, day = row_length_limit(options), options.day or today()
    fingerprint = digest(
        _CACHE_VERSION, source.fingerprint, source.config.columns, row_format.name, options.objective, options.train_on,
        length, origin(tokenizer, day),
    )  # fmt: skip
    tokenize = partial(
        _tokenize_rows, source=source.without_table(), row_format=row_format, objective=options.objective,
        tokenizer=ExampleTokenizer(tokenizer, options.train_on, length, day),
    )  # fmt: skip
    try:
        discard_altered_beside(source.table)
        table = source.table.map(
            tokenize, batched=True, batch_size=_rows_per_batch(source.table), num_proc=options.num_proc,
            remove_columns=source.table.column_names, features=_token_features(options.objective),
            new_fingerprint=fingerprint, load_from_cache_file=True, desc=visible(f"tokenizing {source.config.path}"),
        )  # fmt: skip
        return record(table)
    except OSError as error:
        raise DataError(f"{source.config.path}: {cannot_be_cached(error)}") from error


def _token_columns(objective: str) -> list[tuple[str, str]]:
    """Return the columns of a token table that hold the token ids and the target mask of each sequence of a row, as pairs."""
    columns = [("input_ids", "trained")]
    return [*columns, ("rejected_ids", "rejected_trained")] if objective == "dpo" else columns


def _token_features(objective: str) -> Any:
    """Return the types of the columns of a token table."""
    from datasets import Features, List, Value

    columns = _token_columns(objective)
    types = {ids: List(Value("int32")) for ids, _ in columns} | {trained: List(Value("bool")) for _, trained in columns}
    types |= {"ends": List(Value("int32")), "inner": List(Value("int32"))}
    return Features(
        types | {"num_targets": Value("int32"), "flags": Value("int16")} | dict.fromkeys(_PROBLEM, Value("string"))
    )


def _rows_per_batch(table: Any) -> int:
    """Return the number of rows that have about `_BATCH_BYTES` of text together, from 1 to 200."""
    return max(1, min(200, _BATCH_BYTES * len(table) // max(1, table.data.nbytes)))


def row_length_limit(options: PreprocessConfig) -> int | None:
    """Return the length to which rows are truncated before packing, or None if packing needs whole rows."""
    return options.max_length if options.packing in (None, "bfd") else None


def origin(tokenizer: Any, day: str) -> dict[str, str]:
    """Return all that the tokens of rows depend on besides rows and settings: versions of packages, hashes of the tokenizer and of its chat
    template, and the date if the template prints it.
    """
    import tokenizers
    import transformers

    versions = {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "trl": trl_compat.version(),
    }
    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.name_or_path
    result = {
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "tokenizer": digest(
            type(tokenizer).__name__, content, tokenizer.special_tokens_map, tokenizer.split_special_tokens
        ),
        "chat template": digest(tokenizer.chat_template),
    }
    return result | ({"date": day} if prints_date(tokenizer) else {})


def _tokenize_rows(
    columns: dict[str, list[Any]], *, source: Source, row_format: RowFormat, tokenizer: ExampleTokenizer, objective: str
) -> dict[str, list[Any]]:
    """Tokenize a batch of rows, and return the columns of the token table.

    An invalid row has no tokens, and an error in the columns ``fault`` and ``problem``, so that all errors are reported together.
    """
    columns_of_sequences = _token_columns(objective)
    no_tokens = [Tokens(np.zeros(0, np.int32), np.zeros(0, bool))] * len(columns_of_sequences)
    tokenized: list[tuple[list[Tokens], tuple[str, str] | tuple[None, None]]] = []
    for row in source.rows(columns):
        try:
            example = read_example(row, source.config, row_format, objective)
            tokenized.append((tokenizer.tokenize(example), (None, None)))
        except RowError as error:
            tokenized.append((no_tokens, (error.fault, str(error))))
    sequences = [tokens for tokens, _ in tokenized]
    result: dict[str, list[Any]] = {
        "num_targets": [sum(tokens.num_targets for tokens in each) for each in sequences],
        "flags": [int(flags_of_row(each)) for each in sequences],
        "ends": [sorted({token for tokens in each for token in tokens.end_tokens}) for each in sequences],
        "inner": [sorted({token for tokens in each for token in tokens.inner}) for each in sequences],
    }
    result |= {name: [problem[index] for _, problem in tokenized] for index, name in enumerate(_PROBLEM)}
    for index, (ids_column, mask_column) in enumerate(columns_of_sequences):
        result[ids_column] = [each[index].ids for each in sequences]
        result[mask_column] = [each[index].trained for each in sequences]
    return result


def _reject_huge(row: Any) -> None:
    """Raise RowError for a row that is too long to tokenize; a tokenizer uses about 200 times the size of its text."""
    num_chars = _num_chars(row)
    if num_chars > _MAX_ROW_CHARS:
        raise RowError(
            f"the row has {num_chars:,} characters of text, more than {_MAX_ROW_CHARS:,}; split it into several rows"
        )


def _num_chars(value: Any) -> int:
    """Return the number of characters in all texts of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _choose_rows(source: Source, options: PreprocessConfig) -> np.ndarray:
    """Return the indices of the rows that ``fraction`` of a dataset selects, int (n,): the same ones each time, by ``seed``."""
    if source.config.fraction is None:
        return np.arange(len(source))
    number = max(1, round(source.config.fraction * len(source)))
    return np.sort(np.random.default_rng((options.seed, len(source))).permutation(len(source))[:number])


def _select_rows(source: Source, table: Any, chosen: np.ndarray, report: Report) -> Part:
    """Return the chosen rows of a dataset that can be used. Count the chosen rows, and the rows with each flag, in the report."""
    report.read += len(chosen)
    flags = table.data.column("flags").to_numpy()
    used = chosen[(flags[chosen] & LEFT_OUT) == 0]
    for flag, rows in report.flagged.items():
        # Truncation and reasons to leave a row out are counted among all chosen rows, other flags among the rows that are used.
        counted_rows = chosen if flag in LEFT_OUT | RowFlag.TRUNCATED else used
        rows.add(counted_rows[(flags[counted_rows] & flag) != 0], source.place)
    return Part(table, source.place, used, source.config.weight)
