"""Render the page of models from the results of a census."""

from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from tests.census.table import FOR_IMAGES, Result, count, entry, features, is_proven, reason_without_images, verdict

_HEAD = """# Models

Which model types of transformers {version} can be trained, and with what. `python -m tests.census render` writes this page
from a run of the census (`python -m tests.census run`), which builds a tiny model of every type, streams it, and compares it with plain
Hugging Face autograd in float32 on the CPU.

A type is *right* when no later token changes an earlier logit, and all of these are equal: loss, logits and gradients bit for bit with `head="whole"`; loss and gradients within 1e-5
with the default settings; gradients of two backward calls added up; the loss in evaluation mode; three steps of AdamW, also in the
backward, in which parameters without a gradient stay as they are; the model that plain transformers loads from what was
saved; a step in the default precision. The other columns are proven one by one:

| column | what was compared |
|---|---|
| head | what the default `head="chunked"` comes to: `chunked`, or `whole` where the loss cannot be cut into chunks |
| micro | `device_micro_batch_size=1` |
| hidden | `output_hidden_states=True`, and gradients through the last one |
| generate | greedy tokens after prompts padded on the left |
| varlen | `attn_implementation="varlen"` on padded rows |
| ties | head and embedding one parameter, or two |
| aux | `output_router_logits=True`: the loss of the experts' router |
| shared | blocks that use keys, values or indices of blocks before them |

Sequence classification models, such as reward models, are compared with one label a row; their head is the `score`.

The commands open a model of images and text as the class that its config names, if that class is listed here or transformers has no causal language model for its type, and train it on rows with images; from Python, `horizon_lm.stream(model)` takes all of them.

A type that is not right is rejected, unless `allow_unproven_model=True`. With another version of transformers, a warning says once that a sample was compared there.
"""
_ABOUT_IMAGES = """Rows with images are given to a model as its processor would give them. Each feature was compared by itself: bit for bit, or within 1e-5 where the table says so or where sums are in another order:

| column | what was compared |
|---|---|
| one | one image a row; also with the default settings, within 1e-5 |
| several | a row with one image and one with two |
| mixed | steps of one model on rows with images, on text, and on both in one batch |
| frozen | the tower frozen, alone and with the projector; and only the tower trained. Empty for a model without a tower of its own |
| training | gradients added up, the loss in evaluation mode, and the loss after saving (within 1e-5); three steps of AdamW, one of them on text; all weights that transformers loads from what was saved after a step |
| micro | `device_micro_batch_size=1` on rows with one image, with several, and with none, within 1e-5 |

An empty cell is a feature that is not proven. Without `one`, rows with images are rejected by name; without `micro`, so are micro-batches of them. The other columns reject nothing."""
_IMAGE_COLUMNS = ("one", "several", "mixed", "frozen", "training", "micro")
_COLUMNS = ("type", "class", "head", "micro", "hidden", "generate", "varlen", "ties", "aux", "shared")
_TITLES = {
    "causal": "Causal language models", "image_text": "Image-text models", "classification": "Sequence classification models",
}  # fmt: skip
_VERDICTS = ("right", "rejected", "wrong", "fails", "not tried")


def page(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the page in Markdown."""
    lines = [_HEAD.format(version=transformers.__version__), *_counts(results)]
    for mapping, title in _TITLES.items():
        lines += ["", f"## {title}", "", *_types(results[mapping])]
        if mapping == "image_text":
            lines += [*_with_images(results[mapping])]
        others = {t: verdict(r) for t, r in results[mapping].items() if not is_proven(r)}
        for word in _VERDICTS[1:]:
            found = {t: why for t, (verdict_of, why) in others.items() if verdict_of == word}
            if found:
                lines += ["", f"### {title}: {word}", "", *_table(("type", "why"), sorted(found.items()))]
    return "\n".join(lines) + "\n"


def _counts(results: Mapping[str, Mapping[str, Result]]) -> Iterator[str]:
    rows = []
    for mapping, found in results.items():
        counts = count(found)
        rows.append((_TITLES.get(mapping, mapping), len(found), *(counts[word] for word in _VERDICTS)))
    yield from _table(("mapping of transformers", "types", *_VERDICTS), rows)


def _types(results: Mapping[str, Result]) -> Iterator[str]:
    yield from _table(_COLUMNS, (_row(name, result) for name, result in _proven(results)))


def _proven(results: Mapping[str, Result]) -> list[tuple[str, Result]]:
    return [(name, result) for name, result in sorted(results.items()) if is_proven(result)]


def _row(model_type: str, result: Result) -> list[str]:
    found = entry(result)
    has = set(found["features"])
    names = ("micro_batches", "hidden_states", "generate", "varlen")
    cells = [model_type, found["class"], found["head"], *("yes" if name in has else "" for name in names)]
    cells.append(", ".join(name for name in ("tied", "untied") if name in has))
    return [*cells, *("yes" if name in has else "" for name in ("auxiliary_loss", "shared_state"))]


def _with_images(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield the part about rows with images."""
    yield from ("", "### Image-text models: rows with images", "", *_ABOUT_IMAGES.splitlines(), "")
    has = {name: features(result) for name, result in _proven(results)}
    rows = (
        [name, *("yes" if each in has[name] else "" for each in FOR_IMAGES)] for name in has if "images" in has[name]
    )
    yield from _table(("type", *_IMAGE_COLUMNS), rows)
    reasons = {name: reason_without_images(result) for name, result in _proven(results)}
    yield from ("", "### Image-text models: on text only", "")
    yield from _table(("type", "why not with images"), ((name, why) for name, why in reasons.items() if why))


def _table(columns: Any, rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
