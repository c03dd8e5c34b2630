"""Rows become examples, tokens with targets, and batches."""

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import AddedToken

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.errors import ConfigError, DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.config.datasets import FORMATS
from horizon_lm.runs.data import examples, preprocess
from horizon_lm.runs.data.answer_spans import locate_answers
from horizon_lm.runs.data.chat_template import ChatRenderer
from horizon_lm.runs.data.checks import check_overlap
from horizon_lm.runs.data.conversations import Completion, Conversation, Preference, RowError, Text
from horizon_lm.runs.data.findings import ExampleCounts, Finding, describe, reject_errors
from horizon_lm.runs.data.formats import convert, find_format, rename_fields
from horizon_lm.runs.data.json_rows import _JsonListReader, read_rows
from horizon_lm.runs.data.loader import Sampler, batch_from, collate
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from horizon_lm.runs.data.sources import open_source
from horizon_lm.runs.data.token_dataset import Row, TokenTable
from horizon_lm.runs.data.tokenize import ExampleTokenizer, RowFlag, Tokens
from tests.e2e.tiny import CHATML, CHATML_WITH_MARKS, build_tokenizer
from tests.support.prepared_rows import ANSWER, USER, conversation, messages, prepared, trained_text, write


def example(row: Any, objective: str = "sft", columns: dict[str, str] | None = None) -> Any:
    row = rename_fields(row, columns or {})
    return convert(row, find_format(row, None, objective))


# Formats


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [USER, ANSWER]}, None),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "The keeper."}]}]}, None),
        ({"conversations": [{"from": "human", "value": "Who?\nNow"}, {"from": "gpt", "value": "The keeper."}]}, None),
        ({"instruction": "Who?", "input": "Now", "output": "The keeper."}, None),
        ({"prompt": [USER], "completion": [ANSWER]}, None),
        ({"question": "Who?\nNow", "answer": "The keeper."}, None),
        ({"q": "Who?\nNow", "a": "The keeper."}, {"instruction": "q", "output": "a"}),
    ],
)
def test_formats_give_the_same_conversation(row: dict[str, Any], columns: dict[str, str] | None) -> None:
    assert example(row, columns=columns).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("row", "columns", "objective"),
    [
        ({"input": "Who?\nNow", "output": "The keeper."}, {"instruction": "input"}, "sft"),
        ({"input": "Who?\nNow", "chosen": "The keeper.", "rejected": "No."}, {"instruction": "input"}, "dpo"),
        ({"system": "Who?\nNow", "output": "The keeper."}, {"instruction": "system"}, "sft"),
    ],
)
def test_a_renamed_field_has_one_meaning(row: dict[str, Any], columns: dict[str, str], objective: str) -> None:
    found = example(row, objective, columns)
    assert (found if objective == "sft" else found.chosen).messages == [USER, ANSWER]


def test_text_does_not_become_a_conversation() -> None:
    assert example({"text": "Dusk."}) == Text("Dusk.")
    assert example({"prompt": "At", "completion": " dusk."}) == Completion("At", " dusk.")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "No."}]},
        {"conversations": [USER], "chosen": ANSWER, "rejected": {"from": "gpt", "value": "No."}},
        {"instruction": "Who?", "input": "Now", "chosen": "The keeper.", "rejected": "No."},
    ],
)
def test_preferences_with_and_without_a_prompt(row: dict[str, Any]) -> None:
    pair = example(row, "dpo")
    assert isinstance(pair, Preference)
    assert pair.chosen.messages == [USER, ANSWER]
    assert pair.rejected.messages == [USER, {"role": "assistant", "content": "No."}]
    assert pair.chosen.num_prompt == 1


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ("Yes ", "No", "no common start"),
        ("Yes", "You", "no common start"),
        ("Hi", "Hi there", "is the start of the other"),
    ],
)
def test_preferences_without_a_common_prompt_are_rejected(chosen: Any, rejected: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        example({"chosen": chosen, "rejected": rejected}, "dpo")


def test_preference_of_texts() -> None:
    pair = example({"chosen": "At dusk. Yes.", "rejected": "At dusk. No."}, "dpo")
    assert pair == Preference(Completion("At dusk.", " Yes."), Completion("At dusk.", " No."))


OTHER_NAMES = {  # near misses of the names of fields
    "messages": ("mesages", "chat", "data"),
    "conversations": ("conversation", "dialog"),
    "prompt": ("question", "promt", "query", "user_prompt", "frage"),
    "question": ("query", "Question", "input", "user", "problem", "frage"),
    "instruction": ("Instruction", "instrution", "prompt", "question", "frage"),
    "input": ("context",),
    "output": ("response", "Output", "answer", "completion", "target", "output_text", "antwort"),
    "answer": ("response", "anwser", "reply", "Answer", "assistant", "solution", "antwort"),
    "completion": ("response", "output", "answer", "completions", "antwort"),
    "chosen": ("accepted", "preferred", "chosen_response", "Chosen"),
    "rejected": ("reject", "rejected_response", "negative", "worse"),
    "text": ("txt", "content", "document", "Text", "inhalt"),
    "system": ("system_prompt",),
}
KNOWN_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"messages": [USER, ANSWER]}),
    ("sft", {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The keeper."}]}),
    ("sft", {"instruction": "Who?", "input": "Now", "output": "The keeper."}),
    ("sft", {"instruction": "Who?", "output": "The keeper."}),
    ("sft", {"system": "Be short.", "question": "Who?", "answer": "The keeper."}),
    ("sft", {"prompt": "Who? ", "completion": "The keeper."}),
    ("sft", {"prompt": [USER], "completion": [ANSWER]}),
    ("sft", {"text": "At dusk."}),
    ("pretrain", {"text": "At dusk."}),
    ("dpo", {"prompt": "Who? ", "chosen": "The keeper.", "rejected": "No."}),
    ("dpo", {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}]}),
]


def suggested(row: dict[str, Any], objective: str) -> dict[str, str]:
    """Return the columns that the error about a row suggests; empty without any."""
    with pytest.raises(RowError) as error:
        find_format(row, None, objective)
    return yaml.safe_load(str(error.value).partition(" such as ")[2] or "columns: {}")["columns"]


def spoken(found: Any) -> list[tuple[str, str]]:
    """Return the texts of an example with their speakers. Two texts may be a conversation, or be left without a template."""
    if isinstance(found, Preference):
        return [*spoken(found.chosen), *spoken(found.rejected)]
    if isinstance(found, Conversation):
        return [(each["role"], each["content"]) for each in found.messages]
    return [("", found.text)] if isinstance(found, Text) else [("user", found.prompt), ("assistant", found.completion)]


NEAR_MISSES = [
    (objective, near, row)
    for objective, row in KNOWN_ROWS
    for field in row
    for other in OTHER_NAMES[field]
    for near in [{"id": "a1"} | {other if name == field else name: value for name, value in row.items()}]
    if len(near) == len(row) + 1 and not any(fmt.matches(near) for fmt in FORMATS)
]


@pytest.mark.parametrize("order", [list, reversed])
@pytest.mark.parametrize(("objective", "near", "row"), NEAR_MISSES)
def test_columns_are_suggested_for_near_misses(
    objective: str, near: dict[str, Any], row: dict[str, Any], order: Any
) -> None:
    """A row, one of whose fields has another name, becomes the example that it was, whatever the order of its fields."""
    near = {name: near[name] for name in order(list(near))}
    columns = suggested(near, objective)
    renamed = rename_fields(near, columns)
    found = convert(renamed, find_format(renamed, None, objective, columns))
    assert spoken(found) == spoken(example(row, objective))


def test_near_misses_of_all_formats() -> None:
    """The control: the rows above have all formats."""
    matched = {fmt.name for fmt in FORMATS for _, row in KNOWN_ROWS if fmt.matches(row)}
    assert matched == {fmt.name for fmt in FORMATS}


@pytest.mark.parametrize(
    ("objective", "fields", "columns"),
    [
        ("sft", "instruction input response", {"output": "response"}),
        ("sft", "instruction context response category", {"output": "response", "input": "context"}),
        ("sft", "system_prompt question response", {"answer": "response", "system": "system_prompt"}),
        ("sft", "prompt response label", {"completion": "response"}),  # unpaired preferences
        ("sft", "input output", {"question": "input", "answer": "output"}),
        ("sft", "url title body", {"question": "title", "answer": "body"}),
        ("sft", "Frage: Antwort:", {"question": "Frage:", "answer": "Antwort:"}),
        ("sft", "answer", {}),
        ("sft", "question input", {}),
        ("sft", "answer_a answer_b", {}),
        ("dpo", "prompt response_a response_b", {}),
        ("dpo", "question accepted declined", {"chosen": "accepted", "rejected": "declined", "prompt": "question"}),
    ],
)
def test_suggested_columns(objective: str, fields: str, columns: dict[str, str]) -> None:
    assert suggested(dict.fromkeys(fields.split(), "a text"), objective) == columns


def test_text_is_the_longest_unknown_field() -> None:
    assert suggested({"title": "Dusk", "body": "At dusk, the keeper ..."}, "pretrain") == {"text": "body"}


def test_a_row_that_is_one_message() -> None:
    with pytest.raises(RowError, match="the row is one message; write each conversation as one row"):
        find_format(USER, None, "sft")


def test_prompt_of_preferences_with_another_name() -> None:
    row = {"question": "Who?", "chosen": "The keeper.", "rejected": "No."}
    with pytest.raises(
        RowError, match=r"no common start to use as the prompt; name it with columns: \{prompt: question\}"
    ):
        example(row, "dpo")
    pair = example(rename_fields(row, {"prompt": "question"}), "dpo")
    assert pair == Preference(Completion("Who?", "The keeper."), Completion("Who?", "No."))


def test_tools_and_template_options() -> None:
    call = {"type": "function", "function": {"name": "count", "arguments": {"of": "stars"}}}
    row = {
        "messages": [
            USER, {"role": "assistant", "tool_calls": [{"function": {"name": "count", "arguments": '{"of": "stars"}'}}]},
            {"role": "tool", "content": "7", "name": "count"}, ANSWER,
        ],
        "tools": '[{"type": "function", "function": {"name": "count"}}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    conversation = example(row)
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert conversation.tools == [{"type": "function", "function": {"name": "count"}}]
    assert conversation.template_options == {"enable_thinking": False}


def test_json_list_and_json_lines_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(3)]
    lines = list(read_rows(str(write(tmp_path, "\ufeff" + "\n\n".join(map(json.dumps, rows))))))
    whole = list(read_rows(str(write(tmp_path, json.dumps(rows, indent=1), name="rows.json"))))
    assert [row for _, row in lines] == [row for _, row in whole] == rows
    assert [place.rpartition("/")[2] for place, _ in lines] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:5"]
    assert whole[2][0].endswith("rows.json, row 3")


@given(
    st.lists(st.recursive(st.none() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=9))
)
@settings(max_examples=60, deadline=None)
def test_json_list_is_read_in_chunks(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Chunks of any size give the same rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for num_chars in (1, 7, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("horizon_lm.runs.data.json_rows._CHUNK_CHARS", num_chars)
            assert [row for _, row in read_rows(str(path))] == rows


def test_a_missing_comma_is_found_without_reading_the_rest_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_lm.runs.data.json_rows._CHUNK_CHARS", 64)
    stream = io.StringIO('[{"a": 1}{"b": 2}' + ', {"c": 3}' * 1000 + "]")
    reader = _JsonListReader("rows.json", stream)
    reader.skip("[")
    assert reader.value() == {"a": 1}
    with pytest.raises(DataError, match=r"rows.json:1:10: not valid JSON \(expecting ','\)"):
        reader.skip(",")
    assert stream.tell() <= 2 * 64


def test_system_message() -> None:
    row = {"instruction": "Who?", "output": "I.", "system": "Be short.", "history": [["Where?", "Here."]]}
    assert [m["role"] for m in example(row).messages] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"\n', "rows.jsonl:1:15: not valid JSON"),
        ('[{"prompt": 1},\n', "one JSON list"),
        ('[{"prompt": 1}\n {"prompt": 2}]\n', "rows.jsonl:2:2: not valid JSON (expecting ',')"),
        ('{"prompt": "a", "completion": null}\n', "rows.jsonl:1: field 'completion' must be text or a list of"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "rows.jsonl:2: field 'completion' must be text or a"),
        (
            '{"prompt": "a", "completion": ["b", "c"]}\n',
            "field 'completion' is a list of texts; write one in each row",
        ),
        ('{"messages": [{"from": 7, "value": "a"}]}\n', "messages[0].from must be text, but is a number"),
        ('{"conversations": [{"from": "gpt", "value": 7}]}\n', "conversations[0].value must be text, but is a number"),
        (
            '{"conversations": [{"from": "gpt", "value": [{"type": "video"}]}]}\n',
            "conversations[0].value has a part of type 'video'",
        ),
        (
            '{"conversations": [{"from": "function_call", "value": "7"}]}\n',
            "conversations[0].value must be a list of calls",
        ),
        ('{"conversations": [{"from": "function_call", "value": "{}"}]}\n', "conversations[0].value: a call must have"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}\n', "messages[0].content must be text"),
        ('{"messages": [{"role": "user", "content": "a", "audio": 1}]}\n', "messages[0].audio is not supported"),
        ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}\n', "tool_calls must be a list of calls"),
        ('{"instruction": "a", "output": "b", "history": ["c"]}\n', "'history' must be a list of pairs"),
        (
            '{"prompt": "a", "completion": "b", "chat_template_kwargs": {"enable_thinking": false}}\n',
            "'chat_template_kwargs' is not used with a text prompt",
        ),
    ],
)
def test_malformed_rows_are_reported_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "no common start"),
        ({"chosen": 1, "rejected": "b"}, "field 'chosen' must be text or a list"),
        ({"chosen": "a", "rejected": [ANSWER]}, "must both be text, or both lists"),
        ({"chosen": "a b", "rejected": ["a c", "a d"]}, "field 'rejected' is a list of texts; write one in each row"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}, "field 'rejected' is a list of texts; write one in"),
        ({"prompt": [USER], "chosen": ["b"], "rejected": ["c"]}, "field 'chosen' is a list of texts; write one in"),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER, USER, {**ANSWER, "content": ""}]},
            "an answer after the prompt is empty",
        ),
        ({"text": "a"}, "rows in text format are not supported with objective: dpo"),
        (
            {"instruction": "a", "prompt": "b", "chosen": "c", "rejected": "d"},
            "'instruction' and 'prompt' are both prompts",
        ),
        ({"prompt": "a", "input": "b", "chosen": "c", "rejected": "d"}, "'input' belongs to an instruction"),
        ({"prompt": [USER], "history": [["a", "b"]], "chosen": [ANSWER], "rejected": [USER]}, "'history' belongs to"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"name": "f"}]}, "'tools' is not used with a text"),
    ],
)
def test_invalid_preferences_are_rejected(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write(tmp_path, [row]), objective="dpo")
    assert message in str(caught.value)


def test_invalid_rows_are_counted(tmp_path: Path) -> None:
    rows = [messages("Who?", "I."), *({"messages": [{**USER, "role": name}]} for name in "abcdefg")]
    with pytest.raises(DataError) as caught:
        prepared(write(tmp_path, rows))
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (7, "7 invalid rows:", "... and 2 more")


def test_a_fault_of_several_rows_is_one_line(tmp_path: Path) -> None:
    """With its number of rows and the first ranges of them, however many there are between others."""
    good, no_completion, no_prompt = {"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"completion": "b"}
    path = write(tmp_path, [good, *[no_completion] * 3, good, no_completion, *[good, no_prompt] * 5])
    with pytest.raises(DataError) as caught:
        prepared(path)
    heading, first, second, *more = str(caught.value).splitlines()
    assert (heading, more) == ("9 invalid rows:", [])
    assert first.startswith(f"{path}:2-4, {path}:6 (4 rows): field 'completion' must be text")
    assert second.startswith(f"{path}:8, {path}:10, {path}:12, ... (5 rows): field 'prompt' must be text")


def test_one_fault_at_several_places_of_rows_is_one_line(tmp_path: Path) -> None:
    """Rows that differ in the number of the message, or in the answer that is quoted, have the same fault; other fields are another one."""
    null = {**ANSWER, "content": None}
    path = write(tmp_path, [{"messages": [USER, ANSWER] * turns + [USER, null]} for turns in range(4)])
    with pytest.raises(DataError) as caught:
        prepared(path)
    assert str(caught.value) == (
        f"{path}:1-4 (4 rows): messages[1].content must be text, but is missing or null (in the first of them)"
    )
    upper = CHATML.replace("message['content']", "message['content'] | upper")
    path = write(tmp_path, [messages("Who?", f"star {number} is red") for number in "abc"])
    with pytest.raises(DataError) as caught:
        prepared(path, chat_template=upper)
    assert str(caught.value).startswith(f"{path}:1-3 (3 rows): the assistant's answer 'star a is red' is not in the")
    path = write(tmp_path, [{"instruction": "a", "output": 1}, {"instruction": 1, "output": "a"}])
    with pytest.raises(
        DataError, match=r"2 invalid rows:\n.*:1: field 'output' must.*\n.*:2: field 'instruction' must"
    ):
        prepared(path)


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"a.jsonl": '{"text": "a"}\n\n{"text": ""}\n\n{"text": ""}\n'}, "{folder}/a.jsonl:3-5"),  # over a blank line
        ({"a.csv": "prompt,completion\na,b\nb,\nc,\n"}, "{folder}, rows 2-3"),
        (dict.fromkeys(("a.jsonl", "b.jsonl"), '{"text": ""}\n' * 2), "{folder}/a.jsonl:1 to {folder}/b.jsonl:2"),
    ],
)
def test_ranges_of_rows(tmp_path: Path, files: dict[str, str], shown: str) -> None:
    for name, content in files.items():
        write(tmp_path, content, name)
    assert str(prepared(tmp_path)[1].found.flagged[RowFlag.NO_ANSWER]) == shown.format(folder=tmp_path)


def test_a_remedy_of_several_findings_is_given_once() -> None:
    first, second = ExampleCounts(1, ["a:1"]), ExampleCounts(2, ["b:1", "b:2"])
    found = [
        Finding("are long", "cut them", first),
        Finding("are old", "keep them", first),
        Finding("are long", "cut them", second),
    ]
    assert describe(found) == [
        "rows that are long: 1 (a:1); cut them", "rows that are old: 1 (a:1); keep them", "rows that are long: 2 (b:1, b:2)"
    ]  # fmt: skip


def test_missing_column_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field 'ask' of columns is missing"):
        prepared(write(tmp_path, [{"q": "a", "completion": "b"}]), columns={"prompt": "ask"})


def test_invalid_utf8_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        prepared(path)


# Tokens


@given(st.lists(st.text(alphabet="ab ?.é星\n", min_size=1, max_size=8), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_located_answers_and_generation_marks_agree(contents: list[str]) -> None:
    """Compare two ways to find the assistant's tokens that share no code: generation marks and located answers."""
    contents = [f"{n}{c}{n}" for n, c in enumerate(contents[: len(contents) // 2 * 2])]
    row = _RENDERERS[CHATML].render(conversation(*contents))
    marked = _RENDERERS[CHATML_WITH_MARKS].render(conversation(*contents))
    assert row.unended is None
    assert marked.unended is None
    assert row.ids.tolist() == marked.ids.tolist()
    assert row.assistant.tolist() == marked.assistant.tolist()


_RENDERERS = {template: ChatRenderer(build_tokenizer(template)) for template in (CHATML, CHATML_WITH_MARKS)}


def test_answers_and_their_end_tokens_are_trained_on() -> None:
    tokenizer = build_tokenizer()
    row = ChatRenderer(tokenizer).render(conversation("Who?", "The keeper.", "When?", "At dusk."))
    assert trained_text(tokenizer, row) == "The keeper.<|im_end|>At dusk.<|im_end|>"


def test_the_end_of_a_turn_behind_that_of_an_answer_is_trained_on() -> None:
    tokenizer = build_tokenizer(CHATML.replace("'<|im_end|>", "'<|answered|><|im_end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|answered|>"]})
    row = ChatRenderer(tokenizer).render(conversation("Who?", "The keeper."))
    assert trained_text(tokenizer, row) == "The keeper.<|answered|><|im_end|>"
    assert row.unended is None


def test_answer_that_also_occurs_in_the_question() -> None:
    """The answer is located in its turn, not at the first occurrence of its text."""
    tokenizer = build_tokenizer()
    row = ChatRenderer(tokenizer).render(conversation("Say dusk.", "dusk"))
    assert np.flatnonzero(row.assistant)[0] > len(row.ids) // 2
    assert trained_text(tokenizer, row) == "dusk<|im_end|>"


@pytest.mark.parametrize("answer", ["a", "d", "as", "is", "<", "assistant", "im_end", "\n", "Who"])
def test_answer_that_also_occurs_in_headers_and_end_tokens(answer: str) -> None:
    tokenizer = build_tokenizer()
    row = ChatRenderer(tokenizer).render(conversation("Who is as a d?", f"{answer}.", answer, f" {answer}x"))
    assert trained_text(tokenizer, row) == f"{answer}.<|im_end|> {answer}x<|im_end|>"
    row = ChatRenderer(tokenizer).render(conversation("Who is as a d?", answer))
    assert trained_text(tokenizer, row) == ("" if answer == "\n" else f"{answer}<|im_end|>")


def test_template_that_raises_for_other_conversations_only() -> None:
    """The template is tried with conversations of its own, whose errors are not the row's."""
    template = "{% if messages[0].content == '?' %}{{ 1 // 0 }}{% endif %}" + CHATML
    tokenizer = build_tokenizer(template)
    row = ChatRenderer(tokenizer).render(conversation("Who?", "I."))
    assert trained_text(tokenizer, row) == "I.<|im_end|>"


def test_template_text_before_an_answer_is_trained_on() -> None:
    """The model has to generate such text, for example an empty thinking block."""
    template = CHATML.replace(
        "+ message['content'] +",
        "+ ('<think></think>' if message['role'] == 'assistant' else '') + message['content'] +",
    )
    tokenizer = build_tokenizer(template)
    assert (
        trained_text(tokenizer, ChatRenderer(tokenizer).render(conversation("Who?", "I.")))
        == "<think></think>I.<|im_end|>"
    )


@pytest.mark.parametrize("answer", ["At dusk 🔭", "é", "Dusk."])
def test_all_tokens_of_the_last_character_are_trained_on(answer: str) -> None:
    """If the marks do not include the end of a turn, and a character is several tokens, as an emoji often is."""
    content_alone = CHATML_WITH_MARKS.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}<|im_end|>",
    )
    tokenizer = build_tokenizer(content_alone)
    row = ChatRenderer(tokenizer).render(conversation("Who?", answer, "When?", answer))
    assert trained_text(tokenizer, row) == 2 * answer


def build_stripping_tokenizer() -> Any:
    """Return a tokenizer with the template of Phi-3, and with its special tokens, which take in the spaces behind them."""
    tokenizer = build_tokenizer(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokens = [AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("user", "assistant", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


@pytest.mark.parametrize("answer", ["The keeper.", " The keeper.", "\n\nThe keeper."])
def test_header_that_takes_in_the_spaces_of_an_answer_is_not_trained_on(answer: str) -> None:
    tokenizer = build_stripping_tokenizer()
    row = ChatRenderer(tokenizer).render(conversation("Who?", answer))
    assert trained_text(tokenizer, row) == "The keeper.<|end|>"
    (tokens,) = ExampleTokenizer(tokenizer, None, None).tokenize(Completion("Who?<|end|>\n<|assistant|>", answer))
    assert tokenizer.decode(tokens.ids[tokens.trained]) == "The keeper.<|im_end|>"


def test_the_end_of_a_question_is_not_trained_on_if_a_space_opens_an_answer() -> None:
    tokenizer = build_tokenizer(
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
    )
    row = ChatRenderer(tokenizer).render(conversation("Who?", "The keeper."))
    assert trained_text(tokenizer, row).strip() == "The keeper.<|im_end|>"


def test_ambiguous_answer_is_rejected() -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(RowError, match="several places"):
        locate_answers("Q a a", messages)
    assert locate_answers("a Q a", messages) == [(4, 5)]


def test_template_that_changes_answers_is_rejected() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    with pytest.raises(RowError, match=r"the assistant's answer 'yes' is not in"):
        ChatRenderer(tokenizer).render(conversation("Well?", "yes"))


def test_tool_calls_cannot_be_located() -> None:
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    template = "{% for m in messages %}{{ m.role + m.content }}{{ (m.tool_calls or 0) | tojson }}{% endfor %}"
    with pytest.raises(RowError, match="tool calls cannot be located"):
        ChatRenderer(build_tokenizer(template)).render(Conversation([USER, call]))


def test_row_that_the_template_rejects() -> None:
    tokenizer = build_tokenizer("{{ raise_exception('no system') }}")
    with pytest.raises(RowError, match="rejects this row: no system"):
        ChatRenderer(tokenizer).render(conversation("Well?", "yes"))


def test_tokenizer_without_template_is_rejected() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatRenderer(build_tokenizer(chat_template=None))


@pytest.mark.parametrize(
    ("example", "train_on", "trained"),
    [
        (conversation("Who?", "I.", "When?", "At dusk."), None, "I.<|im_end|>At dusk.<|im_end|>"),
        (conversation("Who?", "I.", "When?", "At dusk."), "completion", "At dusk.<|im_end|>"),
        (conversation("Who?", "I.", "When?", "At dusk.", "Why?"), "completion", "At dusk.<|im_end|>"),
        (
            Conversation(conversation("Who?", "I.", "When?", "Now.").messages, num_prompt=1),
            None,
            "I.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\nNow.<|im_end|>\n",
        ),
        (Conversation(conversation("Who?", "I.").messages, num_prompt=1), "assistant", "I.<|im_end|>"),
        (conversation("Who?", "I."), "all", "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nI.<|im_end|>\n"),
        (Completion("At", " dusk."), None, " dusk.<|im_end|>"),
        (Completion("At", " dusk.<|im_end|>"), "completion", " dusk.<|im_end|>"),
        (Completion("At", " dusk."), "all", "At dusk.<|im_end|>"),
        (Text("At dusk."), None, "At dusk.<|im_end|>"),
    ],
)
def test_targets_by_train_on(example: Any, train_on: str | None, trained: str) -> None:
    tokenizer = build_tokenizer()
    (tokens,) = ExampleTokenizer(tokenizer, train_on, max_length=None).tokenize(example)
    assert tokenizer.decode(tokens.ids[tokens.trained]) == trained
    assert RowFlag.MISSING_EOS not in tokens.flags


@pytest.mark.parametrize(
    ("example", "train_on"), [(Text("a"), "assistant"), (Text("a"), "completion"), (Completion("a", "b"), "assistant")]
)
def test_train_on_that_does_not_suit_the_example(example: Any, train_on: str) -> None:
    with pytest.raises(RowError, match="train_on"):
        ExampleTokenizer(build_tokenizer(), train_on, max_length=None).tokenize(example)


def test_long_rows_are_truncated_and_rows_without_targets_left_out(tmp_path: Path) -> None:
    rows = [messages("Who?", "The keeper."), messages("q" * 60, "never seen"), messages("Who?", "I" * 60)]
    table, report = prepared(write(tmp_path, rows), max_length=30)
    assert (
        len(table),
        *(report.found.flagged[flag].count for flag in (RowFlag.TRUNCATED, RowFlag.LOST_TARGETS)),
        report.found.flagged[RowFlag.CUT_ANSWER].count,
    ) == (
        2,
        2,
        1,
        1,
    )
    assert table[1].sequences[0].ids.shape == (30,)
    assert table.num_targets.tolist() == [row.sequences[0].num_targets for row in table]
    found = "\n".join(map(str, report.findings))
    assert "rows that are cut before any answer to train on: 1 (" in found
    assert "rows that lost tokens to train on by truncation: 1 (" in found


def test_template_without_end_of_turn_is_reported(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    _, report = prepared(write(tmp_path, [messages("Who?", "I.")]), chat_template=template)
    assert "may not learn to stop" in str(report.findings[0])


def test_check_rows_finds_each_mistake(tmp_path: Path) -> None:
    """Each mistake is found in the rows that have it and in no others."""
    thinking = CHATML.replace("+ message['content'] +", "+ message['content'] +", 1)
    tokenizer = build_tokenizer(thinking)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    rows = [
        messages("Who?", "I."), messages("Why?", "<think>\n\n</think>\n\nSo."), messages("Who?", "I."),
        messages("Why <think></think>?", "Because."), messages("How?", "<think>\nHm.\n</think>\n\nWell."),
    ]  # fmt: skip
    path = write(tmp_path, rows)
    report = prepare([DatasetConfig(path=str(path))], tokenizer, PreprocessConfig("sft"))
    found = {finding.problem: finding.rows for finding in report.findings}
    assert {
        what: (rows.count, [place.rpartition(":")[2] for place in rows.places]) for what, rows in found.items()
    } == {
        "train on an empty thinking block": (1, ["2"]),
        "are copies of others": (1, ["3"]),
        "have a special token in the text of a prompt": (1, ["4"]),
    }


def test_turns_that_are_out_of_place(tmp_path: Path) -> None:
    """Rows that begin with the assistant, or end without it, are counted with their places; no others are."""
    human, gpt, system = ({"from": name, "value": f"{name}?"} for name in ("human", "gpt", "system"))
    calls = {"from": "function_call", "value": '{"name": "count", "arguments": {}}'}
    with_calls = CHATML_WITH_MARKS.replace("message['content']", "(message['content'] or message.tool_calls | tojson)")
    turns = [
        [human, gpt], [system, human, gpt], [gpt, human, gpt], [system, gpt], [human, gpt, human], [gpt, human], [human, calls],
        [human, calls, {"from": "observation", "value": "7"}],
    ]  # fmt: skip
    _, report = prepared(write(tmp_path, [{"conversations": each} for each in turns]), chat_template=with_calls)
    found = {each.problem: each.rows for each in report.findings}
    assert {
        problem: (rows.count, [place.rpartition(":")[2] for place in rows.places]) for problem, rows in found.items()
    } == {
        "begin with a turn of the assistant": (3, ["3-4", "6"]),
        "end with a turn that the assistant does not answer": (3, ["5-6", "8"]),
    }


@pytest.mark.parametrize(
    ("objective", "row", "blank"),
    [
        ("pretrain", {"text": "night"}, {"text": ""}),
        ("pretrain", {"text": "night"}, {"text": " \n\t"}),
        ("sft", {"instruction": "Who?", "output": "I."}, {"instruction": "Who?", "output": " "}),
        ("sft", {"instruction": "Who?", "output": "I."}, {"instruction": "", "output": "I."}),
        ("sft", {"messages": [USER, ANSWER]}, {"messages": [{**USER, "content": ""}, ANSWER]}),
        ("sft", {"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "content": ""}]}),
        ("sft", {"prompt": "Who? ", "completion": "I."}, {"prompt": "Who?", "completion": " "}),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": " "}),
        ("sft", {"messages": [{"role": "system", "content": ""}, USER, ANSWER]}, {"messages": [{**USER, "content": "\n"}, ANSWER]}),
    ],
)  # fmt: skip
def test_blank_texts_are_counted(tmp_path: Path, objective: str, row: dict[str, Any], blank: dict[str, Any]) -> None:
    """A row with a text, a question or an answer that is empty is reported with its place."""
    problems = ("have an empty question or answer", "have no text or answer to train on")
    _, report = prepared(write(tmp_path, [row, blank]), objective=objective)
    (found,) = (each for each in report.findings if each.problem in problems)
    assert (found.rows.count, [place.rpartition(":")[2] for place in found.rows.places]) == (1, ["2"])
    assert found.leaves_out == (len(report.rows) == 1)


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ("pretrain", {"text": "gpt: Who?"}),
        ("sft", {"text": "gpt: Who?"}),
        ("sft", {"prompt": "Who? ", "completion": "I."}),
        ("sft", {"prompt": [USER], "completion": [ANSWER]}),
        ("dpo", {"prompt": [ANSWER, USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}),
        ("dpo", {"prompt": [USER], "chosen": [ANSWER, USER], "rejected": [{**ANSWER, "content": "No."}]}),
    ],
)
def test_rows_without_turns_out_of_place(tmp_path: Path, objective: str, row: dict[str, Any]) -> None:
    _, report = prepared(write(tmp_path, [row]), objective=objective)
    assert all(report.found.flagged[flag].count == 0 for flag in (RowFlag.ASSISTANT_FIRST, RowFlag.UNANSWERED))


def test_text_that_skips_the_chat_template_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "Who? ", "completion": "I."}])
    _, report = prepared(path)
    assert "so the chat template is not applied: 1 (" in str(report.findings[0])
    _, report = prepared(path, chat_template=None)
    assert report.findings == []


def test_preferences_that_skip_the_chat_template(tmp_path: Path) -> None:
    """The remedies are those of preferences, and each of them leads to rows that the template renders."""
    row = {"prompt": "Who? ", "chosen": "The keeper.", "rejected": "No."}
    path, tokenizer = write(tmp_path, [row]), build_tokenizer()
    options = PreprocessConfig("dpo")
    (found,) = prepare([DatasetConfig(path=str(path))], tokenizer, options).findings
    assert found.problem == "have prompt, chosen and rejected as text, so the chat template is not applied"
    assert found.remedy.endswith("write them as lists of messages, or set columns: {instruction: prompt}")
    columns = {"instruction": "prompt"}
    report = prepare([DatasetConfig(path=str(path), columns=columns)], tokenizer, options)
    assert report.findings == []
    assert "<|im_start|>user\nWho?" in tokenizer.decode(report.rows[0].sequences[0].ids)


def test_csv_fields_stay_text(tmp_path: Path) -> None:
    """Converting numbers, dates or booleans would train on text that does not occur in the file."""
    path = write(tmp_path, "instruction,output\nWhich channel?,007\nOpen?,true\nWhen?,2024-01-02\n", "rows.csv")
    table, _ = prepared(path)
    tokenizer = build_tokenizer()
    answers = [tokenizer.decode(row.sequences[0].ids[row.sequences[0].trained]) for row in table]
    assert answers == ["007<|im_end|>", "true<|im_end|>", "2024-01-02<|im_end|>"]


def test_folder_is_its_visible_files_of_one_type(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder, [messages("Who?", "I.")], "a.jsonl")
    write(folder, [messages("When?", "At dusk.")], "b.jsonl")
    write(folder, "not rows", ".hidden.jsonl")
    table, _ = prepared(folder)
    assert [row.place.rpartition("/")[2] for row in table] == ["a.jsonl:1", "b.jsonl:1"]
    write(folder, [messages("Why?", "So.")], "test.jsonl")
    with pytest.raises((ConfigError, DataError), match=r"test\.jsonl"):
        prepared(folder)


@pytest.mark.parametrize("names", [("a_train", "a_test"), ("train/0", "test/0"), ("train", "validation")])
def test_held_out_files_of_a_folder_are_not_trained_on(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        file = tmp_path / "rows" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file.parent, [messages("Who?", "I.")], file.name)
    with pytest.raises(DataError, match=f"{names[1]}.jsonl looks like held-out rows"):
        prepared(tmp_path / "rows")


def test_csv_with_surplus_fields_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "instruction,output\nWhat is 1,000?,A thousand\n", "rows.csv")
    with pytest.raises(DataError, match="more fields than the header"):
        prepared(path)
    with pytest.raises(DataError, match="header cannot be read"):
        prepared(write(tmp_path, "instruction," + "x" * 200_000, "wide.csv"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(
    ("separator", "suffix"), [(",", "csv"), (";", "csv"), ("\t", "csv"), ("\t", "tsv"), (";", "tsv")]
)
def test_csv_as_spreadsheets_write_it(tmp_path: Path, separator: str, suffix: str, encoding: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    lines = (("instruction", "output"), ('"Is 1,5; or 2 the Höhe?"', '"1,5 €"'), ("Wer?", "Ich; du"))
    text = "".join(separator.join(line) + "\r\n" for line in lines[: 2 if separator == ";" else 3])
    path.write_bytes(("\ufeff" if encoding == "utf-16-be" else "").encode(encoding) + text.encode(encoding))
    rows = open_source(DatasetConfig(path=str(path)))
    assert rows.row(0) == {"instruction": "Is 1,5; or 2 the Höhe?", "output": "1,5 €"}
    assert len(rows) == 1 or rows.row(1) == {"instruction": "Wer?", "output": "Ich; du"}


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl", "rows.json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_marked_encodings_of_other_files(tmp_path: Path, name: str, encoding: str) -> None:
    text = "Höhe" if name == "rows.txt" else json.dumps([{"text": "Höhe"}] if name == "rows.json" else {"text": "Höhe"})
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert open_source(DatasetConfig(path=str(tmp_path / name))).row(0) == {"text": "Höhe"}


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt", "rows.jsonl"])
def test_place_of_other_encodings_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("instruction,output\nWer?,Der Wächter".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{name}:2:11: not UTF-8 text; save the file as UTF-8"):
        list(read_rows(str(tmp_path / name))) if name == "rows.jsonl" else open_source(
            DatasetConfig(path=str(tmp_path / name))
        )


def test_the_command_for_another_encoding_converts_the_file(tmp_path: Path) -> None:
    path = tmp_path / "the rows.jsonl"
    path.write_bytes('{"text": "Der Wächter"}\n'.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        list(read_rows(str(path)))
    command = str(caught.value).partition("for example: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert [row for _, row in read_rows(str(tmp_path / "the rows.utf8.jsonl"))] == [{"text": "Der Wächter"}]


@pytest.mark.parametrize("before", ["\n", " \n\n"])
def test_csv_fields_stay_text_below_blank_lines(tmp_path: Path, before: str) -> None:
    source = open_source(DatasetConfig(path=str(write(tmp_path, before + "question;answer\n1.50;007\n", "rows.csv"))))
    assert source.row(0) == {"question": "1.50", "answer": "007"}


def test_files_of_a_folder_are_read_alike(tmp_path: Path) -> None:
    write(tmp_path, "instruction,output\na,b\n", "a.csv")
    write(tmp_path, "\ufeffinstruction,output\nc,d\n", "b.csv")
    assert len(open_source(DatasetConfig(path=str(tmp_path)))) == 2
    write(tmp_path, "instruction;output\na;b\n", "c.csv")
    with pytest.raises(
        DataError, match=r"c.csv: its separator is ';', but that of .*a.csv is ','; list each by its own path"
    ):
        open_source(DatasetConfig(path=str(tmp_path)))
    write(tmp_path, "output,instruction\nb,a\n", "c.csv")
    with pytest.raises(DataError, match=r"c.csv: its header is 'output, instruction', but that of .*a.csv is 'instr"):
        open_source(DatasetConfig(path=str(tmp_path)))


def test_check_rows_of_a_dataset_without_rows_in_use(tmp_path: Path) -> None:
    good = write(tmp_path, [messages("Who?", "I.")] * 2, "good.jsonl")
    long = write(tmp_path, [messages("q" * 90, "never seen")] * 3, "long.jsonl")
    datasets = [DatasetConfig(path=str(good)), DatasetConfig(path=str(long), weight=0.5)]
    report = prepare(datasets, build_tokenizer(), PreprocessConfig("sft", max_length=30))
    assert next(finding.problem for finding in report.findings) == "are cut before any answer to train on"
    sampler = Sampler(tuple(report.rows.part_sizes()), 2, 0, tuple(report.rows.weights()))
    assert (sampler.steps_per_epoch, sorted(sampler.rows(0))) == (1, [0, 1])
    some = prepare(
        [
            DatasetConfig(
                path=str(write(tmp_path, [messages("Who?", f"{n}.") for n in range(3000)], "many.jsonl")),
                fraction=0.0005,
            )
        ],
        build_tokenizer(),
        PreprocessConfig("sft"),
    )
    assert some.findings == []


def test_optional_column_in_no_row_is_rejected(tmp_path: Path) -> None:
    rows = [messages("Who?", "I."), {**messages("Who?", "I."), "rules": "Be short."}]
    table, _ = prepared(write(tmp_path, rows), columns={"system": "rules"})
    assert len(table) == 2
    with pytest.raises(DataError, match="'rule' of columns is in none"):
        prepared(write(tmp_path, rows), columns={"system": "rule"})


def test_differing_system_messages_are_rejected() -> None:
    row = {"messages": [{"role": "system", "content": "Be short."}, USER, ANSWER]}
    assert len(example({**row, "system": "Be short."}).messages) == 3
    with pytest.raises(RowError, match="differ; keep one"):
        example({**row, "system": "Be long."})


def test_preference_with_the_question_in_prompt_only() -> None:
    pair = example({"prompt": "Who?", "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "Rain."}]}, "dpo")
    assert pair.chosen.messages == [{"role": "user", "content": "Who?"}, ANSWER]


@pytest.mark.parametrize("start", [[{"role": "system", "content": "Be short."}], [ANSWER, USER]])
def test_a_text_prompt_is_kept_before_answers_that_begin_alike(start: list[Any]) -> None:
    answers = {"chosen": [*start, ANSWER], "rejected": [*start, {**ANSWER, "content": "Rain."}]}
    pair = example({"prompt": "Who?", **answers}, "dpo")
    question = {"role": "user", "content": "Who?"}
    at = start.index(ANSWER) if ANSWER in start else len(start)  # behind a system prompt
    assert pair.chosen.messages == [*start[:at], question, *start[at:], ANSWER]
    assert pair.chosen.num_prompt == len(start) + 1


def test_copies_are_found_across_datasets(tmp_path: Path) -> None:
    first = write(tmp_path, [messages("Who?", "I."), messages("When?", "At dusk.")], "first.jsonl")
    second = write(tmp_path, [messages("When?", "At dusk."), messages("When?", "At dawn.")], "second.jsonl")
    report = prepare(
        [DatasetConfig(path=str(path)) for path in (first, second)], build_tokenizer(), PreprocessConfig("sft")
    )
    (finding,) = report.findings
    assert (finding.problem, finding.rows.count) == ("are copies of others", 1)
    assert finding.rows.places[0].endswith("second.jsonl:1")


def test_held_out_rows_that_are_trained_on_are_reported(tmp_path: Path) -> None:
    rows, others = (
        prepared(write(tmp_path, [messages("Who?", answer) for answer in answers], name))[1].rows
        for name, answers in (("a.jsonl", ["I.", "The keeper."]), ("b.jsonl", ["The wind.", "I."]))
    )
    (found,) = check_overlap(others, rows)
    assert str(found).startswith("rows that are also trained on: 1 (")
    assert "b.jsonl:2" in str(found)
    assert check_overlap(TokenTable([]), rows) == []


def test_doubled_begin_of_sequence_is_rejected(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    path = write(tmp_path, [{"text": "<|im_start|><|im_start|>Dusk."}, {"text": "<|im_start|>Dawn."}])
    report = prepare([DatasetConfig(path=str(path))], tokenizer, PreprocessConfig("sft"))
    findings = report.findings
    with pytest.raises(
        DataError, match=r"rows that begin with two begin-of-sequence tokens: 1 \(.*rows.jsonl:1\); the text and"
    ):
        reject_errors(findings)


def test_tokenized_rows_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [messages("Who?", "I."), messages("When?", "At dusk.")])
    first, _ = prepared(path)
    with monkeypatch.context() as patch:
        patch.setattr(ExampleTokenizer, "tokenize", lambda *args: pytest.fail("tokenized again"))
        again, _ = prepared(path)
    assert [row.sequences[0].ids.tolist() for row in again] == [row.sequences[0].ids.tolist() for row in first]
    write(tmp_path, [messages("Who?", "I am."), messages("When?", "At dawn")])
    assert prepared(path)[0][0].sequences[0].ids.tolist() != first[0].sequences[0].ids.tolist()
    cut, _ = prepared(path, max_length=20)
    assert cut.lengths.max() == 20


DATED = "{{ '<|im_start|>system\\n' + strftime_now('%Y-%m-%d %H:%M:%S.%f') + '<|im_end|>\\n' }}" + CHATML


def test_a_template_prints_the_date_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all rows alike, without a time of day; rows of another day are not taken from the cache, and those of the same day are."""
    path = write(tmp_path, [messages("Who?", "I."), messages("When?", "At dusk.")])

    def texts(day: str | None, template: str = DATED) -> list[str]:
        table, _ = prepared(path, chat_template=template, day=day)
        return [build_tokenizer().decode(row.sequences[0].ids) for row in table]

    for day in ("2027-03-01", "2027-03-02"):
        assert all(text.startswith(f"<|im_start|>system\n{day} 00:00:00.000000<|im_end|>") for text in texts(day))
    plain = texts("2027-03-01", CHATML)
    with monkeypatch.context() as patch:
        patch.setattr(ExampleTokenizer, "tokenize", lambda *args: pytest.fail("tokenized again"))
        assert "2027-03-01" in texts("2027-03-01")[0]
        assert texts("2027-03-02", CHATML) == plain  # a template without a date
    monkeypatch.setattr(preprocess, "today", lambda: "2027-03-03")
    assert "2027-03-03" in texts(None)[0]


def test_a_row_cannot_set_the_date(tmp_path: Path) -> None:
    row = {**messages("Who?", "I."), "chat_template_kwargs": {"strftime_now": "2020-01-01"}}
    with pytest.raises(DataError, match=r"chat_template_kwargs\.strftime_now cannot be set by a row"):
        prepared(write(tmp_path, [row]), chat_template=DATED)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt"])
def test_new_file_with_an_old_timestamp_is_read_again(tmp_path: Path, name: str) -> None:
    """Files from tar and rsync have old timestamps."""
    texts = {"rows.jsonl": '{{"text": "{}"}}\n', "rows.csv": "text\n{}\n", "rows.txt": "{}\n"}
    old = 10**18
    for text in ("At dusk.", "The keeper counts."):
        path = write(tmp_path, texts[name].format(text), name)
        os.utime(path, ns=(old, old))
        table, _ = prepared(path, objective="pretrain")
        assert build_tokenizer().decode(table[0].sequences[0].ids) == f"{text}<|im_end|>"


def test_fraction_of_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path, [messages(f"{n}?", f"{n}!") for n in range(20)])
    chosen, _ = prepared(path, fraction=0.3, seed=1)
    again, _ = prepared(path, fraction=0.3, seed=1)
    other, _ = prepared(path, fraction=0.3, seed=2)
    places = [[row.place for row in table] for table in (chosen, again, other)]
    assert len(chosen) == 6
    assert places[0] == places[1] != places[2]


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    """Further rows are neither trained on nor checked; more than there are means all of them."""
    path = write(tmp_path, [*(messages(f"{n}?", f"{n}!") for n in range(6)), {"messages": 5}])
    few, report = prepared(path, max_samples=4)
    texts = [build_tokenizer().decode(row.sequences[0].ids) for row in few]
    assert ([f"{n}!" in text for n, text in enumerate(texts)], report.num_read) == ([True] * 4, 4)
    assert len(prepared(path, max_samples=5)[0]) == 5  # although the table of 4 rows is in the cache
    with pytest.raises(DataError, match=r"rows\.jsonl:7"):
        prepared(path, max_samples=9)
    assert len(prepared(write(tmp_path, "text\na\nb\nc\n", "rows.csv"), max_samples=2)[0]) == 2
    with pytest.raises(ValueError, match="cannot be combined with max_samples"):
        DatasetConfig(path=str(path), max_samples=4, fraction=0.5)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_keeps_all_tokens(tmp_path: Path, strategy: str) -> None:
    path = write(tmp_path, [{"text": "dusk " * (n + 1)} for n in range(12)])
    plain, _ = prepared(path)
    packed, report = prepared(path, max_length=32, packing=strategy)
    assert packed.lengths.max() <= 32
    assert len(report.rows) == 12
    tokens = sorted(
        token for row in plain for token in row.sequences[0].ids[: 32 if strategy == "bfd" else None].tolist()
    )
    assert sorted(token for row in packed for token in row.sequences[0].ids.tolist()) == tokens
    for row in packed:
        assert sum(row.segments or [len(row)]) == len(row)
        assert (row.segments is None) == (strategy == "wrapped")
    assert any(" + " in row.place for row in packed)


def test_batch_of_packed_rows(tmp_path: Path) -> None:
    ids = np.arange(1, 9, dtype=np.int32)
    tokens = Tokens(ids, np.ones(8, dtype=bool))
    batch = collate([Row([tokens], [5, 3], "a"), Row([Tokens(ids[:6], tokens.trained[:6])], [6], "b")])
    assert batch.attention_mask is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]]
    no = IGNORE_INDEX  # the first token of each packed row has no context
    assert batch.labels.tolist() == [[no, 2, 3, 4, 5, no, 7, 8], [no, 2, 3, 4, 5, 6, no, no]]
    assert (batch.num_trained, batch.num_tokens) == (11, 14)


def test_batch_of_preferences(tmp_path: Path) -> None:
    rows = [
        {"prompt": "At", "chosen": " dusk.", "rejected": " dawn it is."},
        {"prompt": "By", "chosen": " day.", "rejected": " night."},
    ]
    table, _ = prepared(write(tmp_path, rows), objective="dpo")
    batch = collate(table[:2], (0, 1))
    tokenizer = build_tokenizer()
    texts = [
        tokenizer.decode(row[mask.bool()]) for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    end = "<|im_end|>"
    assert texts == [f"At dusk.{end}", f"By day.{end}", f"At dawn it is.{end}", f"By night.{end}"]
    answers = [tokenizer.decode(row[row >= 0]) for row in batch.labels]
    assert answers == [f" dusk.{end}", f" day.{end}", f" dawn it is.{end}", f" night.{end}"]
    assert batch.rows == (0, 1)


# Batches


def rows_of(*lengths: int) -> list[Row]:
    return [
        Row([Tokens(np.arange(1, n + 1, dtype=np.int32), np.arange(n) >= n // 2)], None, f"rows.jsonl:{i}")
        for i, n in enumerate(lengths)
    ]


def test_collate_pads_on_the_right_and_counts_targets() -> None:
    batch = collate(rows_of(4, 6))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    no = IGNORE_INDEX
    assert batch.labels.tolist() == [[no, no, 3, 4, no, no], [no, no, no, 4, 5, 6]]
    assert (batch.num_trained, batch.num_tokens) == (5, 10)
    assert batch.labels.dtype == torch.int64


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_every_epoch_has_every_row_once(num_rows: int, rows_per_step: int, seed: int) -> None:
    sampler = Sampler((num_rows,), rows_per_step, seed, (1.0,))
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        assert sorted(index for step in steps for index in sampler.rows(step)) == list(range(num_rows))
    # the rows of a step do not depend on earlier calls
    assert Sampler((num_rows,), rows_per_step, seed, (1.0,)).rows(sampler.steps_per_epoch) == sampler.rows(
        sampler.steps_per_epoch
    )


def test_weights_set_the_frequency_of_rows() -> None:
    sampler = Sampler((10, 4), 7, 0, (0.5, 2.0))
    assert sampler.rows_per_epoch == 5 + 8
    epochs = []
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        epochs.append(sorted(index for step in steps for index in sampler.rows(step)))
    for rows in epochs:
        assert [rows.count(index) for index in range(10, 14)] == [2] * 4
        assert len({index for index in rows if index < 10}) == 5
    assert epochs[0] != epochs[1]  # a different half of the rows


def test_order_depends_on_epoch_and_seed() -> None:
    first, again, other = (Sampler((50,), 50, seed, (1.0,)) for seed in (0, 0, 1))
    assert first.rows(0) == again.rows(0)
    assert first.rows(0) != first.rows(1)
    assert first.rows(0) != other.rows(0)
    assert [Sampler((10,), 4, 0, (1.0,)).num_steps(epochs) for epochs in (0.1, 1, 1.5)] == [1, 3, 5]


def test_evaluation_batches_are_in_order() -> None:
    batches = [batch_from(rows_of(3, 4, 5), first, 2) for first in (0, 2)]
    assert [batch.places for batch in batches] == [("rows.jsonl:0", "rows.jsonl:1"), ("rows.jsonl:2",)]


@pytest.mark.parametrize(
    ("sample_by", "texts"),
    [
        ("line", ["One.", "Two.", "Three."]),
        ("paragraph", ["One.\nTwo.", "Three."]),
        ("document", ["One.\nTwo.\n\n\nThree.\n\n"]),
    ],
)
def test_rows_of_a_text_file(tmp_path: Path, sample_by: str, texts: list[str]) -> None:
    """Blank lines separate paragraphs and are never rows."""
    path = tmp_path / "rows.txt"
    path.write_text("One.\nTwo.\n\n\nThree.\n\n")
    source = open_source(DatasetConfig(path=str(path), sample_by=sample_by))
    assert [source.row(index)["text"].strip("\n") for index in range(len(source))] == [
        text.strip("\n") for text in texts
    ]


def test_only_text_files_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"is for text files, and rows\.jsonl is none"):
        DatasetConfig(path=str(path), sample_by="paragraph")


def test_huge_row_is_rejected_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_MAX_ROW_CHARS", 20)
    examples._reject_huge({"text": "a" * 20})
    with pytest.raises(RowError, match="characters of text, more than 20; split it into several rows"):
        examples._reject_huge({"messages": [{"content": "a" * 21}]})


# Rows with more than text, and of other objectives


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "images": ["a.png"]}, "0 placeholders of images, but 1 image for them"),
        ({"prompt": "<image>a", "completion": "b", "image": {"bytes": "a"}}, "the model reads only text"),
        ({"messages": [USER, ANSWER], "videos": ["a.mp4"]}, "field 'videos': only text and images"),
        ({"messages": [USER, ANSWER], "audio": "a.wav"}, "field 'audio': only text and images"),
        (
            {"messages": [{"role": "user", "content": "<image>Who?"}, ANSWER]},
            "placeholder <image>, and the row has no image",
        ),
        ({"messages": [{"role": "user", "content": "Is <image> like <image>?"}, ANSWER]}, "placeholder <image>"),
        (
            {"conversations": [{"from": "human", "value": "What?\n<video>"}, {"from": "gpt", "value": "A."}]},
            "placeholder <video>",
        ),
        ({"instruction": "<audio>\nWho speaks?", "output": "The keeper."}, "placeholder <audio>"),
        ({"prompt": "<image> Who?", "completion": "The keeper."}, "placeholder <image>"),
        ({"text": "<image>\nA dome."}, "the text has the placeholder <image>"),
        ({"prompt": "a", "completion": "b", "label": False}, "use horizon_lm.trainer.KTOTrainer"),
        ({"prompt": "a", "completion": "b", "label": "True"}, "field 'label' marks good and bad answers"),
        ({"messages": [USER, ANSWER], "kto_tag": True}, "field 'kto_tag' marks good and bad answers"),
        ({"messages": [USER, ANSWER], "chosen": ANSWER, "rejected": ANSWER}, "use objective: dpo, or name the answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "are not supported with objective: sft; use objective: dpo"),
        ({"text": "a", "chosen": "b", "rejected": "c"}, "use objective: dpo"),
    ],
)
def test_rows_with_more_than_text_or_of_another_objective_are_rejected(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(write(tmp_path, [row]))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "a", "images": [], "videos": None, "image": ""}, None),
        ({"messages": [{"role": "user", "content": "What is `<image>`, and where is the <video> tag?"}, ANSWER]}, None),
        ({"messages": [USER, {**ANSWER, "content": "<image>, <video> and <audio>"}]}, None),
        ({"messages": [{"role": "user", "content": "<video>a</video> <image>b</image>"}, ANSWER]}, None),
        ({"text": "See <image> above."}, None),
        ({"prompt": "a", "completion": "b", "label": 3}, None),
        ({"text": "a", "label": True}, None),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"completion": "chosen"}),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False, "documents": []}}, None),
    ],
)
def test_rows_with_fields_that_are_meant_or_empty_are_used(tmp_path: Path, row: Any, columns: Any) -> None:
    assert len(prepared(write(tmp_path, [row]), columns=columns)[0]) == 1


@pytest.mark.parametrize(
    "name",
    [
        "truncation",
        "max_length",
        "padding",
        "return_tensors",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "tokenize",
        "eos_token",
    ],
)
def test_a_row_cannot_set_what_is_the_tokenizers(tmp_path: Path, name: str) -> None:
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {name: 3}}
    with pytest.raises(DataError, match=rf"chat_template_kwargs.{name} cannot be set by a row"):
        prepared(write(tmp_path, [row]))


def test_fields_that_are_not_used_are_reported_once(tmp_path: Path) -> None:
    rows = [
        {"instruction": f"{n}?", "context": "c", "output": "a", "system": "b", "source": n, "score": None, "q": 1}
        for n in range(5)
    ]
    _, report = prepared(write(tmp_path, rows), columns={"input": "context"})
    found = [str(each) for each in report.findings if "not used" in each.problem]
    assert len(found) == 1
    assert "fields that are not used ('q', 'source'): 5 (" in found[0]


# Folders and tables


def texts_of(path: Any, **settings: Any) -> list[str]:
    source = open_source(DatasetConfig(path=str(path), **settings))
    return [source.row(index)["text"] for index in range(len(source))]


def test_folders_that_save_to_disk_wrote(tmp_path: Path) -> None:
    train = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    train.save_to_disk(tmp_path / "one", num_shards=2)
    assert texts_of(tmp_path / "one") == ["a", "b", "c"]
    assert texts_of(tmp_path / "one", split="train[1:]") == ["b", "c"]
    test = datasets.Dataset.from_dict({"text": ["d"]})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
    assert texts_of(tmp_path / "two") == ["a", "b", "c"]
    assert texts_of(tmp_path / "two", split="test") == ["d"]
    assert texts_of(tmp_path / "two", split="test+train[:1]") == ["d", "a"]
    with pytest.raises(DataError, match="there is no split 'dev'; there are train, test"):
        texts_of(tmp_path / "two", split="dev")
    datasets.DatasetDict({"a": test, "b": train}).save_to_disk(tmp_path / "three")
    with pytest.raises(DataError, match="has the splits a, b; choose one with split"):
        texts_of(tmp_path / "three")


def test_files_that_another_save_left_behind_are_not_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["old", "older"]}).save_to_disk(tmp_path / "rows", num_shards=2)
    other = datasets.Dataset.from_dict({"text": ["new"]})
    other.save_to_disk(tmp_path / "new")
    for file in (tmp_path / "new").iterdir():
        file.replace(tmp_path / "rows" / file.name)
    assert texts_of(tmp_path / "rows") == ["new"]


def test_fields_that_are_stored_as_json_are_read(tmp_path: Path) -> None:
    """`datasets` stores values of mixed types as JSON, a text with its quotes."""
    parts = [{"type": "text", "text": "The keeper."}]
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, {"role": "assistant", "content": parts}]}]
    saved = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        source = open_source(DatasetConfig(path=str(path)))
        assert [example(source.row(index)).messages for index in range(2)] == [[USER, ANSWER]] * 2


def test_splits_of_a_folder_are_named_by_its_files(tmp_path: Path) -> None:
    for name, text in (("train-0", "a"), ("test-0", "b"), ("notes", "c")):
        write(tmp_path, [{"text": text}, {"text": text * 2}], f"{name}.jsonl")
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: default, data_files: notes.jsonl}]\n---\n")
    assert texts_of(tmp_path, split="test") == ["b", "bb"]
    assert texts_of(tmp_path, split="train[:50%]") == ["a"]
    assert texts_of(tmp_path, data_files=["notes.jsonl"]) == ["c", "cc"]
    with pytest.raises(DataError, match="no file matches none"):
        texts_of(tmp_path, data_files=["none"])
    with pytest.raises(DataError, match=r"split: train\[:: Unrecognized"):
        texts_of(tmp_path, split="train[:")


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    """`datasets` takes names as patterns, which match other files."""
    folder = tmp_path / name
    folder.mkdir()
    for file, text in ((name, "mine"), ("a1", "other")):
        datasets.Dataset.from_dict({"text": [text]}).to_parquet(folder / f"{file}.parquet")
    assert texts_of(folder / f"{name}.parquet") == ["mine"]
    assert texts_of(folder, data_files=["a1.parquet"]) == ["other"]


def test_a_name_with_addresses_inside_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rename the file"):
        texts_of(write(tmp_path, "a", "zip::a.txt"))


def test_files_of_a_named_reader(tmp_path: Path) -> None:
    assert texts_of("json", data_files=[str(write(tmp_path, [{"text": "a"}]))]) == ["a"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_has_no_value_in_the_first_file(tmp_path: Path, suffix: str) -> None:
    """pandas writes such a column without a type, also within a list."""
    without = {"messages": [[{"role": "user", "content": "a", "name": None}]], "kept": [None], "never": [None]}
    values = {"messages": [[{"role": "user", "content": "b", "name": "n"}]], "kept": ["mine"], "never": [None]}
    for number, columns in enumerate((without, without, values)):
        table, path = pyarrow.table(columns), tmp_path / f"{number}.{suffix}"
        if suffix == "parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
    source = open_source(DatasetConfig(path=str(tmp_path)))
    found = [source.row(index) for index in range(len(source))]
    assert [row.get("kept") for row in found] == [None, None, "mine"]
    assert [row["messages"][0].get("name") for row in found] == [None, None, "n"]
    assert [row.get("never") for row in found] == [None] * 3


def test_parquet_without_rows(tmp_path: Path) -> None:
    empty = datasets.Dataset.from_dict({"text": []}, features=datasets.Features({"text": datasets.Value("string")}))
    empty.to_parquet(tmp_path / "a.parquet")
    with_group = tmp_path / "c.parquet"  # with a group of rows that has none
    with parquet.ParquetWriter(with_group, empty.data.schema) as writer:
        writer.write_table(empty.data.table, row_group_size=1)
    for path in (tmp_path / "a.parquet", with_group, write(tmp_path, "text\n", "rows.csv")):
        with pytest.raises(DataError, match="no rows found"):
            texts_of(path)
        path.rename(path.with_name("_" + path.name)) if path.suffix == ".csv" else None
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "b.parquet")
    assert texts_of(tmp_path) == ["a"]


def test_folders_that_cannot_hold_rows_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_lm.runs.data.local_files._MAX_FILES", 3)
    for number in range(4):
        write(tmp_path, [{"text": "a"}], f"{number}.jsonl")
    with pytest.raises(DataError, match="has more than 3 files; name the folder of the rows"):
        texts_of(tmp_path)
    with pytest.raises(DataError, match=r"^/: "):
        texts_of("/")
