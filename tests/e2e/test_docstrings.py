"""The examples in the docstrings of public functions run."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import horizon_lm
from tests.e2e import tiny

NAMES = [
    "AdamW", "from_config", "from_pretrained", "named_weights", "plan", "run_together", "stream", "token_logprobs", "train",
    "trainer",
]  # fmt: skip


@pytest.fixture
def namespace(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that docs/reference.md promises, in a folder with the files that it promises."""
    monkeypatch.chdir(tmp_path)
    Path("tiny-llama").symlink_to(model)
    tiny.write_jsonl(Path("train.jsonl"), tiny.alpaca_rows())
    ids = torch.arange(32).reshape(2, 16)  # (B, T)
    return {
        "horizon_lm": horizon_lm,
        "torch": torch,
        "config": AutoConfig.from_pretrained("tiny-llama"),
        "model": horizon_lm.from_pretrained("tiny-llama", device="cpu"),
        "batch": {"input_ids": ids, "labels": ids},
    }


def failures(text: str, namespace: dict[str, Any]) -> str:
    """Run the examples in a text. Return a report of those that fail."""
    example = doctest.DocTestParser().get_doctest(text, namespace, "example", None, 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, namespace: dict[str, Any]) -> None:
    text = getattr(horizon_lm, name).__doc__
    assert ">>> " in text
    assert not failures(text, namespace)


def test_a_wrong_example_fails(namespace: dict[str, Any]) -> None:
    text = horizon_lm.from_pretrained.__doc__
    assert failures(text.replace("torch.bfloat16", "torch.float32"), namespace)


def test_every_example_of_a_public_name_is_run() -> None:
    public = [name for name in horizon_lm.__all__ if ">>> " in (getattr(horizon_lm, name).__doc__ or "")]
    assert sorted(public) == NAMES


def test_the_pass_on_the_reading_page() -> None:
    page = Path(__file__).parents[2] / "docs/reading.md"
    (text,) = re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL)
    assert not failures(text, {})
    assert failures(text.replace("waits for #4, last", "waits for #5, last"), {})
