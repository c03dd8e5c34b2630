"""Laws of each optimizer: precisions and kinds of moments keep what they promise, and what is wrong is named."""

from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.optimizers import MOMENT_BYTES, OPTIMIZERS, OptimizerEntry
from horizon_lm.errors import ConfigError, NonFiniteError, NonFiniteWarning, StreamingError
from horizon_lm.optim.grad_norm import clip_factor
from tests.support import tiny_models
from tests.support.training_steps import masters, same, train

EACH = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)


def opened(entry: OptimizerEntry, precision: str = "float32", **options: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(tiny_models.build("llama"), precision=precision)
    return model, getattr(horizon_lm, entry.name)(model, **{"lr": 1e-3, "weight_decay": 0.1} | options)


def give_gradients(model: Any, seed: int) -> None:
    """Replace the gradients by random ones, which bfloat16 holds exactly."""
    model(**tiny_models.batch()).loss.backward()
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad.copy_(torch.randn(param.shape, generator=generator).bfloat16())


@EACH
def test_fp32_master_is_an_exact_float32_master(entry: OptimizerEntry) -> None:
    """The same gradients give the same bits as weights in float32, and the model shows the nearest bfloat16 value."""
    models = [opened(entry, precision, max_grad_norm=0.3) for precision in ("fp32_master", "float32")]
    for model, optimizer in models:
        for seed in range(5):
            give_gradients(model, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert same(models[0][0], models[1][0])
    for name, master in masters(models[0][0]).items():
        high = (master.view(torch.int32) + 0x8000) >> 16  # ties go away from zero
        shown = models[0][0].get_parameter(name).detach()
        assert torch.equal(shown.view(torch.int16), high.to(torch.int16)), name


@pytest.mark.parametrize("norm", [1e-8, 0.05, 0.3, 0.31, 40.0])
def test_gradients_are_clipped_by_the_factor_of_torch(norm: float) -> None:
    """Also where the norm is below the limit, so that nothing is scaled."""
    grad = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    grad.grad = torch.full_like(grad, norm)
    torch.nn.utils.clip_grad_norm_([grad], 0.3)
    assert norm * clip_factor(norm, 0.3) == pytest.approx(float(grad.grad), rel=1e-15, abs=0)


@EACH
def test_a_limit_above_the_norm_of_the_gradients_changes_no_bit(entry: OptimizerEntry) -> None:
    trained = [opened(entry, max_grad_norm=limit) for limit in (None, 1e9)]
    for model, optimizer in trained:
        train(model, optimizer, (0, 1))
    assert same(*(model for model, _ in trained))


@EACH
def test_bf16_follows_float32_on_average(entry: OptimizerEntry) -> None:
    """Although each step is far below the spacing of bf16 weights."""
    moved = []
    start: dict[str, torch.Tensor] = {}
    for precision in ("bf16", "float32"):
        model, optimizer = opened(entry, precision, lr=1e-4, weight_decay=0.0)
        if start:
            model.load_state_dict(start)
        start = masters(model)
        for seed in range(20):
            give_gradients(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        name = "model.layers.1.mlp.up_proj.weight"
        moved.append((masters(model)[name] - start[name]).flatten())
    got, expected = moved
    assert 0.8 < (got @ expected / (expected @ expected)).item() < 1.2


@EACH
@pytest.mark.parametrize("moments", [kind for kind in MOMENT_BYTES if kind != "float32"])
def test_smaller_moments_train_like_float32(entry: OptimizerEntry, moments: str) -> None:
    losses = []
    for kind in ("float32", moments):
        model, optimizer = opened(entry, "fp32_master", moments=kind, weight_decay=0.0)
        losses.append(train(model, optimizer, [step % 3 for step in range(24)]))
    full, few = losses
    assert full[-1] < full[0] - 0.3
    assert few[-1] == pytest.approx(full[-1], abs=0.05 * (full[0] - full[-1]))


@EACH
@pytest.mark.parametrize("moments", MOMENT_BYTES)
def test_moments_take_the_bytes_of_the_table(entry: OptimizerEntry, moments: str) -> None:
    """Each moment of a parameter, and no more: in 8 bits with a scale for each block of 256."""
    model, optimizer = opened(entry, moments=moments)
    store = model._horizon.engine.store
    matrices = set(model._horizon.engine.parts.hidden_matrices())
    for name, param in model.named_parameters():
        found = {key: value for key, value in optimizer.state[param].items() if key != "step"}
        values = [value for key, value in found.items() if not key.endswith("_scale")]
        count = 1 if entry.orthogonalizes and name in matrices else entry.num_moments
        assert [each.nbytes for each in values] == [MOMENT_BYTES[moments] * param.numel()] * count, name
        assert len(found) - len(values) == (count if moments == "8bit" else 0)
    assert store.num_bytes["moments"] > 0


# What is wrong is named


@EACH
def test_settings_out_of_range_are_named(entry: OptimizerEntry) -> None:
    model, optimizer = opened(entry)
    wrong: dict[str, list[Any]] = {"lr": [-1, float("nan"), None], "betas": [(0.9,), 0.9, (0.9, 1.0)]}
    wrong |= {name: [float("inf"), -1.0] for name in optimizer.defaults if name not in wrong}
    for name in {*optimizer.rule.decay_rates} - {"betas"}:
        wrong[name] += [1.0]
    for name in optimizer.defaults:
        for value in wrong[name]:
            with pytest.raises(ConfigError, match=f"{name}=.*out of range"):
                getattr(horizon_lm, entry.name)(model, **{name: value})
    for norm in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_grad_norm"):
            getattr(horizon_lm, entry.name)(model, max_grad_norm=norm)
    for name, value in (("moments", "4bit"), ("non_finite", "ignore"), ("max_consecutive_skips", 0)):
        with pytest.raises(ConfigError, match=f"{name}.*{value}"):
            getattr(horizon_lm, entry.name)(model, **{name: value})


@EACH
def test_a_state_out_of_range_is_named(entry: OptimizerEntry) -> None:
    model, optimizer = opened(entry)
    train(model, optimizer, (0,))
    for name in optimizer.defaults:
        state = optimizer.state_dict()
        groups = [{**state["param_groups"][0], name: (0.9, 1.0) if name == "betas" else -1.0}]
        with pytest.raises(ConfigError, match="out of range"):
            optimizer.load_state_dict(state | {"param_groups": groups})


@EACH
def test_models_that_cannot_be_trained_are_named(entry: OptimizerEntry) -> None:
    optimizer = getattr(horizon_lm, entry.name)
    with pytest.raises(ConfigError, match="streamed model") as caught:
        optimizer(tiny_models.build("llama"))
    assert f"horizon_lm.{entry.name}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"frozen|trains none"):
        optimizer(horizon_lm.stream(tiny_models.build("llama").requires_grad_(False)))


@EACH
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_updates_no_weight(entry: OptimizerEntry, value: float) -> None:
    for options, expected in (({}, pytest.raises(NonFiniteError, match="block1")),
                              ({"non_finite": "skip"}, pytest.warns(NonFiniteWarning, match="block1"))):  # fmt: skip
        model, optimizer = opened(entry, max_grad_norm=1.0, **options)
        before = masters(model)
        model(**tiny_models.batch()).loss.backward()
        model.model.layers[1].mlp.up_proj.weight.grad[3, 4] = value
        with expected:
            optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped) == (0, len(options))
        assert all(torch.equal(before[name], after) for name, after in masters(model).items())
        optimizer.zero_grad()
        train(model, optimizer, (0,))
        assert not any(torch.equal(before[name], after) for name, after in masters(model).items())
        assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@EACH
def test_updates_in_the_backward_pass_keep_no_gradients(entry: OptimizerEntry) -> None:
    if not entry.updates_in_backward:
        with pytest.raises(ConfigError, match="use it without update_in_backward"):
            opened(entry, update_in_backward=True)
        return
    for options in ({"max_grad_norm": 1.0}, {"non_finite": "skip"}):
        with pytest.raises(ConfigError, match="update_in_backward"):
            opened(entry, update_in_backward=True, **options)
    model, optimizer = opened(entry, update_in_backward=True)
    model(**tiny_models.batch()).loss.backward()
    with pytest.raises(StreamingError, match="does not keep them"):
        _ = model.lm_head.weight.grad
    optimizer.step()
    assert horizon_lm.stats(model)["host_bytes_by_kind"].get("grads", 0) == 0


@EACH
def test_a_state_of_other_moments_is_rejected(entry: OptimizerEntry) -> None:
    """Of another kind, or of another optimizer; nothing is loaded then."""
    model, optimizer = opened(entry, moments="float32")
    train(model, optimizer, (0,))
    before = masters(model)
    others = [opened(entry, moments="8bit")]
    others += [opened(each) for each in OPTIMIZERS.values()]
    for other, foreign in others:
        same_moments = foreign.rule.moments == optimizer.rule.moments and foreign.moments.kind == optimizer.moments.kind
        if same_moments and foreign.defaults.keys() == optimizer.defaults.keys():
            continue  # the same optimizer, or one whose state is the same
        train(other, foreign, (0,))
        with pytest.raises(ConfigError, match=r"other moments than 'float32'|is not from an? "):
            optimizer.load_state_dict(foreign.state_dict())
    assert all(torch.equal(before[name], after) for name, after in masters(model).items())
