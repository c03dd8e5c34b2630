"""Cases on text; each compares one feature with plain Hugging Face."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import horizon_lm
from horizon_lm.errors import StreamingError
from tests.census.comparison import TOLERANCE, Outcome, Step, compare_step, gradients, relative, train_step
from tests.census.inputs import prompts
from tests.census.overrides import SAMPLE_IN_TRAINING
from tests.census.subject import PlainFailsError, Subject, describe, first_sentence

Batch = dict[str, torch.Tensor]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}  # a small eps would amplify rounding differences


def whole(subject: Subject) -> Outcome:
    plain = subject.plain
    require_causal(subject)
    return compare_step(train_step(subject.stream(head="whole"), subject.batch()), plain, exact=True, logits=True)


def require_causal(subject: Subject) -> None:
    """Raise PlainFailsError if a language model sees later tokens, so that training would teach it to copy its labels."""
    if subject.mapping not in ("causal", "image_text"):
        return
    batch, logits = subject.batch(), []
    ids = batch["input_ids"]  # (B, T)
    seen, other = ids.shape[1] // 2, ids.clone()
    other[:, seen:] = ids[:, seen:].flip(0)
    model = subject.copy()
    with torch.no_grad():
        for each in (ids, other):
            torch.manual_seed(7)
            logits.append(model(**batch | {"input_ids": each}, use_cache=False).logits[:, :seen])
    if (off := relative(logits[1], logits[0])) > 10 * TOLERANCE:
        raise PlainFailsError(f"later tokens change the logits of earlier ones by {off:.1e}")


def default(subject: Subject) -> Outcome:
    """Compare a step with the default settings. The detail begins with the head that was used."""
    plain, model = subject.plain, subject.stream()
    outcome = compare_step(train_step(model, subject.batch()), plain, exact=False)
    return Outcome(outcome.status, f"{model._horizon.engine.options.head}: {outcome.detail}")


def micro_batches(subject: Subject) -> Outcome:
    return _in_micro_batches(subject, head="whole")


def default_micro_batches(subject: Subject) -> Outcome:
    return _in_micro_batches(subject)


def _in_micro_batches(subject: Subject, **settings: Any) -> Outcome:
    """Compare a step with one row at a time. A model that draws random numbers is in eval mode, as it draws per
    micro-batch.
    """
    subject.plain  # noqa: B018
    plain, streamed = subject.copy(), subject.stream(device_micro_batch_size=1, **settings)
    for model in (plain, streamed):
        model.train(subject.model_type not in SAMPLE_IN_TRAINING)
    theirs = train_step(plain, subject.batch(), use_cache=False)
    return compare_step(train_step(streamed, subject.batch()), theirs, exact=False)


def accumulation(subject: Subject) -> Outcome:
    """Compare the sum of the gradients of two backward calls."""
    subject.plain  # noqa: B018  (plain Hugging Face can do this)
    return compare_accumulation(subject, subject.batch(seed=1), subject.batch(seed=2))


def compare_accumulation(subject: Subject, *batches: Batch) -> Outcome:
    def both(model: Any, **options: Any) -> Step:
        steps = [train_step(model, batch, **options) for batch in batches]
        return Step(torch.stack([step.loss for step in steps]).sum(), None, steps[-1].grads)

    return compare_step(both(subject.stream(head="whole")), both(subject.copy(), use_cache=False), exact=False)


def evaluation(subject: Subject) -> Outcome:
    """Compare the loss in eval mode with the default head, and the logits without labels."""
    subject.plain  # noqa: B018
    return compare_evaluation(subject, subject.batch())


def compare_evaluation(subject: Subject, batch: Batch) -> Outcome:
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
    """Compare all hidden states, and the gradients through the last one, with the default head."""
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
    return compare_step(ours, theirs, exact=False)


def generate(subject: Subject) -> Outcome:
    """Compare greedily generated tokens after prompts padded on the left."""
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    batch = prompts(subject.model_type)

    def tokens(model: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return model.eval().generate(**batch, **options)

    try:
        theirs = tokens(subject.copy())
    except Exception as error:
        raise PlainFailsError(describe(error)) from error
    try:
        ours = tokens(subject.stream())
    except StreamingError as error:  # the model generates with a part of itself
        if type(error) is not StreamingError:
            raise
        return Outcome("rejected", f"StreamingError: {first_sentence(error)}")
    if torch.equal(ours, theirs):
        return Outcome("right", "the same tokens")
    return Outcome("wrong", f"{ours[:, -6:].tolist()} instead of {theirs[:, -6:].tolist()}")


def adamw(subject: Subject) -> Outcome:
    """Compare three optimizer steps. Parameters without a gradient must not change."""
    return compare_adamw(subject, [subject.plain], [subject.batch(seed) for seed in (1, 2, 3)])


def update_in_backward(subject: Subject) -> Outcome:
    return compare_adamw(subject, [subject.plain], [subject.batch(seed) for seed in (1, 2, 3)], update_in_backward=True)


def compare_adamw(subject: Subject, steps: Sequence[Step], batches: Sequence[Batch], **settings: Any) -> Outcome:
    """Compare optimizer steps. ``steps``: of the plain model, on batches that reach all parameters that get gradients."""
    unused = [name for name in steps[0].grads if all(step.grads[name] is None for step in steps)]
    before, plain = subject.model.state_dict(), subject.copy()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **ADAMW)
    streamed = subject.stream(head="whole")
    ours = horizon_lm.AdamW(streamed, **ADAMW, **settings)
    for batch in batches:
        for model, each, options in ((plain, optimizer, {"use_cache": False}), (streamed, ours, {})):
            torch.manual_seed(7)
            model(**batch, **options).loss.backward()  # update_in_backward keeps no gradients to compare
            each.step()
            each.zero_grad()
    weights, our_weights = plain.state_dict(), {n: w.clone() for n, w in streamed.state_dict().items()}
    moved = [name for name in unused if not torch.equal(our_weights[name], before[name])]
    if moved:
        return Outcome(
            "wrong", f"{len(moved)} of {len(unused)} parameters without a gradient moved, {moved[0]} for one"
        )
    off = {n: relative(our_weights[n], w) for n, w in weights.items() if w.is_floating_point()}
    worst = max(off, key=lambda n: off[n])
    if all(torch.equal(our_weights[n], w) for n, w in weights.items()):
        return Outcome("right", f"bit for bit, {len(unused)} parameters without a gradient")
    return Outcome("close" if off[worst] <= TOLERANCE else "wrong", f"{worst} is off by {off[worst]:.1e}")


def save(subject: Subject) -> Outcome:
    """Compare the weights of a plain model loaded from a folder saved by a streamed model."""
    require_exact_save(subject)
    original, ours = subject.model.state_dict(), reload(subject, subject.stream()).state_dict()
    different = [n for n, w in original.items() if n not in ours or not torch.equal(w, ours[n])]
    if different:
        return Outcome("wrong", f"{len(different)} of {len(original)} tensors differ, {different[0]} for one")
    return Outcome("right", f"{len(original)} tensors")


def require_exact_save(subject: Subject) -> None:
    """Raise PlainFailsError if plain Hugging Face does not load what it saved."""
    try:
        theirs = reload(subject, subject.copy()).state_dict()
    except Exception as error:
        raise PlainFailsError(describe(error)) from error
    original = subject.model.state_dict()
    lossy = [n for n, w in theirs.items() if not torch.equal(w, original[n])]
    if lossy:
        raise PlainFailsError(
            f"plain Hugging Face loads {len(lossy)} tensors otherwise than it saved them, {lossy[0]} for one"
        )


def reload(subject: Subject, model: Any) -> Any:
    """Save a plain or a streamed model, and return the plain model that is loaded from its folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(subject.model).from_pretrained(folder, dtype=torch.float32)


def varlen(subject: Subject) -> Outcome:
    """Compare trained tokens with ``attn_implementation="varlen"`` on padded rows with those without varlen."""
    plain = subject.plain
    model = subject.stream(head="whole", attn_implementation="varlen")
    outcome = compare_step(train_step(model, subject.batch()), plain, exact=False)
    return outcome


def default_precision(subject: Subject) -> Outcome:
    """Compare one step in ``fp32_master`` with plain Hugging Face on bf16 weights.

    A router may send tokens to other experts if its weights are rounded, so both models round the same weights: all but those
    that transformers keeps in float32.
    """
    subject.plain  # noqa: B018
    model = subject.stream(precision="fp32_master")
    rounded = subject.copy()
    with torch.no_grad():
        for own, param in zip(model.parameters(), rounded.parameters(), strict=True):
            param.copy_(param.to(own.dtype))
    plain = train_step(rounded, subject.batch(), use_cache=False)
    optimizer = horizon_lm.AdamW(model, **ADAMW)
    step = train_step(model, subject.batch())
    optimizer.step()
    optimizer.zero_grad()
    model.state_dict()
    off = relative(step.loss, plain.loss)
    return Outcome("right" if off <= 1e-3 else "wrong", f"loss {off:.1e}")
