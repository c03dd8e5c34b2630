"""The optimizer equals torch.optim.AdamW, in every precision mode as far as the mode allows."""

import copy
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ConfigError, NonFiniteError
from tests import families

HYPER = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def run(model: Any, optimizer: Any, num_steps: int, clip: float | None = None, backwards: int = 1) -> None:
    for step in range(num_steps):
        for part in range(backwards):
            model(**families.batch(seed=10 * step + part), use_cache=False).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def masters(model: Any) -> dict[str, torch.Tensor]:
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return {name: store.master(name).clone() for name in store.unit_of}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backwards", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_equals_torch_in_float32(clip: float | None, backwards: int, tied: bool) -> None:
    reference = families.build("llama", tie_word_embeddings=tied)
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")
    run(reference, torch.optim.AdamW(reference.parameters(), **HYPER), 5, clip, backwards)
    run(model, horizon_lm.AdamW(model, max_grad_norm=clip, **HYPER), 5, None, backwards)
    for name, theirs in reference.named_parameters():
        movement = (theirs - start[name]).norm()
        assert (masters(model)[name] - theirs).norm() < 1e-5 * movement, name


def test_fp32_master_is_an_exact_float32_master() -> None:
    """The same gradients give the same bits as an optimizer whose weights are plain float32."""
    reference = families.build("llama")
    split = horizon_lm.stream(copy.deepcopy(reference), precision="fp32_master", head="whole")
    plain = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")
    optimizers = [horizon_lm.AdamW(m, max_grad_norm=0.3, **HYPER) for m in (split, plain)]
    for step in range(10):
        split(**families.batch(seed=step)).loss.backward()
        for param in plain.parameters():
            param.grad = None
        plain(**families.batch(seed=step)).loss.backward()
        for ours, other in zip(split.parameters(), plain.parameters(), strict=True):
            other.grad.copy_(ours.grad)  # the bf16 gradients, in both
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, master in masters(split).items():
        assert torch.equal(master, masters(plain)[name]), name
        assert torch.equal(split.get_parameter(name), master.to(torch.bfloat16)), name


def test_bf16_follows_float32_on_average() -> None:
    reference = families.build("llama")
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    model = horizon_lm.stream(copy.deepcopy(reference), precision="bf16", head="whole")
    hyper = HYPER | {"lr": 1e-4}  # far below the distance of two bf16 weights
    run(model, horizon_lm.AdamW(model, **hyper), 20)
    run(reference, torch.optim.AdamW(reference.parameters(), **hyper), 20)
    name = "model.layers.1.mlp.up_proj.weight"
    expected = (reference.get_parameter(name) - start[name]).flatten()
    got = (masters(model)[name] - start[name].to(torch.bfloat16).float()).flatten()
    slope = (got @ expected / (expected @ expected)).item()
    assert 0.8 < slope < 1.2


def test_schedulers_and_groups() -> None:
    reference = families.build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")

    def groups(m: Any) -> list[dict[str, Any]]:
        decay = [p for n, p in m.named_parameters() if p.ndim > 1]
        rest = [p for n, p in m.named_parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]

    theirs = torch.optim.AdamW(groups(reference), **HYPER)
    ours = horizon_lm.AdamW(model, params=groups(model), **HYPER)
    for each, optimizer in ((reference, theirs), (model, ours)):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
        for step in range(4):
            each(**families.batch(seed=step), use_cache=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(masters(model)[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_state_dict_goes_on_where_it_was() -> None:
    def fresh() -> tuple[Any, Any]:
        model = horizon_lm.stream(families.build("llama"), precision="float32", head="whole")
        return model, horizon_lm.AdamW(model, **HYPER)

    model, optimizer = fresh()
    run(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    run(model, optimizer, 2)
    other, other_optimizer = fresh()
    other.load_state_dict(saved[1])
    other_optimizer.load_state_dict(saved[0])
    run(other, other_optimizer, 2)
    for name, master in masters(model).items():
        assert torch.equal(masters(other)[name], master), name


def test_the_norm_is_of_the_gradients_as_stored() -> None:
    model = horizon_lm.stream(families.build("llama"), precision="fp32_master")
    optimizer = horizon_lm.AdamW(model, max_grad_norm=0.1)
    model(**families.batch()).loss.backward()
    expected = torch.cat([p.grad.float().flatten() for p in model.parameters()]).double().norm()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_reaches_no_weight(value: float) -> None:
    model = horizon_lm.stream(families.build("llama"))
    optimizer = horizon_lm.AdamW(model, max_grad_norm=1.0)
    before = masters(model)
    model(**families.batch()).loss.backward()
    model.model.layers[1].mlp.up_proj.weight.grad[3, 4] = value
    with pytest.raises(NonFiniteError, match="block1"):
        optimizer.step()
    assert all(torch.equal(before[name], after) for name, after in masters(model).items())
    optimizer.zero_grad()
    run(model, optimizer, 1)
    assert not all(torch.equal(before[name], after) for name, after in masters(model).items())


def test_bad_settings() -> None:
    model = horizon_lm.stream(families.build("llama"))
    with pytest.raises(ConfigError, match="out of range"):
        horizon_lm.AdamW(model, lr=-1)
    with pytest.raises(ConfigError, match="max_grad_norm"):
        horizon_lm.AdamW(model, max_grad_norm=0)
    with pytest.raises(ConfigError, match="streamed model"):
        horizon_lm.AdamW(families.build("llama"))
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        horizon_lm.AdamW(horizon_lm.stream(_frozen()))


def _frozen() -> Any:
    return families.build("llama").requires_grad_(False)
