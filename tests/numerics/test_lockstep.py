"""Batches that are computed together, unit by unit, equal batches that plain autograd computes one after the other."""

import copy
import itertools
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import EMBED, HEAD
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import TokenError
from tests.support.gradients import assert_close_gradients, gradients, losses_together, without_dropout
from tests.support.thinned_cases import covering, thinned
from tests.support.tiny_models import FAMILIES, batch, build


def batches(vary: bool = True) -> list[dict[str, torch.Tensor]]:
    """Three batches of different shapes and paddings."""
    parts = [batch(padding="left"), batch(padding="right"), batch(padding="left")]
    if vary:
        parts[1] = {name: value[:2] for name, value in parts[1].items()}
        parts[2] = {name: value[:1, -7:] for name, value in parts[2].items()}
    return parts


def plain_losses(model: Any, parts: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for part in parts:
        loss = model(**part, use_cache=False).loss / len(parts)
        loss.backward()
        losses.append(loss.item())
    return losses


def exactly_summed(model: Any) -> set[str]:
    """The parameters whose gradients are summed in the order of plain accumulation.

    Autograd sums those of the outer parameters in another order, and the parts of a tied weight are summed one after the
    other.
    """
    engine = model._horizon.engine
    units = {unit for unit in engine.store.units if unit.is_block}
    units |= set() if engine.parts.tied else {EMBED, HEAD}
    return {name for unit in units for name in engine.store.units[unit].layout}


def loads(model: Any) -> dict[str, float]:
    moved, units = model._horizon.engine.device.counters.moved, model._horizon.engine.store.units
    # With weights that are kept in float32.
    size = {str(unit): sum(slab.weights.nbytes for slab in slabs.of_weights) for unit, slabs in units.items()}
    return {op: count / size[op.split(":")[1]] for op, count in moved.items() if op.startswith("stream_in:block")}


@pytest.mark.parametrize(("family", "head"), covering(FAMILIES, ("whole", "chunked")))
def test_equal_to_plain_accumulation(family: str, head: str) -> None:
    reference = without_dropout(build(family))
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head=head, check_recompute=True)
    expected, got = plain_losses(reference, batches()), losses_together(model, batches())
    if head == "whole":
        assert got == expected
        ours, theirs = gradients(model), gradients(reference)
        assert not [name for name in exactly_summed(model) if not torch.equal(ours[name], theirs[name])]
    else:
        assert got == pytest.approx(expected, rel=1e-6)
    assert_close_gradients(model, reference, 1e-6 if head == "whole" else 1e-4)
    assert set(loads(model).values()) <= {1, 2}


VARIANTS: dict[str, dict[str, Any]] = {
    "checkpoints on the host": {"activation_checkpoints": "host"},
    "rows split further": {"device_micro_batch_size": 1},
    "two rows, on the host": {"device_micro_batch_size": 2, "activation_checkpoints": "host", "head_chunk_tokens": 5},
    "resident weights": {"resident_blocks": 2},
    "kept graphs": {"resident_blocks": 2, "resident_graphs": 1},
}


@pytest.mark.parametrize(
    ("name", "family", "device"),
    thinned(itertools.product(VARIANTS, ["llama", "gpt2", "mixtral"], ["cpu", "simulated"]), every=5),
)
def test_settings(name: str, family: str, device: str) -> None:
    reference = without_dropout(build(family))
    model = horizon_lm.stream(copy.deepcopy(reference), device, precision="float32", **VARIANTS[name])
    for _ in range(2):  # the second step uses the buffers of the first
        reference.zero_grad()
        model.zero_grad()
        expected, got = plain_losses(reference, batches()), losses_together(model, batches())
        assert got == pytest.approx(expected, rel=1e-6)
        assert_close_gradients(model, reference)


@pytest.mark.parametrize(("seed", "precision"), covering(range(3), ("fp32_master", "bf16")))
def test_order_of_copies_changes_nothing(seed: int, precision: str) -> None:
    """On a simulated device that reorders whatever the waits permit."""

    def train(device: Any) -> list[Any]:
        model = horizon_lm.stream(build("llama"), device, precision=precision, activation_checkpoints="host")
        optimizer, losses = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=1.0), []
        for _ in range(3):
            losses += losses_together(model, batches())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(**batch()).loss.item())
        return losses

    assert train(SimulatedDevice(seed, eagerness=0.5, pieces=2)) == train("cpu")


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_log_probabilities(head: str) -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head=head)

    def logprobs(part: dict[str, torch.Tensor]) -> Any:
        return horizon_lm.token_logprobs(model, temperature=0.7, statistics=("entropy",), **part)

    expected = [logprobs(part) for part in batches()]
    sum(3 * each.logprobs.sum() + each.entropy.sum() for each in expected).backward()
    wanted = gradients(model)
    model.zero_grad()
    got = horizon_lm.run_together([lambda part=part: logprobs(part) for part in batches()])
    sum(3 * each.logprobs.sum() + each.entropy.sum() for each in got).backward()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.logprobs, b.logprobs)
        assert torch.equal(a.entropy, b.entropy)
    for name, gradient in gradients(model).items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm()


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_different_gradients_of_the_losses(head: str) -> None:
    """As of a trainer that weighs its batches, and leaves one of them out."""
    reference = build("qwen2")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head=head)
    losses = horizon_lm.run_together([lambda part=part: model(**part).loss for part in batches()])
    (2 * losses[0] - 0.5 * losses[2]).backward()
    (2 * reference(**batches()[0]).loss - 0.5 * reference(**batches()[2]).loss).backward()
    assert_close_gradients(model, reference)


def test_batches_are_not_cut() -> None:
    """Also if the first tensor of a call, the positions, has one row for all rows of the batch."""
    model = horizon_lm.stream(build("llama"), precision="float32")
    hidden, labels = torch.randn(3, 7, model.config.hidden_size), torch.arange(21).view(3, 7)
    part = {"inputs_embeds": hidden, "position_ids": torch.arange(7)[None], "labels": labels}
    losses_together(model, [part, part])
    assert model._horizon.engine.options.rows_at_once(3) == 3


def test_each_block_is_loaded_once_for_all_batches() -> None:
    model = horizon_lm.stream(build("llama", num_hidden_layers=5), precision="float32")
    parts = batches() * 3
    losses_together(model, parts)
    # The last block's weights are still in their slot when its backward pass begins.
    assert sum(loads(model).values()) <= 10
    assert horizon_lm.stats(model)["block_forward_rows"] == 2 * 5 * sum(len(part["input_ids"]) for part in parts)


def test_dropout_is_replayed() -> None:
    """With `check_recompute`, an output that is recomputed with other random numbers is an error."""
    reference = build("gpt2", resid_pdrop=0.3, attn_pdrop=0.2, embd_pdrop=0.1)
    model = horizon_lm.stream(reference, precision="float32", check_recompute=True)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(losses_together(model, batches()))
    assert found[0] == found[1]
    assert len(set(losses_together(model, [batch()] * 3))) == 3  # each batch draws its own numbers


def test_no_gradients() -> None:
    model = horizon_lm.stream(build("llama"), precision="float32", head="whole")
    expected = [model(**part).logits for part in batches()]
    with torch.no_grad():
        got = horizon_lm.run_together([lambda part=part: model(**part).logits for part in batches()])
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, expected, strict=True))


def test_autocast() -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = plain_losses(reference, batches()), losses_together(model, batches())
    assert got == expected
    ours, theirs = gradients(model), gradients(reference)
    assert not [name for name in exactly_summed(model) if not torch.equal(ours[name], theirs[name])]


def test_update_in_backward() -> None:
    reference = build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32")
    ours = horizon_lm.AdamW(model, lr=1e-3, update_in_backward=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for _ in range(3):
        assert losses_together(model, batches()) == pytest.approx(plain_losses(reference, batches()), rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def test_an_error_in_one_batch_leaves_the_model_usable() -> None:
    model = horizon_lm.stream(build("llama"), precision="float32")
    expected = losses_together(model, batches())
    model.zero_grad()
    wrong = batches()
    wrong[1]["input_ids"] = wrong[1]["input_ids"] + 1000
    with pytest.raises(TokenError, match="input_ids contains"):
        losses_together(model, wrong)
    assert losses_together(model, batches()) == expected


def test_calls_of_different_kinds_are_computed_in_passes_of_their_own() -> None:
    model = horizon_lm.stream(build("llama"), precision="float32")
    first, second, third = batches()
    expected = [model(**first).loss.item(), model(**second).loss.item()]
    logprobs = horizon_lm.token_logprobs(model, **third).logprobs
    a, b, c = horizon_lm.run_together(
        [
            lambda: model(**first).loss,
            lambda: horizon_lm.token_logprobs(model, **third).logprobs,
            lambda: model(**second).loss,
        ]
    )
    assert [a.item(), c.item()] == expected
    assert torch.equal(b, logprobs)


def test_captured_outputs_and_hooks() -> None:
    """Each batch gets its own router logits, and hooks see the batches one after the other."""
    model = horizon_lm.stream(build("mixtral"), precision="float32")
    seen: list[torch.Size] = []
    block = model.model.layers[1]
    block.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:2]))
    expected = [model(**part) for part in batches()]
    seen.clear()
    got = horizon_lm.run_together([lambda part=part: model(**part) for part in batches()])
    assert seen == [part["input_ids"].shape for part in batches()]
    for a, b in zip(got, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.router_logits, b.router_logits, strict=True))
        assert torch.equal(a.loss, b.loss)


def test_gradient_check_of_several_batches() -> None:
    model = horizon_lm.stream(build("llama"), precision="float32")
    model._horizon.check_gradients(3)
    losses_together(model, batches())


def without_targets() -> dict[str, torch.Tensor]:
    part = batch()
    return part | {"labels": torch.full_like(part["labels"], -100)}


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_a_batch_without_targets_alone_is_that_of_plain_autograd(head: str) -> None:
    """The loss is 0 / 0, but the gradients are zero, so whoever looks at gradients alone does not notice."""
    plain = build("llama")
    expected = plain(**without_targets(), use_cache=False).loss
    expected.backward()
    model = horizon_lm.stream(copy.deepcopy(plain), precision="float32", head=head)
    for arguments in ({}, {"num_items_in_batch": 0}):
        (loss,) = horizon_lm.run_together([lambda arguments=arguments: model(**without_targets(), **arguments).loss])
        loss.backward()
        assert loss.isnan()
        assert expected.isnan()
        assert_close_gradients(model, plain, 0.0)
        model.zero_grad()


@pytest.mark.parametrize("head", ["whole", "chunked"])
def test_a_batch_without_targets_beside_others_changes_nothing(head: str) -> None:
    """Of a step with accumulation, whose losses are divided by the targets of all its batches."""
    model = horizon_lm.stream(build("llama"), precision="float32", head=head)
    items = int((batch()["labels"][:, 1:] != -100).sum())
    found = []
    for parts in ([batch()], [without_targets(), batch()], [batch(), without_targets()]):
        losses = [lambda part=part: model(**part, num_items_in_batch=items).loss for part in parts]
        sum(horizon_lm.run_together(losses)).backward()
        found.append(gradients(model))
        model.zero_grad()
        for part in parts:  # one backward call for each
            model(**part, num_items_in_batch=items).loss.backward()
        found.append(gradients(model))
        model.zero_grad()
    for other in found[1:]:
        assert all(torch.equal(each, found[0][name]) for name, each in other.items())
