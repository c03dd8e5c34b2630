"""Our masks agree with those of TRL's training templates."""

from pathlib import Path

import pytest

from tests import template_pairs
from tests.template_pairs import CONVERSATIONS, DIFFERENT, EQUAL, OTHERWISE, compare, page, trained_by_template

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL


@pytest.mark.parametrize("name", template_pairs.pairs())
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
    assert (Path(__file__).parents[2] / "docs" / "masks.md").read_text(encoding="utf-8") == page()
