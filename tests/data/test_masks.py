"""Targets of conversations with unusual templates, tokenizers or answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from horizon_lm.runs.data.chat_template import ChatRenderer
from horizon_lm.runs.data.conversations import Completion, Conversation, RowError
from horizon_lm.runs.data.tokenize import ExampleTokenizer, RowFlag
from tests.e2e.tiny import CHATML, CHATML_WITH_MARKS, build_tokenizer
from tests.support.prepared_rows import ANSWER, USER, conversation, messages, prepared, trained_text, write

CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich", "on": True}}}
ROUND = [
    USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "Red."}, ANSWER,
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def with_calls(expression: str) -> str:
    """Return a template with marks that renders tool calls with an expression."""
    return CHATML_WITH_MARKS.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration",
        "message['content'] }}{% for call in message.tool_calls or () %}{{ " + expression + " }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endgeneration",
    )


def trained(template: str, rows: Any) -> str:
    tokenizer = build_tokenizer(template)
    return trained_text(tokenizer, ChatRenderer(tokenizer).render(Conversation(rows)))


# Parts that a template drops


def test_dropped_reasoning_and_tools_are_reported(tmp_path: Path) -> None:
    """Compare a template that renders neither reasoning nor tools with one that renders both."""
    plain = messages("Who?", "I.")
    thought = {"messages": [USER, {**ANSWER, "reasoning_content": "It is dusk."}]}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    path = write(tmp_path, [plain, thought, {**plain, "tools": [tool]}])
    _, report = prepared(path)
    dropped = report.found.flagged[RowFlag.DROPPED_BY_TEMPLATE]
    assert (dropped.count, [place.rpartition(":")[2] for place in dropped.places]) == (2, ["2-3"])
    findings = "\n".join(map(str, report.findings))
    assert "messages, reasoning or tools that the chat template drops: 2 (" in findings
    knowing = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
        "+ message['content'] +", "+ message.get('reasoning_content', '') + message['content'] +"
    )
    _, report = prepared(path, chat_template=knowing)
    assert report.found.flagged[RowFlag.DROPPED_BY_TEMPLATE].count == 0


def test_dropped_roles_are_reported(tmp_path: Path) -> None:
    """Dropped roles include a message whose text also occurs elsewhere."""
    template = "{% for message in messages if message.role != 'developer' %}" + CHATML.partition("%}")[2]
    rows = [{"messages": [{"role": "developer", "content": text}, USER, ANSWER]} for text in ("Be short.", "keeper")]
    _, report = prepared(write(tmp_path, rows), chat_template=template)
    assert report.found.flagged[RowFlag.DROPPED_BY_TEMPLATE].count == 2


def test_dropped_answer_is_rejected() -> None:
    template = CHATML.replace("+ message['content'] +", "+ (message['content'] if message['role'] == 'user' else '') +")
    renderer = ChatRenderer(build_tokenizer(template))
    for answer in ("The keeper.", "user"):  # the second answer occurs in the text, but not as an answer
        with pytest.raises(RowError, match=r"drops the assistant's answer \(message 2\)"):
            renderer.render(conversation("Who?", answer))


def test_one_dropped_call_of_two_is_rejected() -> None:
    template = with_calls("call.function.name").replace("message.tool_calls or ()", "(message.tool_calls or [])[:1]")
    twice = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    with pytest.raises(RowError, match="drops a tool call"):
        trained(template, twice)


def test_dropped_content_of_a_call_is_reported() -> None:
    """The row is kept, since the call is trained on."""
    template = with_calls("call.function.name").replace(
        "{{ message['content'] }}{% for call", "{{ '' if message.tool_calls else message['content'] }}{% for call"
    )
    rows = [USER, {**ROUND[1], "content": "Let me look."}, *ROUND[2:]]
    tokenizer = build_tokenizer(template)
    row = ChatRenderer(tokenizer).render(Conversation(rows))
    assert trained_text(tokenizer, row) == "f<|im_end|>The keeper.<|im_end|>"
    assert row.dropped is not None


class CountingRenderer(ChatRenderer):
    """A renderer that counts its renderings."""

    count = 0

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        self.count += 1
        return super()._apply(conversation, **options)


def test_number_of_renderings_is_independent_of_length() -> None:
    counts = []
    for rounds in (1, 20):
        renderer = CountingRenderer(build_tokenizer(with_calls("call.function.arguments")))
        renderer.render(Conversation(ROUND * rounds))
        counts.append(renderer.count)
    assert counts[0] == counts[1] <= 5


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKS])
def test_dropped_call_is_rejected(template: str) -> None:
    """The model would learn to end its turn instead of calling."""
    with pytest.raises(RowError, match="drops a tool call"):
        trained(template, ROUND)


@pytest.mark.parametrize(
    "expression", ["call.function.name + call.function.arguments", "'f' ~ call.function.arguments"]
)
def test_arguments_rendered_as_text_are_json(expression: str) -> None:
    """Arguments are JSON both for templates that concatenate arguments and for templates that would print a Python
    dict.
    """
    assert trained(with_calls(expression), ROUND) == 'f{"city": "Zürich", "on": true}<|im_end|>The keeper.<|im_end|>'


def test_dict_in_a_question_is_not_a_call() -> None:
    rows = [{"role": "user", "content": f"Call f with {CALL['function']['arguments']}"}, *ROUND[1:]]
    template = with_calls("call.function.arguments is string and 'text' or (call.function.arguments | tojson)")
    assert trained(template, rows) == '{"city": "Zürich", "on": true}<|im_end|>The keeper.<|im_end|>'


# Answers


def test_empty_last_answer_has_no_targets() -> None:
    empty = conversation("Who?", "I.", "Who?", " ")
    (row,) = ExampleTokenizer(build_tokenizer(), "completion", None).tokenize(empty)
    assert row.num_targets == 0
    earlier = conversation("Who?", "", "Who?", "I.")
    tokenizer = build_tokenizer()
    (row,) = ExampleTokenizer(tokenizer, "completion", None).tokenize(earlier)
    assert tokenizer.decode(row.ids[row.trained]) == "I.<|im_end|>"


def test_template_that_trims_only_the_last_answer() -> None:
    template = CHATML.replace("message['content']", "(message['content'] | trim if loop.last else message['content'])")
    rows = conversation("Who?", "I. \n", "When?", " At dusk.").messages
    assert trained(template, rows) == "I. \n<|im_end|>At dusk.<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKS])
@pytest.mark.parametrize("empty", ["", " \n"])
def test_empty_answers_are_not_trained_on(template: str, empty: str) -> None:
    """The model would learn to end its turn immediately."""
    assert trained(template, conversation("Who?", empty, "Who?", "I.").messages) == "I.<|im_end|>"


@pytest.mark.parametrize("answer", ["\nI.", "I. \n"])
def test_template_that_trims_answers(answer: str) -> None:
    """Whitespace of the turn header is not mistaken for that of the answer."""
    template = CHATML.replace("message['content']", "(message['content'] | trim)")
    assert trained(template, conversation("Who?", answer).messages) == f"{answer.strip()}<|im_end|>"


# Tokenizers whose offsets exclude spaces


def tokenizer_with_trimmed_offsets(template: str | None = CHATML) -> Any:
    tokenizer = build_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def test_trailing_spaces_of_a_prompt_are_not_trained_on() -> None:
    tokenizer = tokenizer_with_trimmed_offsets(None)
    (row,) = ExampleTokenizer(tokenizer, None, None).tokenize(Completion("def f():\n        return", " 1"))
    assert tokenizer.decode(row.ids[row.trained]) == " 1<|im_end|>"
    assert row.ids.tolist() == tokenizer("def f():\n        return 1<|im_end|>")["input_ids"]


@pytest.mark.parametrize("answer", [" ja", "ja  "])
def test_spaces_around_marked_answers(answer: str) -> None:
    """With trimmed offsets, transformers would mask all following tokens, or none of them."""
    template = CHATML_WITH_MARKS.replace(
        "message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    tokenizer = tokenizer_with_trimmed_offsets(template)
    row = ChatRenderer(tokenizer).render(conversation("Who?", answer, "Secret", "no"))
    assert trained_text(tokenizer, row) == f"{answer}no"


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
@pytest.mark.parametrize("text", ["", "Let me look."])
def test_calls_of_a_template_without_a_training_version(name: str, text: str) -> None:
    """Llama 3.1 prints a call in a form of its own, and drops a text before it, which is reported."""
    trl = pytest.importorskip("trl.chat_template_utils")
    template = (Path(trl.__file__).with_name("chat_templates") / f"{name}.jinja").read_text()
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]}
    )
    turns = [USER, {**ROUND[1], "content": text}, *ROUND[2:], USER, {**ROUND[1], "content": ""}]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    row = ChatRenderer(tokenizer).render(Conversation(turns, tools=tools))
    call = f'{{"name": "f", "parameters": {json.dumps(CALL["function"]["arguments"], ensure_ascii=False)}}}<|eot_id|>'
    assert trained_text(tokenizer, row) == f"{call}{ROUND[3]['content']}<|eot_id|>{call}"
    assert (row.unended, row.dropped is None) == (None, not text)


def without_marks(template: str) -> str:
    """Return a template without marks, which opens a turn of the assistant if it is asked to."""
    text = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return text + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def test_located_calls_are_the_marked_ones() -> None:
    template = with_calls("call.function.name + ' ' + call.function.arguments.city")
    assert trained(without_marks(template), ROUND * 2) == trained(template, ROUND * 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda template: "{{ messages | length }}" + template, "tool calls cannot be located"),
        (lambda template: template.replace("add_generation_prompt", "false"), "tool calls cannot be located"),
        (lambda template: template.replace("{{ message['content'] }}", "{{ message['content'] | upper }}"), "is not in"),
        (lambda template: "{% if messages[-1].role != 'assistant' %}{{ raise_exception('?') }}{% endif %}" + template, "tool calls"),
    ],
    ids=["the start is printed in another way", "no opening", "an answer is changed", "a start is rejected"],
)  # fmt: skip
def test_calls_whose_place_is_not_certain(changed: Callable[[str], str], message: str) -> None:
    with pytest.raises(RowError, match=message):
        trained(changed(without_marks(with_calls("call.function.name"))), ROUND)


def test_the_file_of_a_template_that_locates_calls_is_named() -> None:
    """TRL's version renders thinking in other places, so it is not used by itself; with it, the row is trained on."""
    trl = pytest.importorskip("trl.chat_template_utils")
    folder = Path(trl.__file__).with_name("chat_templates")
    with pytest.raises(RowError, match=r"tool calls cannot be located .* set chat_template_path: ") as error:
        ChatRenderer(build_tokenizer((folder / "qwen3.jinja").read_text())).render(Conversation(ROUND))
    named = Path(str(error.value).rpartition("chat_template_path: ")[2])
    assert named == folder / "qwen3_training.jinja"
    tokenizer = build_tokenizer(named.read_text())
    answers = trained_text(tokenizer, ChatRenderer(tokenizer).render(Conversation(ROUND)))
    assert "Zürich" in answers
    assert ANSWER["content"] in answers
    assert "Red." not in answers
