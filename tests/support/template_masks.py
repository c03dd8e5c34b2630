"""Compare our masks with those of TRL's training templates, for docs/generated/masks.md.

``python -m tests.support.template_masks`` prints the page.
"""

import re
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import trl

from horizon_lm.runs.data.chat_template import ChatRenderer
from horizon_lm.runs.data.conversations import Conversation, RowError
from horizon_lm.runs.data.template_coverage import argument_variants
from tests.e2e.tiny import build_tokenizer

_CALL = {"type": "function", "function": {"name": "count", "arguments": {"of": "stars"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "count", "description": "Counts.",
        "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
    },
}  # fmt: skip


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = {
    "one turn": Conversation([_user("Who are you?"), _assistant("The keeper.")]),
    "two turns": Conversation([_user("Who?"), _assistant("The keeper."), _user("When is it?"), _assistant("At dusk.")]),
    "system": Conversation([{"role": "system", "content": "Be short."}, _user("Who?"), _assistant("The keeper.")]),
    "thinking": Conversation([_user("Who?"), _assistant("The keeper.", reasoning_content="It asks for me.")]),
    "thinking inline": Conversation([_user("Who?"), _assistant("<think>\nIt asks.\n</think>\n\nThe keeper.")]),
    "tools": Conversation(
        [
            _user("How many?"), _assistant("", tool_calls=[_CALL]), {"role": "tool", "name": "count", "content": "7"},
            _assistant("Seven."),
        ],
        tools=[_TOOL],
    ),
}  # fmt: skip

EQUAL, OTHERWISE, REJECTED, IMPOSSIBLE, DIFFERENT = "equal", "otherwise", "rejected", "-", "different"


def pairs() -> list[str]:
    """Return the names of the templates that have a training version in TRL."""
    return sorted(path.name.removesuffix("_training.jinja") for path in _folder().glob("*_training.jinja"))


def _folder() -> Path:
    import trl

    return Path(trl.__file__).parent / "chat_templates"


def tokenizer_for(name: str) -> tuple[Any, str]:
    """Return a tokenizer with a plain template and all of its special tokens, and the training template."""
    plain, training = ((_folder() / f"{name}{suffix}.jinja").read_text() for suffix in ("", "_training"))
    tokenizer = build_tokenizer(plain)
    marks = set(re.findall(r"<\|?[A-Za-z_]+\|?>|<｜[^｜>]+｜>|<end_of_turn>|<turn\|>", plain + training))
    marks = {mark for mark in marks if mark not in ("<think>", "<tool_call>", "<tools>", "<tool_response>")}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return tokenizer, training


def compare(name: str, conversation: Conversation, use_training_template: bool = True) -> tuple[str, str]:
    """Return the outcome for a conversation and, if it differs, the error or the text that is trained on."""
    tokenizer, training = tokenizer_for(name)
    options = {"tools": conversation.tools, "tokenize": False}
    try:
        text = _rendered(tokenizer, conversation)
        theirs = tokenizer.apply_chat_template(conversation.messages, chat_template=training, **options)
    except (jinja2.TemplateError, TypeError) as error:
        return IMPOSSIBLE, str(error)
    encoded = tokenizer.apply_chat_template(
        conversation.messages, tools=conversation.tools, chat_template=training, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    wanted = np.array(encoded["assistant_masks"], dtype=bool)
    try:
        ours = ChatRenderer(tokenizer, use_training_template).render(conversation)
    except RowError as error:
        return REJECTED, str(error)
    if text == theirs:
        if ours.assistant.tolist() == wanted.tolist():
            return EQUAL, ""
        return DIFFERENT, _trained(tokenizer, ours.ids, ours.assistant)
    return OTHERWISE, _trained(tokenizer, ours.ids, ours.assistant)


def _rendered(tokenizer: Any, conversation: Conversation) -> str:
    """Render with the model's own template, with call arguments as text if the template needs it."""
    failure = None
    for variant in argument_variants(conversation):
        try:
            return str(tokenizer.apply_chat_template(variant.messages, tools=variant.tools, tokenize=False))
        except TypeError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def trained_by_template(name: str, conversation: Conversation) -> str:
    """Return the text on which the training template trains."""
    tokenizer, training = tokenizer_for(name)
    encoded = tokenizer.apply_chat_template(
        conversation.messages, tools=conversation.tools, chat_template=training, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    return _trained(tokenizer, np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool))


def _trained(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> str:
    return str(tokenizer.decode(ids[mask]))


HEAD = """# Masks compared with TRL's training templates

TRL has templates with `{% generation %}` marks for many models whose own template has none. For each pair, this page compares
the tokens of a conversation that are trained on. It is generated by `python -m tests.support.template_masks` and checked by
`tests/data/test_template_pairs.py`.

- **equal**: the same tokens. TRL's marks are used if TRL is installed (the extra `post-training`) and its template renders
  the conversation exactly as the model's own does.
- **otherwise**: TRL's template renders the conversation differently, so its marks cannot be used. The answers are located in
  the text of the model's own template instead; the differences are listed below.
- **rejected**: the row is rejected with the error below.
- **-**: the model's own template does not accept such a conversation.

In parentheses: the outcome of locating answers alone, as for an unknown template or without TRL. There, **different** means the
same answers and end tokens, but not all special tokens around them; the differences are listed below.

"""


def page() -> str:
    """Return docs/generated/masks.md."""
    kinds = list(CONVERSATIONS)
    lines = [f"| template | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    notes: dict[str, list[str]] = {}
    for name in pairs():
        cells = []
        for kind, conversation in CONVERSATIONS.items():
            found, detail = compare(name, conversation)
            alone, of_spans = compare(name, conversation, use_training_template=False)
            cells.append(found if found in (OTHERWISE, IMPOSSIBLE, alone) else f"{found} ({alone})")
            for what, text in ((found, detail), (alone, of_spans)):
                if what == REJECTED:
                    notes.setdefault(f"rejected: {text}", []).append(f"{name}, {kind}")
                elif what in (OTHERWISE, DIFFERENT) and (what != DIFFERENT or kind == "one turn"):
                    theirs = trained_by_template(name, conversation)
                    notes.setdefault(f"{what}: we train on {text!r}, TRL's template on {theirs!r}", []).append(
                        f"{name}, {kind}"
                    )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## Differences and errors", ""]
    for note, where in sorted(notes.items()):
        lines.append(f"- {note}: {'; '.join(dict.fromkeys(where))}.")
    packages = f"{Path(trl.__file__).parents[1]}/"  # of this machine
    return (HEAD + "\n".join(lines) + "\n").replace(packages, "")


if __name__ == "__main__":
    print(page(), end="")
