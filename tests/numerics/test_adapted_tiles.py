"""Adapters of the experts' own tensors, with experts in tiles: the numbers of plain PEFT, which applies them to all experts at once."""

import itertools
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import Unit
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import After, Buf, Kind, Schedule
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.expert_models import EXPERTS, NAMES, assert_same, loss_and_gradients, plain
from tests.support.schedule_proofs import without_wait
from tests.support.tensor_memory import StorageMeter
from tests.support.training_steps import train, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(model: Any, *names: str, parameters: tuple[str, ...] = BOTH) -> Any:
    """Return a model with adapters that are not zero, the same each time; with several names, all of them are active."""
    peft = pytest.importorskip("peft")
    settings = {
        "target_modules": ["q_proj", "o_proj"],
        "init_lora_weights": False,
        "target_parameters": list(parameters),
    }
    torch.manual_seed(3)
    for number, name in enumerate(names or ("default",)):
        config = peft.LoraConfig(r=4 - number, **settings)
        if number:
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, name)
    if len(names) > 1:
        model.base_model.set_adapter(list(names))
    return model


def streamed(model: Any, tile: int | None, device: Any = "cpu", **options: Any) -> Any:
    return horizon_lm.stream(model, device, expert_tile=tile, **{"precision": "float32", "head": "whole"} | options)


# Plain PEFT


@pytest.mark.parametrize("parameter", BOTH)
def test_adapters_of_one_tensor(parameter: str) -> None:
    expected = loss_and_gradients(adapted(plain("qwen3_moe"), parameters=(parameter,)))
    assert_same(loss_and_gradients(streamed(adapted(plain("qwen3_moe"), parameters=(parameter,)), 3)), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_several_active_adapters(family: str) -> None:
    """PEFT adds their products, which it forms by another function than those of some experts are formed by."""
    expected = loss_and_gradients(adapted(plain(family), "one", "two"))
    assert any(".two." in name for name in expected[1] if ".experts." in name)
    for tile in (1, 3):
        got = loss_and_gradients(streamed(adapted(plain(family), "one", "two"), tile))
        assert got[1].keys() == expected[1].keys()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_adapters_that_are_switched_off() -> None:
    models = adapted(plain("qwen3_moe")), streamed(adapted(plain("qwen3_moe")), 3)
    with torch.no_grad():
        on = [model(**tiny_models.batch()).logits for model in models]
        with models[0].disable_adapter(), models[1].disable_adapter():
            off = [model(**tiny_models.batch()).logits for model in models]
    assert torch.equal(*on)
    assert torch.equal(*off)
    assert not torch.equal(on[0], off[0])


# Whole blocks


def test_merged_adapters_are_those_of_whole_blocks() -> None:
    runs = []
    for tile in (None, 3):
        model = streamed(adapted(plain("qwen3_moe")), tile)
        train(model, horizon_lm.AdamW(model, lr=1e-2), range(2))
        trained = weights(model)
        model.merge_adapter()
        with torch.no_grad():
            runs.append((trained, [*weights(model), model(**tiny_models.batch()).logits]))
    for one, other in zip(*runs, strict=True):
        assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, *runs[0]))  # merged


def test_adapters_of_biases_are_rejected() -> None:
    """PEFT takes the biases (E, O) for one matrix, so that all experts share its adapters."""
    model = adapted(plain("gpt_oss"), parameters=("mlp.experts.gate_up_proj_bias",))
    with pytest.raises(ModelNotSupportedError, match="without adapters of their biases"):
        streamed(model, 3)


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_answers(device: str) -> None:
    """Adapters are applied to all experts of a tile, so few tokens stream all of them."""
    models = [streamed(adapted(plain("qwen3_moe", 16)), tile, device).eval() for tile in (None, 3)]
    prompt = torch.tensor([[7]])
    assert torch.equal(*(model(prompt).logits for model in models))
    assert torch.equal(*(model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False) for model in models))


# Device memory


WIDE: dict[str, Any] = {"hidden_size": 128, "max_position_embeddings": 128, "output_router_logits": False}


@pytest.mark.parametrize(("family", "tile"), [("mixtral", 1), ("qwen3_moe", 4), ("gpt_oss", EXPERTS)])
def test_activations_fit_the_plan(family: str, tile: int) -> None:
    """A tile's weights are on the device once more, with their adapters applied. A tile of all experts is the worst case of the plan."""
    pytest.importorskip("peft")
    from horizon_lm.model.adapters import Adapters
    from horizon_lm.planning.arithmetic.choose import choose
    from horizon_lm.planning.arithmetic.device_memory import device_use
    from tests.support import planned_bytes
    from tests.support.planned_bytes import DEFAULTS, HERE, Case, outline_of

    wide = WIDE | {"intermediate_size" if family != "qwen3_moe" else "moe_intermediate_size": 256}
    adapters = Adapters(r=4, lora_dropout=0.0, target_modules=("q_proj",), target_parameters=BOTH)
    case = Case(4, DEFAULTS | {"expert_tile": tile}, "float32", False, frozenset())
    base = tiny_models.build(family, **{NAMES[family]: EXPERTS}, **wide)
    step = choose(outline_of(base, adapters=adapters), case.request, HERE).step
    model = horizon_lm.stream(adapters.add_to(base, draw=True), "cpu", **case.options)
    with StorageMeter() as counted:
        planned_bytes.train(model, case)
    planned = device_use(step).total
    print(f"{family} {tile}: counted {counted.peak:,}, planned {planned:,}, {counted.peak / planned:.3f}")
    assert (0.8 if tile == EXPERTS else 0.5) * planned < counted.peak <= 1.05 * planned


def test_device_peak_does_not_depend_on_the_number_of_experts() -> None:
    """But for the adapters, which are on the device with their gradients, and for the router."""

    def peak(experts: int) -> tuple[int, int]:
        model = adapted(plain("qwen3_moe", experts, hidden_size=64, output_router_logits=False))
        own = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name and "lora_" in name)
        model = streamed(model, 2, CudaDevice("cuda:0", None), compile=False, activation_checkpoints="host")
        loss_and_gradients(model, **tiny_models.batch(rows=4, length=16))
        return horizon_lm.stats(model)["device_bytes_peak"], own

    with emulated_gpu():
        (few, own_few), (many, own_many) = peak(8), peak(64)
        whole = streamed(
            adapted(plain("qwen3_moe", 64, hidden_size=64)), None, CudaDevice("cuda:0", None), compile=False
        )
        loss_and_gradients(whole)
    router = (64 - 8) * 64 * 4
    adapters = (own_many - own_few) * 4
    assert adapters * 2 <= many - few <= adapters * 2 + 6 * router
    assert horizon_lm.stats(whole)["device_bytes_peak"] - many > (64 - 8) * 64 * 3 * 32 * 4


# Order


def test_a_dropped_wait_changes_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the gradients of the backward pass before are landed from where a tile writes its adapters' gradients."""

    def run(device: Any) -> list[torch.Tensor]:
        model = streamed(adapted(plain("qwen3_moe")), 3, device)
        for seed in range(3):  # reading the gradients in between would wait for them
            model(**tiny_models.batch(seed=seed)).loss.backward()
        return [param.grad for param in model.parameters() if param.requires_grad]

    expected, made = run("cpu"), build._backward

    def without(*args: Any) -> Schedule:
        schedule = made(*args)
        position = schedule.positions[Kind.BACKWARD, Unit.parse("block2.tile2")]
        earlier = [wait for wait in schedule.ops[position].waits if not isinstance(wait, After)]
        assert [wait.buffer.kind for wait in earlier] == [Buf.OUTER_GRADS]
        return without_wait(schedule, position, earlier[0])

    monkeypatch.setattr(build, "_backward", without)
    devices = [SimulatedDevice(seed, eagerness=each) for seed, each in itertools.product(range(3), [0.0, 0.3, 0.9])]
    assert not all(all(map(torch.equal, run(device), expected)) for device in devices)
