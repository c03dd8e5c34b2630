"""Convert rows of the known formats, recognized by their fields, to an `Example`."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

from horizon_lm.runs.config.datasets import FORMATS, OPTIONAL_FIELDS, RowFormat
from horizon_lm.runs.data.column_hints import as_setting, field_for, suggest_columns
from horizon_lm.runs.data.conversations import (
    Completion,
    Conversation,
    Example,
    Message,
    Preference,
    RowError,
    Text,
    describe_type,
    read_messages,
    validate_messages,
)
from horizon_lm.runs.data.row_images import place_in_messages, place_in_text
from horizon_lm.runs.data.trl_compat import extract_prompt


def rename_fields(row: Any, columns: Mapping[str, str]) -> Any:
    """Return a row whose fields have the expected names, the keys of ``columns``, instead of the values; no object is returned as it is.

    Raises:
        RowError: a field that rows may not lack is missing.
    """
    if not columns or not isinstance(row, Mapping):
        return row
    missing = [theirs for ours, theirs in columns.items() if theirs not in row and ours not in OPTIONAL_FIELDS]
    if missing:
        raise RowError(f"field {missing[0]!r} of columns is missing; the row has {_field_names(row)}")
    # Under both names, a field would be used twice: as an instruction and its input, for example.
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return others | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def require_fields(row: Any) -> None:
    """Raise RowError if a row is no object with fields."""
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object with fields, but this is {describe_type(row)}")


def find_format(row: Any, wanted: str | None, objective: str, columns: Collection[str] = ()) -> RowFormat:
    """Return the format of a row.

    Args:
        row: the row, with renamed fields.
        wanted: name of the format, or None to recognize it by the fields of the row.
        objective: objective of the run, which limits the formats.
        columns: expected names of renamed fields; formats that require one of them take precedence.

    Raises:
        RowError: the row has no known format, or one that the objective does not use.
    """
    require_fields(row)
    usable = [fmt for fmt in FORMATS if objective in fmt.objectives]
    if wanted is not None:
        fmt = next(fmt for fmt in FORMATS if fmt.name == wanted)
        if fmt not in usable:
            raise RowError(f"format: {wanted} is not supported with objective: {objective}")
        return fmt
    preferred = [fmt for fmt in usable if any(set(fields) & set(columns) for fields in fmt.required)]
    for fmt in (*preferred, *usable):
        if fmt.matches(row):
            return fmt
    raise _unknown_format_error(row, usable, objective)


def _unknown_format_error(row: Mapping[str, Any], usable: Sequence[RowFormat], objective: str) -> RowError:
    """Return the error of a row that has none of the usable formats, with the remedy."""
    if "role" in row and "content" in row:
        return RowError(
            "the row is one message; write each conversation as one row: messages, a list of {role, content}"
        )
    expected = ", ".join(" + ".join(fields) for fmt in usable for fields in fmt.required)
    other = next((fmt for fmt in FORMATS if fmt not in usable and fmt.matches(row)), None)
    if other is not None:
        return RowError(
            f"rows in {other.name} format are not supported with objective: {objective}; use objective: {other.objectives[0]}, or rows "
            f"with the fields {expected}"
        )
    problem = f"the row has {_field_names(row)}, which matches no known format; expected fields: {expected}"
    formats = [(fields, fmt.optional) for fmt in usable for fields in fmt.required]
    if found := suggest_columns(row, formats, _USUAL[objective]):
        problem += f". Rename fields with columns, the expected name first, such as {as_setting(found)}"
    return RowError(problem)


def convert(row: Mapping[str, Any], row_format: RowFormat) -> Example:
    """Return the example in a row, with renamed fields, of a format; raise RowError, which names the field, if the row is invalid."""
    return _CONVERTERS[row_format.name](row)


def _text_field(row: Mapping[str, Any], name: str, optional: bool = False) -> str:
    """Return a field that must be text, or an empty text for an optional field that is missing; raise RowError for anything else."""
    value = row.get(name)
    if optional and value is None:
        return ""
    if name not in row:
        raise RowError(f"field {name!r} is missing; the row has {_field_names(row)}")
    if not isinstance(value, str):
        raise RowError(f"field {name!r} must be text, but is {describe_type(value)}")
    return value


def _from_text(row: Mapping[str, Any]) -> Text:
    return Text(*place_in_text(row, _text_field(row, "text")))


def _from_messages(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row, read_messages(row, "messages"))


def _from_sharegpt(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row, read_messages(row, "conversations"))


def _from_alpaca(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row, [*_alpaca_prompt(row), {"role": "assistant", "content": _text_field(row, "output")}])


def _from_question_answer(row: Mapping[str, Any]) -> Conversation:
    question, answer = _text_field(row, "question"), _text_field(row, "answer")
    turn: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(row, [*_history(row), *turn])


def _alpaca_prompt(row: Mapping[str, Any]) -> list[Message]:
    """Return the earlier turns of an alpaca row, followed by its instruction and input as one message."""
    parts = [_text_field(row, "instruction"), _text_field(row, "input", optional=True)]
    return [*_history(row), {"role": "user", "content": "\n".join(part for part in parts if part)}]


def _history(row: Mapping[str, Any]) -> list[Message]:
    """Return the earlier turns of a row, which LLaMA-Factory stores as pairs of question and answer."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(map(_is_pair_of_texts, pairs)):
        raise RowError("field 'history' must be a list of pairs of texts, question and answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _is_pair_of_texts(value: Any) -> bool:
    """Return whether a value is a list of two texts."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _from_prompt_completion(row: Mapping[str, Any]) -> Conversation | Completion:
    _require_one_answer(row, "completion")
    return _prompt_and_answer(row, "completion")


def _from_preference(row: Mapping[str, Any]) -> Preference:
    """Return the two answers of a row, each with the prompt."""
    for name in ("chosen", "rejected"):
        _require_one_answer(row, name)
    row = _with_prompt(row)
    return Preference(_prompt_and_answer(row, "chosen"), _prompt_and_answer(row, "rejected"))


def _require_one_answer(row: Mapping[str, Any], name: str) -> None:
    """Raise RowError if a field has several answers as a list of texts, instead of one answer: a text, or a list of messages."""
    answers = row.get(name)
    if isinstance(answers, list) and answers and all(isinstance(each, str) for each in answers):
        raise RowError(f"field {name!r} is a list of texts; write one in each row")


def _with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a preference with a ``prompt``: LLaMA-Factory's, its own, or the common start of both answers. RowError for none or two."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(row.get("conversations"), list):  # LLaMA-Factory: the conversation before the answers
        answers = {name: [row[name]] for name in ("chosen", "rejected") if isinstance(row.get(name), Mapping)}
        return {**row, "prompt": row["conversations"], **answers}
    if "instruction" in row and isinstance(chosen, str) and isinstance(rejected, str):
        if row.get("prompt"):
            raise RowError("fields 'instruction' and 'prompt' are both prompts; remove one of them")
        answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        return {**row, "prompt": _alpaca_prompt(row), **answers}
    # A text prompt next to two conversations usually repeats their start.
    if "prompt" in row and not (isinstance(row["prompt"], str) and isinstance(chosen, list)):
        if unused := [name for name in ("input", "history") if row.get(name)]:
            raise RowError(
                f"field {unused[0]!r} belongs to an instruction; remove it, or set columns: {{instruction: prompt}}"
            )
        return row
    return _extract_prompt(row, chosen, rejected)


def _extract_prompt(row: Mapping[str, Any], chosen: Any, rejected: Any) -> Mapping[str, Any]:
    """Return a preference with the common start of both answers as its prompt. If the start is messages without a turn of the user, the
    text prompt of the row becomes that turn.

    Raises:
        RowError: the answers are missing or of different types, or have no common start.
    """
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str | list) or not value:
            raise RowError(f"field {name!r} must be text or a list of {{role, content}}, but is {describe_type(value)}")
    if type(chosen) is not type(rejected):
        raise RowError("fields 'chosen' and 'rejected' must both be text, or both lists of {role, content}")
    pair = {"chosen": chosen, "rejected": rejected}
    if isinstance(chosen, str) and isinstance(rejected, str):
        _require_common_prompt(row, chosen, rejected)
    if isinstance(chosen, list):
        pair = {name: read_messages(row, name) for name in pair}
    with_prompt = {**row, **extract_prompt(pair)}
    if isinstance(row.get("prompt"), str):
        with_prompt["prompt"] = _begin_with_user(with_prompt["prompt"], row["prompt"])
    if not with_prompt["prompt"]:
        raise RowError(_missing_prompt_message(row))
    return with_prompt


def _begin_with_user(messages: list[Message], text: str) -> list[Message]:
    """Return the messages before two answers, with a text as the first turn of the user if they do not begin with one."""
    num_system = sum(message["role"] in ("system", "developer") for message in messages[:1])
    turns = messages[num_system:]
    if turns and turns[0]["role"] != "assistant":
        return messages
    return [*messages[:num_system], {"role": "user", "content": text}, *turns]


def _require_common_prompt(row: Mapping[str, Any], chosen: str, rejected: str) -> None:
    """Raise RowError for two answers of a row that are texts whose common start is not a prompt, such as the Y in Yes and You."""
    if chosen == rejected:
        return  # such a pair is left out once it is tokenized
    if chosen.startswith(rejected) or rejected.startswith(chosen):
        raise RowError(
            "one of 'chosen' and 'rejected' is the start of the other, so it has no answer; add a field 'prompt'"
        )
    common = next(index for index, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    if not any(map(str.isspace, chosen[:common])):
        raise RowError(_missing_prompt_message(row))


def _missing_prompt_message(row: Mapping[str, Any]) -> str:
    """Return the message for a preference without a prompt, with the remedy."""
    found = field_for(row, "prompt")
    remedy = f"name it with {as_setting({'prompt': found})}" if found else "add a field 'prompt'"
    return f"'chosen' and 'rejected' have no common start to use as the prompt; {remedy}"


def _prompt_and_answer(row: Mapping[str, Any], name: str) -> Conversation | Completion:
    """Return the example of a prompt and an answer, which must either both be text or both be messages."""
    prompt, answer = row.get("prompt"), row.get(name)
    if isinstance(prompt, str) and isinstance(answer, str):
        only_with_messages = {"system": _text_field(row, "system", optional=True), "tools": _tools(row)}
        for field, value in (only_with_messages | {"chat_template_kwargs": row.get("chat_template_kwargs")}).items():
            if value:
                raise RowError(f"field {field!r} is not used with a text prompt; write the prompt as messages")
        prompt, images = place_in_text(row, prompt)
        return Completion(prompt, answer, images)
    for field, value in (("prompt", prompt), (name, answer)):
        if not isinstance(value, str | list):
            raise RowError(
                f"field {field!r} must be text or a list of {{role, content}}, but is {describe_type(value)}"
            )
    if type(prompt) is not type(answer):
        raise RowError(
            f"field 'prompt' is {describe_type(prompt)}, but {name!r} is {describe_type(answer)}; both must be text, or both lists"
        )
    messages, answers = read_messages(row, "prompt"), read_messages(row, name)
    return _conversation(row, [*messages, *answers], len(messages))


def _conversation(row: Mapping[str, Any], messages: list[Message], num_prompt: int | None = None) -> Conversation:
    """Return messages, at least one, as a conversation with the system prompt, tools and template options of the row.

    ``num_prompt``: number of messages that are the prompt; None if the row does not say.
    """
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise RowError(f"field 'chat_template_kwargs' must be an object, but is {describe_type(options)}")
    if reserved := sorted(name for name in options if name in _reserved_options() or name.endswith("_token")):
        raise RowError(f"chat_template_kwargs.{reserved[0]} cannot be set by a row; remove it")
    system, first = _text_field(row, "system", optional=True), messages[0]
    if system and first["role"] in ("system", "developer") and first["content"] != system:
        raise RowError("field 'system' and the system message differ; keep one of them")
    if system and first["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
        num_prompt = None if num_prompt is None else num_prompt + 1
    messages, images = place_in_messages(row, messages)
    return Conversation(validate_messages(messages), _tools(row), dict(options), num_prompt, images)


@cache
def _reserved_options() -> frozenset[str]:
    """Return the options of ``apply_chat_template`` that a row may not set, because the tokenizer or this package sets them."""
    from transformers import PreTrainedTokenizerBase

    options = set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}
    others = {"messages", "add_special_tokens", "return_offsets_mapping", "special_tokens_map", "strftime_now"}
    return frozenset(options | others)


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a row, which may be JSON text; None without any."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError(f"field 'tools' is not valid JSON ({getattr(error, 'msg', error)})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"field 'tools' must be a list of JSON schemas, but is {describe_type(tools)}")
    return tools


def _field_names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) if row else "no fields"


_CONVERTERS: dict[str, Callable[[Mapping[str, Any]], Example]] = {
    "preference": _from_preference,
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "prompt_completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "question_answer": _from_question_answer,
    "text": _from_text,
}
_USUAL = {"sft": ("question", "answer"), "pretrain": ("text",), "dpo": ("chosen", "rejected")}  # suggested if in doubt
