"""Read Parquet, Arrow, CSV and text with `datasets`, and datasets of the hub, without obeying what they declare.

Metadata of a file and a card may declare that a column holds pictures, audio, videos or documents, for which `datasets` then
opens any path and contacts any address. Columns are read as they are stored; those that are declared as anything but text or pictures are
rejected by name.
A card may name the files to read, which are files of its own repository or rejected.
"""

import csv
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horizon_lm.common.paths import similar_path
from horizon_lm.errors import DataError, HorizonError, first_line
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.config.yaml_file import require_few_values
from horizon_lm.runs.data.local_files import RowFiles, encoding_of, not_utf8

_READERS = ("arrow", "csv", "json", "parquet", "text")  # of `datasets`; others read pickles, images or databases
_KEPT_TYPES = ("Value", "Json")  # feature types that are stored as they are read, or are parsed from JSON
_IMAGE_TYPE = "Image"  # a feature type that is stored as bytes and a path, which rows may hold under any declaration
_SEPARATORS = (",", ";", "\t")  # of CSV; spreadsheets write semicolons where the comma divides decimals
_MAX_CARD_CHARS, _MAX_CARD_VALUES = 2**20, 2**18  # cards of hundreds of configs have a tenth of both
_BATCH_ROWS = 1000  # of Parquet; by default, `datasets` takes the size of the first row group, which may be empty


def read_files(config: DatasetConfig, files: RowFiles, cache: Path) -> Any:
    """Return the rows of local files of one type as a `datasets.Dataset` in a folder of the cache.

    Raises:
        DataError: a file cannot be read, or has columns of something else than text or images.
    """
    import datasets

    if chained := next((file for file in files.paths if "::" in str(file)), None):
        raise DataError(f"{chained}: names with '::' are addresses inside of others to datasets; rename the file")
    names = [glob.escape(str(file)) for file in files.paths]  # so that no name is a pattern for other files
    with _raising_data_error(config, files.paths):
        builder = datasets.load_dataset_builder(
            files.reader, data_files={"train": names}, cache_dir=str(cache), **_reader_options(config, files)
        )
        builder.download_and_prepare()
        if not builder.info.splits["train"].num_examples:
            raise DataError(f"{config.path}: no rows found")
        table = builder.as_dataset("train")
    # pandas interprets surplus leading fields as an index
    if any(name.startswith("__index_level_") for name in table.column_names):
        raise DataError(f"{config.path}: rows have more fields than the header; quote texts that contain commas")
    table = _without_decoding(config, table)
    if files.reader == "text":
        return table.filter(lambda texts: [bool(text.strip()) for text in texts], input_columns="text", batched=True)
    return table


def _reader_options(config: DatasetConfig, files: RowFiles) -> dict[str, Any]:
    """Return the options of a reader of `datasets` for these files; raise DataError if a column holds something else than text or images."""
    options, reader, paths = dict[str, Any](), files.reader, files.paths
    if reader in ("parquet", "arrow"):
        declared = _declared_features(reader, paths)
        _require_text(config, declared)
        options["features"] = _as_stored(declared)
    if reader == "parquet":
        options["batch_size"] = _BATCH_ROWS
    if reader == "csv":
        options |= _csv_options(paths)
    if reader == "text":
        options["sample_by"] = config.sample_by
    if reader in ("csv", "text") and (encoding := _encoding(paths)) != "utf-8":
        options["encoding"] = encoding
    return options


def read_hub(config: DatasetConfig) -> Any:
    """Return the rows of a dataset of the hub as a `datasets.Dataset`.

    Raises:
        DataError: it cannot be read, names files elsewhere, or has columns of something else than text or images.
    """
    import datasets

    selection = {"name": config.name, "data_dir": config.data_dir, "data_files": config.data_files}
    with _raising_data_error(config):
        with _limited_cards(config.path), _own_files_only(config):
            builder = datasets.load_dataset_builder(
                config.path, **{key: value for key, value in selection.items() if value}
            )
        reader = type(builder).__module__.split(".")[-1]  # `datasets` has a module for each of its readers
        if reader not in _READERS:
            raise DataError(
                f"{config.path}: files that are read as {reader} are not supported; use {', '.join(_READERS)}"
            )
        builder.download_and_prepare()
        table = builder.as_dataset(config.split or "train")
    return _without_decoding(config, table)


@contextmanager
def _raising_data_error(config: DatasetConfig, files: Sequence[Path] = ()) -> Iterator[None]:
    """Context manager: raise DataError in place of any error of a reader of ``files`` or, without ``files``, of the hub."""
    try:
        yield
    except HorizonError:
        raise
    except Exception as error:  # readers and the hub raise errors of many types
        inner = _innermost(error)
        message = f"{config.path}: cannot be read ({type(inner).__name__}: {first_line(inner)})"
        message += similar_path(config.path)  # of a name that is not on the hub
        if isinstance(inner, UnicodeDecodeError):
            message = next(filter(None, map(not_utf8, files)), message)
        raise DataError(message) from error


def _innermost(error: BaseException) -> BaseException:
    """Return the innermost cause of an error; the outer errors only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _own_files_only(config: DatasetConfig) -> Iterator[None]:
    """Context manager: let `datasets` find files of a dataset in its repository only, whoever names them."""
    from datasets import data_files

    resolve, errors = data_files.resolve_pattern, list[DataError]()

    def resolve_own(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> Any:
        if not base_path.startswith("hf://"):
            raise DataError(
                f"{config.path} is a reader of datasets, not a dataset; name the files by their path, to be read as {', '.join(_READERS)}"
            )
        is_own = pattern.startswith(base_path) if "://" in pattern else not Path(pattern).is_absolute()
        if not is_own or ".." in Path(pattern).parts or "::" in pattern:
            errors.append(DataError(f"{config.path}: names {pattern}, which is no file of this dataset on the hub"))
            raise errors[-1]
        return resolve(pattern, base_path, *args, **kwargs)

    with _replaced(data_files, "resolve_pattern", resolve_own, errors):
        yield


@contextmanager
def _limited_cards(place: str) -> Iterator[None]:
    """Context manager: let PyYAML read only texts that stand for few values. Raise DataError, naming ``place``, for others.

    The YAML of a card may have merge keys or aliases, a kilobyte of which stands for gigabytes.
    """
    import yaml  # of huggingface_hub

    load, errors = yaml.safe_load, list[DataError]()

    def load_small(text: Any) -> Any:
        try:
            if len(text) > _MAX_CARD_CHARS:
                raise ValueError(f"it has {len(text):,} characters")
            require_few_values(yaml.parse(text, Loader=yaml.SafeLoader), _MAX_CARD_VALUES)
        except (ValueError, RecursionError) as error:
            errors.append(
                DataError(
                    f"{place}: the YAML of its card is rejected ({error}); download the files of rows, and name them"
                )
            )
            raise errors[-1] from error
        return load(text)

    with _replaced(yaml, "safe_load", load_small, errors):
        yield


@contextmanager
def _replaced(module: Any, name: str, check: Callable[..., Any], errors: list[DataError]) -> Iterator[None]:
    """Context manager: replace a function of a package by ``check``, and raise the first of ``errors`` afterwards.

    The check adds each error that it raises to ``errors``, because `datasets` catches it, and goes on with an older copy in its cache.
    """
    original = getattr(module, name)
    setattr(module, name, check)
    try:
        yield
    finally:
        setattr(module, name, original)
    if errors:
        raise errors[0]


# Features


def _declared_features(reader: str, files: Sequence[Path]) -> Any:
    """Return the features that the first file declares, or the features of its column types if the declaration makes no sense.

    A column without any value in that file has the type of the first file in which it has a value.
    """
    import datasets

    schema = _read_schema(reader, files[0])
    for file in files[1:]:
        untyped = [number for number, field in enumerate(schema) if _lacks_type(field.type)]
        if not untyped:
            break
        other = _read_schema(reader, file)
        for number in untyped:
            if (field := schema.field(number)).name in other.names:
                schema = schema.set(number, other.field(field.name))
    try:
        return datasets.Features.from_arrow_schema(schema)
    except Exception:  # it may have been written by another version, or be no declaration at all
        return datasets.Features.from_arrow_schema(schema.remove_metadata())


def _lacks_type(arrow_type: Any) -> bool:
    """Return whether a type of Arrow, or one inside of it, is the null type of columns without any value."""
    import pyarrow

    inner = (arrow_type.field(number).type for number in range(arrow_type.num_fields))
    return bool(pyarrow.types.is_null(arrow_type)) or any(map(_lacks_type, inner))


def _read_schema(reader: str, file: Path) -> Any:
    """Return the schema of a file of rows without reading them."""
    import pyarrow
    from pyarrow import parquet

    if reader == "parquet":
        return parquet.read_schema(file)
    with file.open("rb") as stream:
        try:
            return pyarrow.ipc.open_stream(stream).schema
        except (OSError, pyarrow.ArrowInvalid):
            stream.seek(0)
            return pyarrow.ipc.open_file(stream).schema


def _as_stored(feature: Any) -> Any:
    """Return a feature of `datasets`, or a structure of them, with the types of its parts in storage, which nothing decodes."""
    import datasets

    if isinstance(feature, datasets.Features):
        return datasets.Features({name: _as_stored(each) for name, each in feature.items()})
    if isinstance(feature, dict):
        return {name: _as_stored(each) for name, each in feature.items()}
    if isinstance(feature, list):
        return [_as_stored(each) for each in feature]
    if isinstance(feature, datasets.List):
        return datasets.List(_as_stored(feature.feature), length=feature.length)
    if isinstance(feature, datasets.LargeList):
        return datasets.LargeList(_as_stored(feature.feature))
    if type(feature).__name__ in _KEPT_TYPES:
        return feature
    # Through a schema without metadata, which has the types in storage only.
    schema = datasets.Features({"column": feature}).arrow_schema.remove_metadata()
    return datasets.Features.from_arrow_schema(schema)["column"]


def _without_decoding(config: DatasetConfig, table: Any) -> Any:
    """Return a `datasets.Dataset` whose columns are read as they are stored; raise DataError if some hold no text."""
    import datasets

    _require_text(config, table.features)
    info = datasets.DatasetInfo(features=_as_stored(table.features))
    stored = table.data.replace_schema_metadata(None)
    return datasets.Dataset(stored, info=info, split=table.split, fingerprint=table._fingerprint)


def _require_text(config: DatasetConfig, features: Any) -> None:
    """Raise DataError if a column is declared as audio, videos or the like."""
    for name, feature in features.items():
        kind = _decoded_kind(feature)
        if kind is not None:
            raise DataError(
                f"{config.path}: column {name!r} has the type {kind}, and only text and images are supported; remove the column from the files"
            )


def _decoded_kind(feature: Any) -> str | None:
    """Return the name of a type in a feature that `datasets` would decode into something else than plain values or images; None if there is
    none.
    """
    parts: list[Any] = []
    if isinstance(feature, dict):
        parts += feature.values()
    elif isinstance(feature, list):
        parts += feature
    if (inner := getattr(feature, "feature", None)) is not None:  # of a list type
        parts.append(inner)
    if found := next(filter(None, map(_decoded_kind, parts)), None):
        return found
    is_decoded = hasattr(feature, "decode_example") and type(feature).__name__ not in (*_KEPT_TYPES, _IMAGE_TYPE)
    return type(feature).__name__ if is_decoded else None


# Encodings and separators


def _csv_options(files: Sequence[Path]) -> dict[str, Any]:
    """Return options that keep every field as text, so that N/A and 007 are not converted; raise DataError if files differ in them."""
    separator = _require_common(files, _separator, "separator")
    _require_common(files, lambda file: ", ".join(_header(file, separator)), "header")
    names = _header(files[0], separator)
    return {"sep": separator, "converters": dict.fromkeys(names, str), "keep_default_na": False}


def _separator(file: Path) -> str:
    """Return the separator of a file's fields: the one that its suffix stands for, or another one if only that divides its header."""
    usual = "\t" if file.suffix == ".tsv" else ","
    return next((each for each in (usual, *_SEPARATORS) if len(_header(file, each)) > 1), usual)


def _header(file: Path, separator: str) -> list[str]:
    """Return the fields of the first line of a CSV file that is not blank; raise DataError if it cannot be read."""
    try:
        with file.open(encoding=encoding_of(file), errors="replace", newline="") as stream:
            rows = csv.reader(stream, delimiter=separator)
            return next((row for row in rows if len(row) > 1 or "".join(row).strip()), [])
    except (OSError, csv.Error) as error:
        raise DataError(f"{file}: its header cannot be read ({first_line(error)})") from error


def _encoding(files: Sequence[Path]) -> str:
    """Return the encoding of all files. Files in UTF-8 may begin with a mark or not, since ``utf-8-sig`` reads both."""
    common = _require_common(files, lambda file: encoding_of(file).removesuffix("-sig"), "encoding")
    return "utf-8-sig" if any(encoding_of(file) == "utf-8-sig" for file in files) else common


def _require_common(files: Sequence[Path], describe: Callable[[Path], str], name: str) -> str:
    """Return the result of ``describe`` that all files share, since one reader reads them all; raise DataError for a file that differs.

    ``name``: the name of the described property, for the message.
    """
    first = describe(files[0])
    for file in files[1:]:
        if (other := describe(file)) != first:
            raise DataError(
                f"{file}: its {name} is {other!r}, but that of {files[0]} is {first!r}; list each by its own path"
            )
    return first


def rows_without_nulls(columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the rows of a part of a table, given as its columns, without the null fields that a table adds where a row lacks a field."""
    names, values = list(columns), list(columns.values())
    return [_without_nulls(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]


def _without_nulls(value: Any) -> Any:
    """Return a value of a row without null fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
