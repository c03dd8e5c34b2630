"""Find the longest row of a Trainer's dataset, from which the plan of its steps is made."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PROMPT = "prompt_ids"  # TRL's preference rows: a prompt, and one or more answers to it
_NO_TOKENS = ("token_type_ids", "position_ids")
_IMAGES = ("image", "images")  # TRL's columns
_MEASURED_PROMPTS = 64  # of all, the longest by their characters


def longest_row(dataset: Any, args: Any, tokenizer: Any = None) -> int | None:
    """Return the number of tokens of the longest row in a dataset of a Trainer; None if it is not known.

    If the trainer generates, the prompts that are longest as text are tokenized; otherwise the token ids of all rows are counted.

    Args:
        dataset: ``datasets.Dataset``, or a sequence of dictionaries; others are not read.
        args: ``transformers.TrainingArguments``, or a config of TRL, which may limit the length.
        tokenizer: tokenizer of prompts.
    """
    if isinstance(dataset, Mapping):  # several eval sets, by name
        lengths = [longest_row(each, args, tokenizer) for each in dataset.values()]
        return None if None in lengths else max(filter(None, lengths), default=None)
    if getattr(args, "max_completion_length", None) is not None:  # the trainer generates
        prompt = _longest_prompt(dataset, tokenizer)
        return None if prompt is None else prompt + args.max_completion_length
    known = [length for length in (_longest_tokenized_row(dataset), length_limit(args)) if length]
    return min(known, default=None)


def length_limit(args: Any) -> int | None:
    """Return the limit on the tokens of a row that the arguments set; None if there is none."""
    return getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)


def _longest_tokenized_row(dataset: Any) -> int | None:
    """Return the length of the longest row, a prompt with its longest answer; None for rows that are not tokenized."""
    lengths_of_column = _lengths_of_arrow(dataset) if hasattr(dataset, "features") else _lengths_of_rows(dataset)
    if not lengths_of_column:
        return None
    num_rows = len(next(iter(lengths_of_column.values())))
    prompts = lengths_of_column.get(_PROMPT, [0] * num_rows)
    answers = [lengths for name, lengths in lengths_of_column.items() if name != _PROMPT]
    longest_answers = [max(lengths) for lengths in zip(*answers, strict=True)] if answers else [0] * num_rows
    return max(map(sum, zip(prompts, longest_answers, strict=True)), default=None)


def _is_ids(name: str) -> bool:
    """Return whether a column has the token ids of rows."""
    return name.endswith("ids") and not name.endswith(_NO_TOKENS)


def _lengths_of_arrow(dataset: Any) -> dict[str, Sequence[int]] | None:
    """Return the lengths of the lists in each column of token ids, read from Arrow's offsets alone."""
    import pyarrow.compute
    import pyarrow.types

    if getattr(dataset, "data", None) is None:  # an iterable dataset
        return None
    columns = {}
    for name in filter(_is_ids, dataset.column_names):
        column = dataset.data.column(name)
        if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
            continue  # the name of a document, for example
        if dataset._indices is not None:  # filtered, selected or split: the table has all rows
            column = column.take(dataset._indices.column(0))
        columns[name] = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy().tolist()
    return columns


def _lengths_of_rows(dataset: Any) -> dict[str, Sequence[int]] | None:
    """Return the lengths of all token columns of a list of rows; None for other data."""
    if not isinstance(dataset, list | tuple) or not all(isinstance(row, Mapping) for row in dataset):
        return None  # reading a row of another dataset may have effects
    names = {name for row in dataset for name in row if _is_ids(name)}
    return {name: [_num_ids(row.get(name)) for row in dataset] for name in names}


def _num_ids(ids: Any) -> int:
    """Return the length of a list or a tensor; 0 for anything else."""
    return len(ids) if hasattr(ids, "__len__") and not isinstance(ids, str) and getattr(ids, "ndim", 1) > 0 else 0


def _longest_prompt(dataset: Any, tokenizer: Any) -> int | None:
    """Return the tokens of the longest prompt, tokenized as a trainer that generates does; None if the prompts cannot be read.

    It is None for prompts with images, too: the tokens of images are known only after all of them were opened.
    """
    columns = getattr(dataset, "column_names", None)
    if tokenizer is None or not columns or "prompt" not in columns or getattr(dataset, "data", None) is None:
        return None
    if any(name in columns for name in _IMAGES):
        return None
    prompts = sorted(dataset["prompt"], key=lambda prompt: len(str(prompt)), reverse=True)[:_MEASURED_PROMPTS]
    return max(map(len, _tokenized(prompts, tokenizer)), default=None)


def _tokenized(prompts: Sequence[Any], tokenizer: Any) -> Iterable[Any]:
    """Yield the token ids of each prompt, which is a text or a conversation."""
    for prompt in prompts:
        if isinstance(prompt, str):
            yield tokenizer(prompt)["input_ids"]
        else:
            yield tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
