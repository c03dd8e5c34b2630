"""Cases on rows with images; each compares one feature with plain Hugging Face."""

from collections.abc import Sequence
from typing import Any

import torch

import horizon_lm
from horizon_lm.model.components import Component
from tests.census.comparison import TOLERANCE, Outcome, Step, compare_step, relative, train_step, worst
from tests.census.images import MIXED, ONE, SEVERAL
from tests.census.subject import Counts, Subject
from tests.census.text_cases import (
    ADAMW,
    Batch,
    compare_accumulation,
    compare_adamw,
    compare_evaluation,
    reload,
    require_exact_save,
)

_NONE = ()  # rows of text


def images(subject: Subject) -> Outcome:
    """Compare a step on rows with one image each."""
    return _steps(subject, [ONE])


def default_images(subject: Subject) -> Outcome:
    """Compare such a step with the default settings."""
    return _steps(subject, [ONE], exact=False)


def several_images(subject: Subject) -> Outcome:
    """Compare a step on a row with one image and one with two."""
    return _steps(subject, [SEVERAL])


def mixed_images(subject: Subject) -> Outcome:
    """Compare steps of one model on rows with images, on text, and on both in one batch."""
    return _steps(subject, [ONE, _NONE, MIXED, _NONE, ONE])


def frozen_tower(subject: Subject) -> Outcome:
    """Compare steps on images and on text with a frozen tower, alone and together with the projector."""
    tower, projector = Component.VISION_TOWER, Component.PROJECTOR
    choices = ({tower}, {tower, projector})
    return worst([_steps(subject.with_frozen(frozen), [ONE, _NONE, ONE]) for frozen in choices])


def tower_alone(subject: Subject) -> Outcome:
    """Compare steps on images of which only the tower is trained."""
    return _steps(subject.with_frozen({Component.LANGUAGE_MODEL, Component.PROJECTOR}), [ONE, ONE])


def _steps(subject: Subject, rows: Sequence[Counts], exact: bool = True, **settings: Any) -> Outcome:
    """Compare steps of one model, each of which begins without gradients. ``exact``: expect bit-equal results."""
    plain, outcomes = [subject.plain_on(counts) for counts in rows], []
    model = subject.stream(**({"head": "whole"} if exact else {}) | settings)
    for counts, expected in zip(rows, plain, strict=True):
        outcomes.append(compare_step(train_step(model, subject.rows(counts)), expected, exact=exact, logits=exact))
        model.zero_grad()
    return worst(outcomes)


def images_in_micro_batches(subject: Subject) -> Outcome:
    """Compare steps with one row at a time: with one image in each, with several, and with none in some."""
    outcome = _steps(subject, [ONE], exact=False, head="whole", device_micro_batch_size=1)
    return worst([outcome, _steps(subject, [SEVERAL, MIXED], exact=False, device_micro_batch_size=1)])


def image_accumulation(subject: Subject) -> Outcome:
    """Compare the sum of the gradients of backward calls on images, on text, and on several images."""
    return compare_accumulation(subject, *_of(subject, [ONE, _NONE, SEVERAL])[1])


def image_evaluation(subject: Subject) -> Outcome:
    """Compare the loss in eval mode with the default head, and the logits without labels."""
    return compare_evaluation(subject, *_of(subject, [SEVERAL])[1])


def image_adamw(subject: Subject) -> Outcome:
    """Compare three optimizer steps, with images, without, and in some rows. Parameters without a gradient must not change."""
    return compare_adamw(subject, *_of(subject, [ONE, _NONE, MIXED]))


def _of(subject: Subject, rows: Sequence[Counts]) -> tuple[list[Step], list[Batch]]:
    """Return steps of the plain model on rows, and the rows."""
    return [subject.plain_on(counts) for counts in rows], [subject.rows(counts) for counts in rows]


def image_save(subject: Subject) -> Outcome:
    """Train a model on images, save it, and compare it with the plain one that is loaded: all weights, and the loss."""
    _, [batch] = _of(subject, [ONE])
    require_exact_save(subject)
    model = subject.stream()
    optimizer = horizon_lm.AdamW(model, **ADAMW)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loaded, original = reload(subject, model), subject.model.state_dict()
    ours, theirs = ({n: w.clone() for n, w in each.state_dict().items()} for each in (model, loaded))
    different = [n for n in original if n not in theirs or not torch.equal(ours[n], theirs[n])]
    if different:
        return Outcome("wrong", f"{len(different)} of {len(original)} tensors differ, {different[0]} for one")
    if all(torch.equal(weight, original[n]) for n, weight in theirs.items()):
        return Outcome("wrong", "the training changed no weight")
    with torch.no_grad():
        loss, expected = (each.eval()(**batch, use_cache=False).loss for each in (model, loaded))
    off = relative(loss, expected)
    return Outcome("right" if off <= TOLERANCE else "wrong", f"{len(original)} tensors, loss {off:.1e}")
