"""Compare a streamed model with plain Hugging Face autograd, one thing at a time.

Each case takes a `Subject` and returns an `Outcome`. Cases raise nothing: `run_case` turns exceptions into outcomes.
"""

import copy
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import horizon_lm
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from tests.census.inputs import prompts, text_batch
from tests.census.tiny_models import CannotBuildError, build

TOLERANCE = 1e-5  # of a loss, and of all gradients together, relative
WORST_TOLERANCE = 1e-3  # of one parameter's gradient, relative to it or to a thousandth of all
REJECTIONS = (ConfigError, ModelNotSupportedError)  # other errors come too late, or say nothing of the model
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Outcome:
    """What a case came to.

    Attributes:
        status: ``right`` (bit for bit, or within `TOLERANCE` where sums are in another order), ``close`` (should be
            bit for bit, and is within `TOLERANCE`), ``wrong``, ``rejected`` (by an error of Horizon-LM), ``crashed``,
            ``plain_fails`` (plain Hugging Face cannot do it) or ``cannot_build``.
        detail: a figure or a message.
    """

    status: str
    detail: str = ""


class PlainFailsError(Exception):
    """Plain Hugging Face cannot do what a case compares with."""


@dataclass
class Step:
    """What one forward and backward leave."""

    loss: torch.Tensor
    logits: torch.Tensor | None
    grads: dict[str, torch.Tensor | None]


class Subject:
    """A model type's tiny model, and what plain Hugging Face makes of it."""

    def __init__(self, mapping: str, model_type: str) -> None:
        self.mapping, self.model_type = mapping, model_type

    @cached_property
    def model(self) -> Any:
        """The plain model. Cases take copies of it."""
        return build(self.model_type, self.mapping)

    def copy(self) -> Any:
        return copy.deepcopy(self.model)

    def stream(self, **settings: Any) -> Any:
        return horizon_lm.stream(self.copy(), **({"precision": "float32"} | settings))

    def batch(self, seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
        return text_batch(self.model_type, seed=seed, **options)

    @cached_property
    def plain(self) -> Step:
        """One training step of the plain model; PlainFailsError where it is not the same twice."""
        try:
            first, second = (train_step(self.copy(), self.batch(), use_cache=False) for _ in range(2))
        except Exception as error:
            raise PlainFailsError(describe(error)) from error
        if not same_step(first, second):
            raise PlainFailsError("plain Hugging Face is not deterministic")
        if not first.loss.isfinite():
            raise PlainFailsError(f"the loss is {first.loss.item()}")
        return first


def train_step(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> Step:
    """Forward and backward, from a seed."""
    torch.manual_seed(7)
    output = model(**batch, **options)
    output.loss.backward()
    return Step(output.loss.detach(), getattr(output, "logits", None), gradients(model))


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def same_step(one: Step, other: Step) -> bool:
    grads = all(torch.equal(_zeros(a, b), _zeros(b, a)) for a, b in _pairs(one.grads, other.grads))
    return grads and torch.equal(one.loss, other.loss)


def _pairs(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(ours.get(n), theirs[n]) for n in theirs if not (ours.get(n) is None and theirs[n] is None)]


def _zeros(grad: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if grad is not None:
        return grad.float()
    assert other is not None
    return torch.zeros_like(other, dtype=torch.float32)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Distance, relative to the norm of what is right."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-12))


def compare_grads(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, float, float, str]:
    """Whether gradients are the same bit for bit; how far all and the worst one are off; the worst one's name."""
    missing = theirs.keys() - ours.keys()
    if missing:
        return False, float("inf"), float("inf"), f"{sorted(missing)[0]} is missing"
    same, square, norm = True, 0.0, 0.0
    errors: dict[str, tuple[float, float]] = {}
    for name, grad in theirs.items():
        if grad is None and ours[name] is None:
            continue
        a, b = _zeros(ours[name], grad), _zeros(grad, ours[name])
        same = same and torch.equal(a, b)
        errors[name] = float((a - b).norm()), float(b.norm())
        square, norm = square + errors[name][0] ** 2, norm + errors[name][1] ** 2
    whole = max(norm**0.5, 1e-12)
    worst = max(errors, key=lambda n: errors[n][0] / max(errors[n][1], 1e-3 * whole), default="")
    off = errors[worst][0] / max(errors[worst][1], 1e-3 * whole) if worst else 0.0
    return same, square**0.5 / whole, off, worst


def judge_step(ours: Step, theirs: Step, exact: bool, logits: bool = False) -> Outcome:
    """Compare loss, gradients and, where wanted, logits. ``exact``: they should be the same bit for bit."""
    same, all_off, worst_off, worst = compare_grads(ours.grads, theirs.grads)
    loss_off = relative(ours.loss, theirs.loss)
    logits_off = relative(ours.logits, theirs.logits) if logits else 0.0  # type: ignore[arg-type]
    same = same and torch.equal(ours.loss, theirs.loss)
    same = same and (not logits or torch.equal(ours.logits, theirs.logits))  # type: ignore[arg-type]
    figures = f"loss {loss_off:.1e}, logits {logits_off:.1e}, gradients {all_off:.1e}, worst {worst} {worst_off:.1e}"
    if same:
        return Outcome("right", "bit for bit")
    if not max(loss_off, logits_off, all_off) <= TOLERANCE or not worst_off <= WORST_TOLERANCE:
        return Outcome("wrong", figures)
    return Outcome("close" if exact else "right", figures)


# Cases


def whole(subject: Subject) -> Outcome:
    plain = subject.plain
    return judge_step(train_step(subject.stream(head="whole"), subject.batch()), plain, exact=True, logits=True)


def default(subject: Subject) -> Outcome:
    plain = subject.plain
    return judge_step(train_step(subject.stream(), subject.batch()), plain, exact=False)


def micro_batches(subject: Subject) -> Outcome:
    plain = subject.plain
    model = subject.stream(head="whole", device_micro_batch_size=1)
    return judge_step(train_step(model, subject.batch()), plain, exact=False)


def default_micro_batches(subject: Subject) -> Outcome:
    plain = subject.plain
    return judge_step(train_step(subject.stream(device_micro_batch_size=1), subject.batch()), plain, exact=False)


def accumulation(subject: Subject) -> Outcome:
    """Two backward calls, whose gradients add up."""

    def both(model: Any, **options: Any) -> Step:
        first = train_step(model, subject.batch(seed=1), **options)
        second = train_step(model, subject.batch(seed=2), **options)
        return Step(first.loss + second.loss, None, second.grads)

    subject.plain  # noqa: B018  (plain Hugging Face can do this)
    return judge_step(both(subject.stream(head="whole")), both(subject.copy(), use_cache=False), exact=False)


def evaluation(subject: Subject) -> Outcome:
    """The loss in evaluation mode with the default head, and the logits without labels."""
    subject.plain  # noqa: B018
    batch = subject.batch()
    results = []
    for model, options in ((subject.copy(), {"use_cache": False}), (subject.stream(), {})):
        model.eval()
        with torch.no_grad():
            torch.manual_seed(7)
            loss = model(**batch, **options).loss
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}, **options).logits
        results.append((loss, logits))
    (loss, logits), (our_loss, our_logits) = results
    off = max(relative(our_loss, loss), relative(our_logits, logits))
    figures = f"loss {relative(our_loss, loss):.1e}, logits {relative(our_logits, logits):.1e}"
    return Outcome("right" if off <= TOLERANCE else "wrong", figures)


def hidden_states(subject: Subject) -> Outcome:
    """Values of all hidden states, and gradients through the last one, with the default head."""
    subject.plain  # noqa: B018

    def step(model: Any, **options: Any) -> tuple[Step, list[torch.Tensor]]:
        torch.manual_seed(7)
        output = model(**subject.batch(), output_hidden_states=True, **options)
        states = output.hidden_states
        (output.loss + states[-1].float().pow(2).mean()).backward()
        return Step(output.loss.detach(), None, gradients(model)), [s.detach() for s in states]

    try:
        theirs, states = step(subject.copy(), use_cache=False)
    except Exception as error:
        raise PlainFailsError(describe(error)) from error
    ours, our_states = step(subject.stream())
    if len(states) != len(our_states):
        return Outcome("wrong", f"{len(our_states)} hidden states instead of {len(states)}")
    off = [relative(a, b) for a, b in zip(our_states, states, strict=True)]
    if not max(off) <= TOLERANCE:
        return Outcome("wrong", f"hidden state {off.index(max(off))} of {len(off)} is off by {max(off):.1e}")
    return judge_step(ours, theirs, exact=False)


def generate(subject: Subject) -> Outcome:
    """Greedy tokens after prompts that are padded on the left."""
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    batch = prompts(subject.model_type)

    def tokens(model: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return model.eval().generate(**batch, **options)

    try:
        theirs = tokens(subject.copy())
    except Exception as error:
        raise PlainFailsError(describe(error)) from error
    ours = tokens(subject.stream())
    if torch.equal(ours, theirs):
        return Outcome("right", "the same tokens")
    return Outcome("wrong", f"{ours[:, -6:].tolist()} instead of {theirs[:, -6:].tolist()}")


def adamw(subject: Subject) -> Outcome:
    """Three steps. Parameters without a gradient stay as they are."""
    return _adamw(subject)


def update_in_backward(subject: Subject) -> Outcome:
    return _adamw(subject, update_in_backward=True)


def _adamw(subject: Subject, **settings: Any) -> Outcome:
    unused = [name for name, grad in subject.plain.grads.items() if grad is None]
    before, plain = subject.model.state_dict(), subject.copy()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **ADAMW)
    streamed = subject.stream(head="whole")
    ours = horizon_lm.AdamW(streamed, **ADAMW, **settings)
    for seed in (1, 2, 3):
        train_step(plain, subject.batch(seed), use_cache=False)
        train_step(streamed, subject.batch(seed))
        for each in (optimizer, ours):
            each.step()
            each.zero_grad()
    weights, our_weights = plain.state_dict(), {n: w.clone() for n, w in streamed.state_dict().items()}
    moved = [name for name in unused if not torch.equal(our_weights[name], before[name])]
    if moved:
        return Outcome("wrong", f"{len(moved)} of {len(unused)} parameters without a gradient moved, {moved[0]} for one")
    off = {n: relative(our_weights[n], w) for n, w in weights.items() if w.is_floating_point()}
    worst = max(off, key=lambda n: off[n])
    if all(torch.equal(our_weights[n], w) for n, w in weights.items()):
        return Outcome("right", f"bit for bit, {len(unused)} parameters without a gradient")
    return Outcome("close" if off[worst] <= TOLERANCE else "wrong", f"{worst} is off by {off[worst]:.1e}")


def save(subject: Subject) -> Outcome:
    """A plain model that is loaded from what a streamed one saves has its weights."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            theirs = _reload(subject.copy(), Path(folder) / "plain")
        except Exception as error:
            raise PlainFailsError(describe(error)) from error
        ours = _reload(subject.stream(), Path(folder) / "streamed")
    original = subject.model.state_dict()
    lossy = [n for n, w in theirs.items() if not torch.equal(w, original[n])]
    if lossy:
        raise PlainFailsError(f"plain Hugging Face loads {len(lossy)} tensors otherwise than it saved them, {lossy[0]} for one")
    different = [n for n, w in theirs.items() if n not in ours or not torch.equal(w, ours[n])]
    if different:
        return Outcome("wrong", f"{len(different)} of {len(theirs)} tensors differ, {different[0]} for one")
    return Outcome("right", f"{len(theirs)} tensors")


def _reload(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model_class = type(model).__mro__[2] if hasattr(model, "_horizon") else type(model)
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder, dtype=torch.float32).state_dict()


def varlen(subject: Subject) -> Outcome:
    """``attn_implementation="varlen"`` on padded rows: tokens that are trained are as without it."""
    plain = subject.plain
    model = subject.stream(head="whole", attn_implementation="varlen")
    outcome = judge_step(train_step(model, subject.batch()), plain, exact=False)
    return outcome


def default_precision(subject: Subject) -> Outcome:
    """One step in ``fp32_master``."""
    plain = subject.plain
    model = horizon_lm.stream(subject.copy())
    optimizer = horizon_lm.AdamW(model, **ADAMW)
    step = train_step(model, subject.batch())
    optimizer.step()
    optimizer.zero_grad()
    model.state_dict()
    off = relative(step.loss, plain.loss)
    return Outcome("right" if off <= 2e-2 else "wrong", f"loss {off:.1e}")


CASES: dict[str, Callable[[Subject], Outcome]] = {
    case.__name__: case
    for case in (
        whole, default, micro_batches, default_micro_batches, accumulation, evaluation, hidden_states, generate, adamw,
        update_in_backward, save, varlen, default_precision,
    )
}  # fmt: skip


def run_case(subject: Subject, name: str) -> Outcome:
    """Run a case, whatever it raises."""
    try:
        return CASES[name](subject)
    except CannotBuildError as error:
        return Outcome("cannot_build", str(error))
    except PlainFailsError as error:
        return _without_plain(subject, error)
    except REJECTIONS as error:
        return Outcome("rejected", f"{type(error).__name__}: {first_sentence(error)}")
    except Exception as error:
        return Outcome("crashed", describe(error))


def _without_plain(subject: Subject, error: Exception) -> Outcome:
    """There is nothing to compare with; a model that is rejected all the same counts as rejected."""
    try:
        subject.stream(head="whole")
    except REJECTIONS as rejection:
        return Outcome("rejected", f"{type(rejection).__name__}: {first_sentence(rejection)}")
    except Exception as crash:
        return Outcome("crashed", describe(crash))
    return Outcome("plain_fails", str(error))


def first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def describe(error: BaseException) -> str:
    """An exception with the last places in transformers and in Horizon-LM that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    places = []
    for package in ("transformers", "horizon_lm"):
        inside = [f for f in frames if f"/{package}/" in f.filename]
        if inside:
            name = re.sub(rf".*/{package}/", f"{package}/", inside[-1].filename)
            places.append(f"{name}:{inside[-1].lineno}")
    return f"{type(error).__name__}: {first_sentence(error)[:300]} [{', '.join(places)}]"
