"""Rows for each kind of trainer, of different lengths."""

from typing import Any

_PROMPTS = ["What does the keeper do?", "Who counts the stars?", "Why does the rain come?", "When does the dome open?"]


def question(number: int) -> list[dict[str, str]]:
    """Return a user's turn."""
    return [{"role": "user", "content": f"{_PROMPTS[number % 4]} {number}"}]


def answer(text: str, number: int) -> list[dict[str, str]]:
    """Return an assistant's turn."""
    return [{"role": "assistant", "content": text * (1 + number % 3)}]


def of_kind(kind: str, count: int = 24) -> list[dict[str, Any]]:
    """Return rows for a trainer."""
    numbers = range(count)
    if kind == "trainer":
        return [{"text": f"{_PROMPTS[n % 4]} " * (1 + n % 3) + str(n)} for n in numbers]
    if kind == "sft":
        return [{"messages": question(n) + answer("The keeper waits. ", n)} for n in numbers]
    if kind in ("grpo", "rloo"):
        return [{"prompt": question(n)} for n in numbers]
    if kind == "kto":
        texts = ("The keeper waits. ", "Stars. ")
        return [{"prompt": question(n), "completion": answer(texts[n % 2], n), "label": n % 2 == 0} for n in numbers]
    return [
        {"prompt": question(n), "chosen": answer("The keeper waits. ", n), "rejected": answer("Stars. ", n + 1)}
        for n in numbers
    ]
