"""The optimizer's state is restored exactly, also from torch's AdamW; a state that does not fit changes nothing."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ConfigError
from tests.support import tiny_models
from tests.support.training_steps import masters

HYPER = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def ours(precision: str = "float32", plain: Any = None, **options: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(plain or tiny_models.build("llama"), precision=precision, head="whole")
    return model, horizon_lm.AdamW(model, **HYPER | options)


def theirs(plain: Any = None, **options: Any) -> tuple[Any, Any]:
    model = plain or tiny_models.build("llama")
    return model, torch.optim.AdamW(model.parameters(), **HYPER | options)


def steps(model: Any, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        model(**tiny_models.batch(seed=seed), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(*parts: Any) -> list[Any]:
    """Save a state to a file and load it, like a checkpoint."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, two[name]) for name, value in one.items())


# To and from torch


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "neither"])
def test_training_continues_from_torch_adamw(options: dict[str, Any]) -> None:
    reference, reference_optimizer = theirs(**options)
    steps(reference, reference_optimizer, 1, 2, 3)
    model, optimizer = ours(plain=copy.deepcopy(reference))
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    assert not {"foreach", "fused", "amsgrad", "maximize"} & optimizer.param_groups[0].keys()
    steps(reference, reference_optimizer, 4, 5)
    steps(model, optimizer, 4, 5)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(masters(model)[name], param.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_torch_adamw_continues_from_our_state(options: dict[str, Any]) -> None:
    model, optimizer = ours()
    steps(model, optimizer, 1, 2, 3)
    model_state, state = saved(model, optimizer)
    reference, reference_optimizer = theirs(lr=1.0, **options)
    reference.load_state_dict(model_state)
    reference_optimizer.load_state_dict(state)
    steps(model, optimizer, 4, 5)
    steps(reference, reference_optimizer, 4, 5)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(masters(model)[name], param.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_moments_are_loaded_from_any_floating_dtype(moments: str, dtype: torch.dtype) -> None:
    reference, reference_optimizer = theirs()
    steps(reference, reference_optimizer, 1, 2)
    state = copy.deepcopy(reference_optimizer.state_dict())
    for entry in state["state"].values():
        entry.update({key: entry[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}, step=int(entry["step"]))
    model, optimizer = ours(plain=reference, moments=moments)
    optimizer.load_state_dict(state)
    for param, entry in zip(model.parameters(), state["state"].values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            own = optimizer.state[param][key]
            assert torch.equal(own, entry[key].to(own.dtype))
        assert optimizer.state[param]["step"] == 2


def test_a_parameter_without_torch_state_starts_fresh() -> None:
    """torch creates the state of a parameter with its first gradient."""
    reference, reference_optimizer = theirs()
    model, optimizer = ours(plain=copy.deepcopy(reference))
    steps(model, optimizer, 8, 9)
    for seed in (1, 2):
        reference(**tiny_models.batch(seed=seed), use_cache=False).loss.backward()
        reference.model.norm.weight.grad = None
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    optimizer.load_state_dict(reference_optimizer.state_dict())
    assert optimizer.state[model.model.norm.weight]["step"] == 0
    assert not optimizer.state[model.model.norm.weight]["exp_avg"].any()
    assert optimizer.state[model.lm_head.weight]["step"] == 2


def test_param_groups_are_loaded() -> None:
    def halves(model: Any) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 1e-4}]

    model, optimizer = ours()
    optimizer = horizon_lm.AdamW(model, params=halves(model), **HYPER)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    steps(model, optimizer, 1)
    (state,) = saved(optimizer)
    other, _ = ours()
    other_optimizer = horizon_lm.AdamW(other, params=halves(other), lr=1.0)
    other_optimizer.load_state_dict(state)
    for one, two in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in two.items() if k != "params"}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other_optimizer.state[two]["exp_avg"])


def test_state_dict_of_a_subset_of_parameters() -> None:
    model, _ = ours()
    optimizer = horizon_lm.AdamW(model, params=model.model.layers[1].parameters(), **HYPER)
    steps(model, optimizer, 1)
    (state,) = saved(optimizer)
    assert len(state["state"]) == len(list(model.model.layers[1].parameters()))
    other, _ = ours()
    other_optimizer = horizon_lm.AdamW(other, params=other.model.layers[1].parameters(), **HYPER)
    other_optimizer.load_state_dict(state)
    assert torch.equal(
        optimizer.state[model.model.layers[1].mlp.up_proj.weight]["exp_avg"],
        other_optimizer.state[other.model.layers[1].mlp.up_proj.weight]["exp_avg"],
    )


def test_param_groups_may_be_added_but_only_from_the_same_model() -> None:
    model, _ = ours()
    optimizer = horizon_lm.AdamW(model, params=model.model.layers[1].parameters(), **HYPER)
    optimizer.add_param_group({"params": model.model.layers[0].parameters(), "lr": 1e-4})
    before = masters(model)
    steps(model, optimizer, 1)
    changed = {name for name, value in masters(model).items() if not torch.equal(value, before[name])}
    assert {name.split(".")[2] for name in changed} == {"0", "1"}
    with pytest.raises(ConfigError, match="not of this model"):
        horizon_lm.AdamW(model, params=tiny_models.build("llama").parameters())


# A run that is stopped and resumed


def test_low_halves_are_views() -> None:
    model, optimizer = ours("fp32_master")
    steps(model, optimizer, 1)
    store = model._horizon.engine.store
    for (name, _), entry in zip(model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True):
        slab = store.slab_of(name)
        low = slab.layout.view(slab.low, name)
        assert entry["low_half"].dtype == torch.int16
        assert (entry["low_half"].data_ptr(), entry["low_half"].shape) == (low.data_ptr(), low.shape)
    assert any(entry["low_half"].any() for entry in optimizer.state_dict()["state"].values())
    for precision in ("float32", "bf16"):
        entries = ours(precision)[1].state_dict()["state"].values()
        assert not any("low_half" in entry for entry in entries)


def test_stochastic_rounding_resumes_its_sequence() -> None:
    """No parameter has a gradient in every step, so no parameter has counted all steps."""

    def alternating(model: Any, optimizer: Any, *numbers: int) -> None:
        for number in numbers:
            model(**tiny_models.batch(seed=number), use_cache=False).loss.backward()
            for index, param in enumerate(model.parameters()):
                if index % 2 == number % 2:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = ours("bf16")
    alternating(model, optimizer, 1, 2, 3, 4)
    model_state, state = saved(model, optimizer)
    alternating(model, optimizer, 5, 6)
    other, other_optimizer = ours("bf16")
    other.load_state_dict(model_state)
    other_optimizer.load_state_dict(state)
    alternating(other, other_optimizer, 5, 6)
    assert_equal(masters(model), masters(other))


# States that do not fit


def in_state(change: Callable[[dict[int, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: change(state["state"])


def in_last(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a state in which only the last parameter is wrong; the parameters before it must not be copied."""

    def change(state: dict[str, Any]) -> None:
        entry = state["state"][max(state["state"])]
        entry[key] = value(entry[key]) if callable(value) else value

    return change


def in_group(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["param_groups"][0].update(changes)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no state": (lambda state: state.pop("state"), "state_dict"),
    "no groups": (lambda state: state.pop("param_groups"), "state_dict"),
    "no moments at all": (in_state(dict.clear), "has no moments"),
    "nothing of one": (in_state(lambda state: state.pop(7)), "lacks 1 of"),
    "an empty one": (in_state(lambda state: state.update({7: {}})), "exp_avg"),
    "an unknown parameter": (in_state(lambda state: state.update({99: state[7]})), "99"),
    "another group": (lambda state: state["param_groups"].append(state["param_groups"][0]), "groups"),
    "fewer parameters": (lambda state: state["param_groups"][0]["params"].pop(), "groups"),
    "a parameter twice": (lambda state: state["param_groups"][0]["params"].__setitem__(1, 0), "twice"),
    "no learning rate": (lambda state: state["param_groups"][0].pop("lr"), "lr"),
    "a negative learning rate": (in_group(lr=-1.0), "lr"),
    "no number for it": (in_group(lr="fast"), "lr"),
    "beta of one": (in_group(betas=(0.9, 1.0)), "betas"),
    "amsgrad": (in_group(amsgrad=True), "amsgrad"),
    "maximize": (in_group(maximize=True), "maximize"),
    "Adam": (in_group(decoupled_weight_decay=False), "decoupled_weight_decay"),
    "a shape that would be broadcast": (in_last("exp_avg", lambda value: value[:1]), "shape"),
    "a scalar": (in_last("exp_avg_sq", torch.tensor(1.0)), "shape"),
    "transposed": (in_last("exp_avg", lambda value: value.T), "shape"),
    "integers": (in_last("exp_avg", lambda value: value.int()), "int32"),
    "a list": (in_last("exp_avg", lambda value: value.tolist()), "list"),
    "no step": (in_state(lambda state: state[7].pop("step")), "step"),
    "a step of NaN": (in_last("step", torch.tensor(float("nan"))), "step"),
    "an infinite step": (in_last("step", float("inf")), "step"),
    "half a step": (in_last("step", 2.5), "step"),
    "a negative step": (in_last("step", -1), "step"),
    "steps": (in_last("step", torch.ones(3)), "step"),
    "a moment of another optimizer": (in_last("momentum_buffer", 1), "momentum_buffer"),
    "low halves of some": (in_state(lambda state: state[7].pop("low_half")), "low_half"),
    "low halves in fp32": (in_last("low_half", lambda value: value.float()), "low_half"),
    "low halves of another shape": (in_last("low_half", lambda value: value[:1]), "shape"),
    "no count of steps": (lambda state: state.update(step="many"), "step"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mismatched_state_changes_nothing(name: str) -> None:
    change, message = BROKEN[name]
    other, other_optimizer = ours("fp32_master", lr=0.5)
    steps(other, other_optimizer, 1, 2)
    state = copy.deepcopy(other_optimizer.state_dict())
    change(state)
    model, optimizer = ours("fp32_master", tiny_models.build("llama", seed=9))
    steps(model, optimizer, 3)
    before, at_first = copy.deepcopy(optimizer.state_dict()), masters(model)
    with pytest.raises(ConfigError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in entry.items())
    assert_equal(at_first, masters(model))


@pytest.mark.parametrize(
    ("kept", "loaded", "message"),
    [
        ({"precision": "fp32_master"}, {"precision": "float32"}, "fp32_master"),
        ({"precision": "float32"}, {"moments": "8bit"}, "other moments"),
        ({"moments": "8bit"}, {"moments": "float32"}, "other moments"),
    ],
)
def test_states_of_other_modes_are_rejected(kept: Any, loaded: Any, message: str) -> None:
    state = ours(**kept)[1].state_dict()
    with pytest.raises(ConfigError, match=message):
        ours(**loaded)[1].load_state_dict(state)


def test_a_state_without_low_halves_does_not_change_them() -> None:
    """A state of torch has no low halves, so those of the weights do not change."""
    reference, reference_optimizer = theirs()
    steps(reference, reference_optimizer, 1)
    model, optimizer = ours("fp32_master", plain=copy.deepcopy(reference))
    before = masters(model)
    optimizer.load_state_dict(reference_optimizer.state_dict())
    assert_equal(before, masters(model))


# A step without gradients


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"update_in_backward": True}])
def test_a_step_without_a_backward_pass_does_nothing(options: dict[str, Any]) -> None:
    model, optimizer = ours("fp32_master", **options)
    steps(model, optimizer, 1)
    before, state, norm = masters(model), copy.deepcopy(optimizer.state_dict()), optimizer.grad_norm
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.step(lambda: 5) == 5
    assert_equal(before, masters(model))
    after = optimizer.state_dict()
    assert after.get("step") == state.get("step")
    for index, entry in state["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in entry.items())
    assert optimizer.grad_norm == norm
    steps(model, optimizer, 2)
    other, other_optimizer = ours("fp32_master", **options)
    steps(other, other_optimizer, 1, 2)
    assert_equal(masters(other), masters(model))
