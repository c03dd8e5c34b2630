"""Our masks agree with those of TRL's training templates."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_lm.runs.data.answer_spans import locate_answers
from horizon_lm.runs.data.chat_template import ChatRenderer
from horizon_lm.runs.data.conversations import Conversation, RowError
from horizon_lm.runs.data.template_coverage import render_checked
from tests.support import template_masks
from tests.support.template_masks import (
    CONVERSATIONS,
    DIFFERENT,
    EQUAL,
    OTHERWISE,
    compare,
    page,
    tokenizer_for,
    trained_by_template,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL


@pytest.mark.parametrize("name", template_masks.pairs())
def test_masks_are_equal_or_rejected_or_rendered_differently(name: str) -> None:
    found = {kind: compare(name, conversation) for kind, conversation in CONVERSATIONS.items()}
    assert DIFFERENT not in {what for what, _ in found.values()}
    for kind, (what, text) in found.items():
        if what == OTHERWISE:  # at least the same answers must be trained on
            theirs = trained_by_template(name, CONVERSATIONS[kind])
            for message in CONVERSATIONS[kind].messages:
                if message["role"] == "assistant":
                    assert message["content"] in text
                    assert message["content"] in theirs


@pytest.mark.parametrize("name", ["llama3", "cohere"])
def test_located_answers_are_the_marked_ones(name: str) -> None:
    """If the marks enclose exactly the answers, locating the answers finds the same tokens."""
    for kind in ("one turn", "two turns", "system", "thinking inline"):
        assert compare(name, CONVERSATIONS[kind], use_training_template=False) == (EQUAL, "")


def test_masks_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[2] / "docs" / "generated" / "masks.md").read_text(encoding="utf-8") == page()


# Short answers, which also occur in headers, end tokens, questions and each other


def located(renderer: ChatRenderer, contents: list[str], *, search: bool = False) -> list[str] | None:
    """Return the text of each answer's turn, or None if the template drops or changes answers."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    try:
        found = render_checked(Conversation(messages), renderer.text)
        style = renderer._template_style(Conversation(messages))
        spans = locate_answers(found.text, found.messages, style, None if search else found.ends)
    except RowError:
        return None
    return [found.text[start:end] for start, end in spans]


def check_short_answers(name: str, data: st.DataObject) -> None:
    renderer = ChatRenderer(tokenizer_for(name)[0], use_training_template=False)
    text = render_checked(CONVERSATIONS["two turns"], renderer.text).text
    pieces = st.builds(
        lambda start, length: text[start : start + length], st.integers(0, len(text) - 1), st.integers(1, 4)
    )
    short = st.one_of(st.sampled_from(["a", "d", "as", "is", "<", "\n", "1"]), pieces).map(str.strip).filter(bool)
    padded = st.builds(str.__add__, short, st.sampled_from(["", "", " ", "\n"]))
    contents = data.draw(st.lists(padded, min_size=4, max_size=4))
    words = [f"Quokka{number}Zebu" for number in range(4)]  # in their place, whose turns a search finds without doubt
    long = [content.replace(content.strip(), word) for content, word in zip(contents, words, strict=True)]
    turns = located(renderer, long, search=True)
    expected = turns and [turn.replace(words[n], contents[n].strip()) for turn, n in zip(turns, (1, 3), strict=True)]
    assert located(renderer, contents) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gptoss", "phi3", "gemma3", "deepseekv3", "glm4moe"])
@given(st.data())
@settings(max_examples=6, deadline=None)
def test_short_answers_are_located(name: str, data: st.DataObject) -> None:
    check_short_answers(name, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in template_masks.pairs() if name not in ("idefics3", "smolvlm", "llava_next")]
)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_short_answers_are_located_in_every_template(name: str, data: st.DataObject) -> None:
    check_short_answers(name, data)
