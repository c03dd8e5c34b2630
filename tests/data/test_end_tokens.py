"""The special tokens that end the answers that are trained on are found in the rows, whatever their names are."""

from pathlib import Path
from typing import Any

import pytest

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.preprocess import PreprocessConfig, prepare
from tests.e2e import tiny
from tests.support.prepared_rows import write

USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The keeper."}
# A thought and an answer in one turn, as gpt-oss has them: <a> stands between both, and ends the answers of earlier turns.
THINKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% if m['reasoning_content'] %}{{ m['reasoning_content'] + '<a>' }}{% endif %}"
    "{{ m['content'] + ('<b>' if loop.last else '<a>') }}{% endgeneration %}"
    "{% else %}{{ '<u>' + m['content'] }}{% endif %}{% endfor %}"
)
CALLS = (  # the answer ends with another token if a tool answers it
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ('<b>' if loop.last else '<a>') + '\n' }}{% endgeneration %}"
    "{% else %}{{ '<u>' + m['content'] }}{% endif %}{% endfor %}"
)
TEXT_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n###\n' }}{% endfor %}"


def end_tokens(tmp_path: Path, rows: list[Any], template: str | None = tiny.CHATML, **settings: Any) -> list[str]:
    tokenizer = tiny.build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>", "<u>", "<eos>"], "eos_token": "<eos>"})
    dataset = DatasetConfig(path=str(write(tmp_path, rows)))
    options = PreprocessConfig(settings.pop("objective", "sft"), **settings)
    return list(tokenizer.convert_ids_to_tokens(prepare([dataset], tokenizer, options).rows.end_tokens()))


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


THOUGHT = ANSWER | {"reasoning_content": "It asks."}


@pytest.mark.parametrize(
    ("rows", "template", "settings", "expected"),
    [
        ([chat(USER, ANSWER)], tiny.CHATML, {}, ["<|im_end|>"]),
        ([chat(USER, ANSWER, USER, ANSWER)], tiny.CHATML_WITH_MARKS, {}, ["<|im_end|>"]),
        ([chat(USER, ANSWER)], tiny.CHATML, {"train_on": "all"}, ["<|im_end|>"]),
        ([chat(USER, ANSWER, USER, ANSWER)], tiny.CHATML, {"train_on": "all"}, ["<|im_end|>"]),
        ([chat(USER, ANSWER, USER)], tiny.CHATML, {}, ["<|im_end|>"]),
        ([chat(USER, ANSWER)], TEXT_END, {}, []),  # turns that end with text
        ([{"prompt": "Who?", "completion": " I."}], None, {}, ["<eos>"]),
        ([{"prompt": [USER], "completion": [ANSWER]}], tiny.CHATML, {}, ["<|im_end|>"]),
        ([{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "No."}]}], tiny.CHATML, {"objective": "dpo"}, ["<|im_end|>"]),
        ([{"text": "The keeper."}], None, {}, []),
        ([{"text": "The keeper."}], None, {"objective": "pretrain"}, []),
        ([chat(USER, ANSWER, USER, ANSWER)] * 2, CALLS, {}, ["<a>", "<b>"]),  # several
        ([chat(USER, ANSWER, USER, ANSWER)], CALLS, {"train_on": "completion"}, ["<b>"]),
        ([chat(USER, ANSWER, USER, THOUGHT)], THINKS, {}, ["<b>"]),
        ([chat(USER, ANSWER, USER, ANSWER), chat(USER, THOUGHT)], THINKS, {}, ["<b>"]),  # in another row
        ([chat(USER, ANSWER), chat(USER, ANSWER | {"content": "a <|im_end|> b"})], tiny.CHATML, {}, []),
        # Typed into one of many answers.
        (
            [*(chat(USER, ANSWER | {"content": f"Night {n}."}) for n in range(100)), chat(USER, ANSWER | {"content": "a <|im_end|> b"})],
            tiny.CHATML, {}, ["<|im_end|>"],
        ),
        ([chat(USER, ANSWER | {"content": "I.<|im_end|>"})], tiny.CHATML, {}, ["<|im_end|>"]),  # typed at its end
    ],
)  # fmt: skip
def test_end_tokens(tmp_path: Path, rows: list[Any], template: str | None, settings: Any, expected: list[str]) -> None:
    assert sorted(end_tokens(tmp_path, rows, template, **settings)) == expected


def test_ends_that_are_cut_off(tmp_path: Path) -> None:
    rows = [chat(USER, ANSWER, USER, ANSWER | {"content": "The keeper counts stars. " * 20})]
    assert end_tokens(tmp_path, rows, CALLS, max_length=60) == ["<a>"]
