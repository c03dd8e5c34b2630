"""The forms that people have rows in, told apart by their fields, to `Example`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from horizon_lm.data.conversations import (
    Completion,
    Conversation,
    Example,
    Message,
    Preference,
    RowError,
    Text,
    checked,
    kind,
    read_messages,
    says_something,
)


@dataclass(frozen=True)
class Form:
    """One form.

    Attributes:
        name: as a setting has it.
        needed: fields that a row must have, any of these sets.
        convert: raises RowError for what cannot be used.
    """

    name: str
    needed: tuple[tuple[str, ...], ...]
    convert: Callable[[Mapping[str, Any]], Example]

    def fits(self, row: Mapping[str, Any]) -> bool:
        return any(all(field in row for field in fields) for fields in self.needed)


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row under the names that are expected here."""
    missing = [theirs for ours, theirs in columns.items() if theirs not in row and ours not in OPTIONAL]
    if missing:
        raise RowError(f"field {missing[0]!r}, which columns names, is missing; the row has {_names(row)}")
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def find_form(row: Any, wanted: str | None, objective: str, columns: Collection[str] = ()) -> Form:
    """The form that a setting names, or else that a row's fields show; RowError if there is none.

    Args:
        columns: fields that were renamed: a form that needs one of them comes before others.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object with fields, but this is {kind(row)}")
    usable = [form for form in FORMS if form.name in OF_OBJECTIVE[objective]]
    if wanted is not None:
        form = next(form for form in FORMS if form.name == wanted)
        if form not in usable:
            raise RowError(f"rows of the form {wanted}, which format names, are not used with objective: {objective}")
        return form
    named = [form for form in usable if any(set(fields) & set(columns) for fields in form.needed)]
    for form in (*named, *usable):
        if form.fits(row):
            return form
    others = [form.name for form in FORMS if form not in usable and form.fits(row)]
    if others:
        raise RowError(
            f"rows of the form {others[0]} are not used with objective: {objective}; it needs {_needed(usable)}"
        )
    expected = _needed(usable)
    raise RowError(
        f"the row has {_names(row)}, which make no known form; rows have {expected}. Rename fields with columns, the "
        "expected name first, such as columns: {instruction: question, output: answer}"
    )


def _needed(forms: Collection[Form]) -> str:
    """What rows of these forms have."""
    return "; ".join(f"{' or '.join(' and '.join(f) for f in form.needed)} ({form.name})" for form in forms)


def _text(row: Mapping[str, Any], name: str, optional: bool = False) -> str:
    value = row.get(name)
    if optional and value is None:
        return ""
    if name not in row:
        raise RowError(f"field {name!r} is missing; the row has {_names(row)}")
    if not isinstance(value, str):
        raise RowError(f"field {name!r} must be text, but is {kind(value)}")
    return value


def _from_text(row: Mapping[str, Any]) -> Text:
    return Text(_text(row, "text"))


def _from_messages(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row, read_messages(row, "messages"))


def _from_sharegpt(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row, read_messages(row, "conversations"))


def _from_alpaca(row: Mapping[str, Any]) -> Conversation:
    parts = [_text(row, "instruction"), _text(row, "input", optional=True)]
    messages = _history(row)
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    return _conversation(row, messages)


def _history(row: Mapping[str, Any]) -> list[Message]:
    """Earlier turns, as LLaMA-Factory has them: pairs of what was asked and answered."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair) for pair in pairs
    ):
        raise RowError("field 'history' must be a list of pairs of texts, asked and answered")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _from_prompt_completion(row: Mapping[str, Any]) -> Conversation | Completion:
    return _continued(row, "completion")


def _from_preference(row: Mapping[str, Any]) -> Preference:
    row = _with_prompt(row)
    pair = Preference(_continued(row, "chosen"), _continued(row, "rejected"))
    if row["chosen"] == row["rejected"]:
        raise RowError("fields 'chosen' and 'rejected' are the same, so nothing is preferred")
    return pair


def _with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A preference with its prompt, which may be the beginning that both answers share, and answers as messages."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(row.get("conversations"), list):  # as LLaMA-Factory has it: what leads up to one answer or the other
        answers = {name: [row[name]] for name in ("chosen", "rejected") if isinstance(row.get(name), Mapping)}
        return {**row, "prompt": row["conversations"], **answers}
    if "instruction" in row and isinstance(chosen, str) and isinstance(rejected, str):
        asked = "\n".join(part for part in (_text(row, "instruction"), _text(row, "input", optional=True)) if part)
        prompt = [*_history(row), {"role": "user", "content": asked}]
        return {
            **row,
            "prompt": prompt,
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
    if "prompt" in row and not (isinstance(row["prompt"], str) and isinstance(chosen, list)):
        return row  # else the prompt is there once more, as the beginning of both
    from horizon_lm.data.trl_compat import extract_prompt

    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str | list) or not value:
            raise RowError(f"field {name!r} must be text or a list of {{role, content}}, but is {kind(value)}")
    if type(chosen) is not type(rejected):
        raise RowError("fields 'chosen' and 'rejected' must both be text, or both lists of {role, content}")
    pair = {"chosen": chosen, "rejected": rejected}
    if isinstance(chosen, str) and isinstance(rejected, str):
        _require_a_common_beginning(chosen, rejected)
    if isinstance(chosen, list):
        pair = {name: read_messages(row, name) for name in pair}
    found = {**row, **extract_prompt(pair)}
    if not found["prompt"] and isinstance(row.get("prompt"), str):  # then it was not in the answers
        return {**row, **pair, "prompt": [{"role": "user", "content": row["prompt"]}]}
    if not found["prompt"]:
        raise RowError(_NO_PROMPT)
    return found


def _require_a_common_beginning(chosen: str, rejected: str) -> None:
    """RowError for texts in which TRL would find a prompt that is none, such as the Y of Yes and You."""
    if chosen == rejected:
        return  # told by the caller
    if chosen.startswith(rejected) or rejected.startswith(chosen):
        raise RowError(
            "'chosen' and 'rejected' are alike to the end of one, which has no answer; give a field 'prompt'"
        )
    common = next(index for index, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    if not any(map(str.isspace, chosen[:common])):
        raise RowError(_NO_PROMPT)


def _continued(row: Mapping[str, Any], name: str) -> Conversation | Completion:
    """A prompt and how it goes on: both text, or both messages."""
    prompt, answer = row.get("prompt"), row.get(name)
    if isinstance(prompt, str) and isinstance(answer, str):
        if _text(row, "system", optional=True):
            raise RowError("field 'system' is not read beside a prompt that is text; write the prompt as messages")
        if not answer:
            raise RowError(f"field {name!r} is empty, so nothing to learn")
        return Completion(prompt, answer)
    for field, value in (("prompt", prompt), (name, answer)):
        if not isinstance(value, str | list):
            raise RowError(f"field {field!r} must be text or a list of {{role, content}}, but is {kind(value)}")
    if type(prompt) is not type(answer):
        raise RowError(
            f"field 'prompt' is {kind(prompt)}, but {name!r} is {kind(answer)}; both must be text, or both lists"
        )
    messages, answers = read_messages(row, "prompt"), read_messages(row, name)
    if not all(says_something(message) for message in answers if message["role"] == "assistant"):
        raise RowError(f"field {name!r} has an answer that is empty, so nothing to learn")
    return _conversation(row, [*messages, *answers], len(messages))


def _conversation(row: Mapping[str, Any], messages: list[Message], num_prompt: int | None = None) -> Conversation:
    if num_prompt is not None and not any(message["role"] == "assistant" for message in messages[num_prompt:]):
        raise RowError("there is no message of the assistant after the prompt, so nothing to learn")
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise RowError(f"field 'chat_template_kwargs' must be an object, but is {kind(options)}")
    if taken := sorted(_TAKEN & set(options)):
        raise RowError(f"chat_template_kwargs.{taken[0]} is not for a row to say; remove it")
    system, first = _text(row, "system", optional=True), messages[0]
    if system and first["role"] in ("system", "developer") and first["content"] != system:
        raise RowError("field 'system' and the first message say different things to the model; keep one of them")
    if system and first["role"] not in ("system", "developer"):
        messages, num_prompt = [{"role": "system", "content": system}, *messages], num_prompt and num_prompt + 1
    return Conversation(checked(messages), _tools(row), dict(options), num_prompt)


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    import json

    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RowError(f"field 'tools' is not valid JSON ({error.msg})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"field 'tools' must be a list of JSON schemas, but is {kind(tools)}")
    return tools


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) if row else "no fields"


FORMS = (
    Form("preference", (("chosen", "rejected"),), _from_preference),
    Form("messages", (("messages",),), _from_messages),
    Form("sharegpt", (("conversations",),), _from_sharegpt),
    Form("prompt_completion", (("prompt", "completion"),), _from_prompt_completion),
    Form("alpaca", (("instruction", "output"),), _from_alpaca),
    Form("text", (("text",),), _from_text),
)
_NO_PROMPT = "'chosen' and 'rejected' do not begin alike, so there is no prompt; give a field 'prompt'"
OPTIONAL = ("input", "system", "history", "tools", "chat_template_kwargs")  # fields that a row may do without
_TAKEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}
OF_OBJECTIVE = {
    "sft": ("messages", "sharegpt", "prompt_completion", "alpaca", "text"),
    "pretrain": ("text",),
    "dpo": ("preference",),
}
