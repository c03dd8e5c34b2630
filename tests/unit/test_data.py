"""Rows to conversations, to tokens and labels, to batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_lm.config import DatasetConfig
from horizon_lm.data.formats import Conversation, read_conversations
from horizon_lm.data.loader import NOT_TRAINED, Sampler, collate, in_order
from horizon_lm.data.tokenize import ChatTokenizer, Row, locate_answers, tokenize_rows
from horizon_lm.errors import ConfigError, DataError
from tests.e2e.tiny import CHATML, CHATML_WITH_MARKS, build_tokenizer

USER, ANSWER = {"role": "user", "content": "Who?\nNow"}, {"role": "assistant", "content": "The keeper."}


def read(tmp_path: Path, rows: Any, columns: dict[str, str] | None = None, name: str = "rows.jsonl") -> Any:
    path = tmp_path / name
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return read_conversations([DatasetConfig(path=str(path), columns=columns)])


# Formats


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": [USER, ANSWER]}, None),
        ({"instruction": "Who?", "input": "Now", "output": "The keeper."}, None),
        ({"prompt": "Who?\nNow", "completion": "The keeper."}, None),
        ({"prompt": [USER], "completion": [ANSWER]}, None),
        ({"q": "Who?\nNow", "a": "The keeper."}, {"prompt": "q", "completion": "a"}),
    ],
)
def test_shapes_mean_the_same(tmp_path: Path, row: dict[str, Any], columns: dict[str, str] | None) -> None:
    (conversation,) = read(tmp_path, [row], columns)
    assert conversation.messages == [USER, ANSWER]
    assert conversation.place == f"{tmp_path / 'rows.jsonl'}:1"


def test_json_list_and_lines_are_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(3)]
    lines = read(tmp_path, "\ufeff" + "\n\n".join(map(json.dumps, rows)))
    whole = read(tmp_path, json.dumps(rows, indent=1), name="rows.json")
    assert [c.messages for c in lines] == [c.messages for c in whole]
    assert [c.place.rpartition("/")[2] for c in lines] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:5"]
    assert whole[2].place.endswith("rows.json, row 3")


def test_system_message(tmp_path: Path) -> None:
    (row,) = read(tmp_path, [{"instruction": "Who?", "output": "I.", "system": "Be short."}])
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"\n', "rows.jsonl:1:15: not valid JSON"),
        ('[{"prompt": 1},\n', "one JSON list"),
        ("", "has no rows"),
        ("[]", "has no rows"),
        ("7\n", "a row must be an object"),
        ('{"text": "a"}\n', "the fields 'text' make no known shape"),
        ('{"prompt": "a", "completion": null}\n', "rows.jsonl:1: field 'completion' must be text, but is missing or"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', "rows.jsonl:2: field 'completion' is missing"),
        ('{"messages": []}\n', "must be a list of"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "nothing to learn"),
        ('{"messages": [{"role": "bot", "content": "a"}]}\n', "messages[0].role is 'bot'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}\n', "messages[0].content must be text"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, '
            '{"role": "assistant", "content": "c"}]}\n',
            "turns 1 and 2 are both the user's",
        ),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}\n', "tool_calls is not read"),
        ('{"instruction": "a", "output": "b", "history": [["c", "d"]]}\n', "'history' is not read"),
    ],
)
def test_malformed_rows_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "completion": "b"}, *({"prompt": n} for n in range(9))]
    with pytest.raises(DataError) as caught:
        read(tmp_path, rows)
    lines = str(caught.value).splitlines()
    assert lines[0] == "9 rows cannot be used:"
    assert lines[-1] == "... and 4 more"


def test_column_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field 'ask', which columns names, is missing"):
        read(tmp_path, [{"q": "a", "completion": "b"}], {"prompt": "ask"})


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_conversations([DatasetConfig(path=str(path), columns=None)])


# Tokens


def conversation(*contents: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)], "rows.jsonl:1")


def trained_text(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode(row.input_ids[row.trained])


@given(st.lists(st.text(alphabet="ab ?.é星\n", min_size=1, max_size=8), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_rendering_and_generation_marks_agree(contents: list[str]) -> None:
    """Two ways to find the assistant's tokens that share no code: the template's marks, and locating the answers."""
    contents = [f"{n}{c}{n}" for n, c in enumerate(contents[: len(contents) // 2 * 2])]
    row, ends = _TOKENIZERS[CHATML].tokenize(conversation(*contents))
    marked, _ = _TOKENIZERS[CHATML_WITH_MARKS].tokenize(conversation(*contents))
    assert ends
    assert row.input_ids.tolist() == marked.input_ids.tolist()
    assert row.trained.tolist() == marked.trained.tolist()


_TOKENIZERS = {template: ChatTokenizer(build_tokenizer(template)) for template in (CHATML, CHATML_WITH_MARKS)}


def test_loss_is_on_answers_and_their_ends() -> None:
    tokenizer = build_tokenizer()
    row, _ = ChatTokenizer(tokenizer).tokenize(conversation("Who?", "The keeper.", "When?", "At dusk."))
    assert trained_text(tokenizer, row) == "The keeper.<|im_end|>At dusk.<|im_end|>"


def test_answer_that_is_also_in_the_question() -> None:
    """Placed by its turn, not by the first occurrence of its text."""
    tokenizer = build_tokenizer()
    row, _ = ChatTokenizer(tokenizer).tokenize(conversation("Say dusk.", "dusk"))
    assert np.flatnonzero(row.trained)[0] > len(row.input_ids) // 2
    assert trained_text(tokenizer, row) == "dusk<|im_end|>"


def test_answer_in_several_places_is_refused() -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match="several places"):
        locate_answers("Q a a", messages)
    assert locate_answers("a Q a", messages) == [(4, 5)]


def test_template_that_changes_answers_is_refused() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the assistant's answer 'yes' is not in"):
        ChatTokenizer(tokenizer).tokenize(conversation("Well?", "yes"))


def test_template_that_refuses_a_row() -> None:
    tokenizer = build_tokenizer("{{ raise_exception('no system') }}")
    with pytest.raises(DataError, match="refuses this row: no system"):
        ChatTokenizer(tokenizer).tokenize(conversation("Well?", "yes"))


def test_tokenizer_without_template() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTokenizer(build_tokenizer(chat_template=None))


def test_long_rows_lose_their_end_and_empty_ones_are_left_out() -> None:
    rows, report = tokenize_rows(
        [conversation("Who?", "The keeper."), conversation("q" * 60, "never seen"), conversation("Who?", "I" * 60)],
        build_tokenizer(),
        max_length=30,
    )
    assert (len(rows), len(report.truncated), len(report.dropped)) == (2, 2, 1)
    assert len(rows[1].input_ids) == 30
    assert report.num_trained == sum(int(row.trained.sum()) for row in rows)
    assert "1 rows were left out" in "\n".join(report.lines(30))
    with pytest.raises(DataError, match="no row has a token to train on"):
        tokenize_rows([conversation("q" * 60, "never seen")], build_tokenizer(), max_length=30)


def test_template_without_end_of_turn_is_reported() -> None:
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    _, report = tokenize_rows([conversation("Who?", "I.")], tokenizer, max_length=None)
    assert "may not learn to stop" in "\n".join(report.lines(None))


# Batches


def rows_of(*lengths: int) -> list[Row]:
    return [
        Row(np.arange(1, n + 1, dtype=np.int32), np.arange(n) >= n // 2, f"rows.jsonl:{i}")
        for i, n in enumerate(lengths)
    ]


def test_collate_pads_on_the_right_and_counts_targets() -> None:
    batch = collate(rows_of(4, 6))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    no = NOT_TRAINED
    assert batch.labels.tolist() == [[no, no, 3, 4, no, no], [no, no, no, 4, 5, 6]]
    assert (batch.num_trained, batch.num_tokens) == (5, 10)
    assert batch.labels.dtype == torch.int64


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_every_epoch_has_every_row_once(num_rows: int, rows_per_step: int, seed: int) -> None:
    sampler = Sampler(num_rows, rows_per_step, seed)
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        assert sorted(index for step in steps for index in sampler.rows(step)) == list(range(num_rows))
    # a step's rows do not depend on the steps asked for before
    assert Sampler(num_rows, rows_per_step, seed).rows(sampler.steps_per_epoch) == sampler.rows(sampler.steps_per_epoch)


def test_order_depends_on_epoch_and_seed() -> None:
    first, again, other = Sampler(50, 50, 0), Sampler(50, 50, 0), Sampler(50, 50, 1)
    assert first.rows(0) == again.rows(0)
    assert first.rows(0) != first.rows(1)
    assert first.rows(0) != other.rows(0)
    assert [Sampler(10, 4, 0).num_steps(epochs) for epochs in (0.1, 1, 1.5)] == [1, 3, 5]


def test_evaluation_goes_in_order() -> None:
    batches = list(in_order(rows_of(3, 4, 5), 2))
    assert [batch.places for batch in batches] == [("rows.jsonl:0", "rows.jsonl:1"), ("rows.jsonl:2",)]
