"""Translate the datasets in files of Axolotl."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.runs.config.foreign.tables import LeftOut, tables

_AXOLOTL_LOCATION = ("path", "name", "data_files", "split")
_AXOLOTL_KNOWN = (
    *_AXOLOTL_LOCATION, "train_on_split", "type", "ds_type", "field_messages", "field", "field_chosen", "field_rejected", "field_tools", "roles",
    "message_property_mappings", "message_field_role", "message_field_content", "field_thinking", "template_thinking_key",
)  # fmt: skip
_AXOLOTL_DATASETS = {"datasets": "datasets", "test_datasets": "eval_datasets", "pretraining_dataset": "datasets"}
_AXOLOTL_ROLES = {"system": {"system"}, "user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "tool": {"tool"}}


def from_axolotl(
    theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of our settings for the datasets in a file of Axolotl, and add what is not translated to ``left_out``."""
    for key, ours in _AXOLOTL_DATASETS.items():
        entries = [theirs[key]] if isinstance(theirs.get(key), str | Mapping) else theirs.get(key)
        if not entries:
            continue
        entries = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
        if key == "pretraining_dataset":
            entries = [_from_pretraining_entry(entry) for entry in entries]
        yield ours, [_axolotl_entry(entry, objective, left_out) for entry in entries]
        if key == "test_datasets":
            continue
        if theirs.get("sample_packing") and all(map(_is_text_entry, entries)):
            yield "packing_strategy", "bfd_split"  # which continues long texts in further rows, as Axolotl does
        elif key == "datasets" and any(map(_is_text_entry, entries)):
            reason = "Axolotl continues texts longer than sequence_len in further rows, as with sample_packing: true"
            left_out.add("datasets.type", "numbers", reason)


def _from_pretraining_entry(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of ``pretraining_dataset`` to Axolotl's form of an entry of ``datasets``."""
    entry = {name: value for name, value in theirs.items() if name not in ("text_column", "type")}
    return {**entry, "type": "completion", "field": theirs.get("text_column", "text")}


def _is_text_entry(theirs: Mapping[str, Any]) -> bool:
    return theirs.get("type") == "completion"


def _axolotl_entry(theirs: Mapping[str, Any], objective: str, left_out: LeftOut) -> dict[str, Any]:
    """Return our entry of ``datasets`` for an entry of Axolotl's, and add what is not translated to ``left_out``."""
    entry = {key: theirs[key] for key in _AXOLOTL_LOCATION if theirs.get(key)}
    if theirs.get("train_on_split"):
        entry.setdefault("split", theirs["train_on_split"])
    fields = {"field": "text", "field_chosen": "chosen", "field_rejected": "rejected", "field_tools": "tools"}
    columns = {ours: theirs[key] for key, ours in fields.items() if theirs.get(key, ours) != ours}
    if row_format := _find_format_and_columns(theirs, objective, columns, left_out):
        entry["format"] = row_format
    _reject_odd_messages(theirs, left_out)
    left_out.reject_unknown("datasets", theirs, _AXOLOTL_KNOWN)
    return entry | ({"columns": columns} if columns else {})


def _reject_odd_messages(theirs: Mapping[str, Any], left_out: LeftOut) -> None:
    """Reject an entry whose messages have other roles than ours, or their reasoning in a field that the chat template does not read."""
    roles = theirs.get("roles") or {}
    if any(not {*names} <= _AXOLOTL_ROLES.get(role, {role}) for role, names in roles.items()):
        left_out.add("datasets.roles", "rejected", "messages must have the usual roles")
    field, read = (theirs.get(name) or "reasoning_content" for name in ("field_thinking", "template_thinking_key"))
    if field != read or field not in ("thinking", "reasoning_content"):  # our messages keep these fields as they are
        reason = (
            f"the reasoning must be in the field that the chat template reads; rename {field} to {read} in the messages"
        )
        left_out.add("datasets.field_thinking", "rejected", reason)


def _find_format_and_columns(
    theirs: Mapping[str, Any], objective: str, columns: dict[str, str], left_out: LeftOut
) -> str | None:
    """Return the format of an entry, or None if the rows decide, and add the columns that its type implies to ``columns``."""
    row_type = theirs.get("type")
    if objective == "dpo" and row_type in ("chat_template", "chat_template.default"):
        columns["prompt"] = theirs.get("field_messages", "messages")
        return None
    if objective != "dpo" and row_type in ("chat_template", "sharegpt"):
        return _conversation_format(theirs, columns, left_out)
    *_, axolotl = tables()
    row_types = axolotl["row_types"]["dpo" if objective == "dpo" else "sft"]
    if isinstance(row_type, Mapping):
        format_and_columns = _user_defined_type(row_type, row_types["fields"], left_out)
    else:
        format_and_columns = row_types["types"].get(str(row_type).partition(":")[0])  # alpaca:chat is a style of alpaca
    if format_and_columns is None:
        reason = f"{row_type!r} is not supported; write the rows as messages, and set type: {row_types['usual']}"
        left_out.add("datasets.type", "rejected", axolotl["row_types"]["rejected"].get(str(row_type), reason))
        return None
    columns |= format_and_columns.get("columns", {})
    if format_and_columns.get("format") != "text":
        reason = f"rows are rendered with the model's chat template instead of the format of {_type_name(row_type)}; horizon-lm inspect shows them"
        left_out.add("datasets.type", "numbers", reason)
    return format_and_columns.get("format")  # type: ignore[no-any-return]


def _user_defined_type(theirs: Mapping[str, Any], fields: Mapping[str, str], left_out: LeftOut) -> dict[str, Any]:
    """Return format and columns of a type that a file defines itself by the names of its fields and the text around them."""
    columns = {ours: theirs.get(key) or key.removeprefix("field_") for key, ours in fields.items()}
    if theirs.get("system_prompt"):
        reason = (
            "it is left out; write it into the field system of the rows, or into the template of chat_template_path"
        )
        left_out.add("datasets.type.system_prompt", "numbers", reason)
    rendered = [key for key in theirs if key.rpartition("_")[2] in ("format", "prompt")]
    left_out.reject_unknown("datasets.type", theirs, (*fields, *rendered))
    is_sft = "output" in columns
    return {
        "format": "alpaca" if is_sft else None,
        "columns": {ours: column for ours, column in columns.items() if ours != column},
    }


def _type_name(row_type: Any) -> str:
    return row_type if isinstance(row_type, str) else "its own type"


def _conversation_format(theirs: Mapping[str, Any], columns: dict[str, str], left_out: LeftOut) -> str | None:
    """Return the format of an entry with conversations, or None if the rows decide, and add its column to ``columns``."""
    names = theirs.get("message_property_mappings") or {}
    keys = (  # of the role and the content of a message; None for Axolotl's default
        names.get("role", theirs.get("message_field_role")),
        names.get("content", theirs.get("message_field_content")),
    )
    column = theirs.get("field_messages", "conversations" if theirs.get("type") == "sharegpt" else "messages")
    if keys == (None, None) and column == "conversations":
        return None  # our format of this field is recognized from the rows
    formats = {("from", "value"): "sharegpt", ("role", "content"): "messages", (None, None): "messages"}
    if keys not in formats or names.keys() - {"role", "content"}:
        left_out.add(
            "datasets.message_property_mappings", "rejected", "messages must be {role, content} or {from, value}"
        )
        return None
    expected = "conversations" if formats[keys] == "sharegpt" else "messages"
    if column != expected:
        columns[expected] = column
    return formats[keys]
