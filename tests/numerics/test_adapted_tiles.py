"""Adapters of the experts' own tensors, with experts in tiles: the numbers of plain PEFT, which applies them to all experts at once."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import Unit
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.units import tiled_computation
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import expert_adapters
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import After, Buf, Kind, Schedule
from tests.census.subject import Subject
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.expert_models import EXPERTS, NAMES, assert_same, loss_and_gradients, plain
from tests.support.schedule_proofs import without_wait
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import covering, thinned
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


def of_experts(grads: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in grads if ".experts." in name]


# Plain PEFT


@pytest.mark.parametrize("family", NAMES)
def test_bits_of_plain_peft(family: str) -> None:
    expected = loss_and_gradients(adapted(plain(family)))
    assert all(bool(expected[1][name].any()) for name in of_experts(expected[1]))
    for tile in (1, 3, EXPERTS):
        model = streamed(adapted(plain(family)), tile)
        assert max(model._horizon.engine.tiles.counts) == -(-EXPERTS // tile)
        assert_same(loss_and_gradients(model), expected)


@pytest.mark.parametrize("model_type", ["olmoe", "glm4_moe"])
def test_bits_of_plain_peft_in_more_families(model_type: str) -> None:
    subject = Subject("causal", model_type)
    expected = loss_and_gradients(adapted(subject.copy()), **subject.batch())
    for tile in (1, 3):
        assert_same(loss_and_gradients(streamed(adapted(subject.copy()), tile), **subject.batch()), expected)


@pytest.mark.parametrize("function", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_functions_of_transformers(family: str, function: str) -> None:
    models = adapted(plain(family)), streamed(adapted(plain(family)), 3)
    for model in models:
        model.get_base_model().set_experts_implementation(function)
    expected, got = map(loss_and_gradients, models)
    assert_same(got, expected)


@pytest.mark.parametrize("parameter", BOTH)
def test_adapters_of_one_tensor(parameter: str) -> None:
    expected = loss_and_gradients(adapted(plain("qwen3_moe"), parameters=(parameter,)))
    assert_same(loss_and_gradients(streamed(adapted(plain("qwen3_moe"), parameters=(parameter,)), 3)), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_several_active_adapters(family: str) -> None:
    """PEFT adds their products, which it forms by another function than those of some experts are formed by."""
    expected = loss_and_gradients(adapted(plain(family), "one", "two"))
    assert any(".two." in name for name in of_experts(expected[1]))
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


def test_frozen_adapters_of_experts() -> None:
    def partly(model: Any) -> Any:
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name and ("lora_B" in name or ".experts." not in name))
        return model

    expected = loss_and_gradients(partly(adapted(plain("qwen3_moe"))))
    assert_same(loss_and_gradients(partly(streamed(adapted(plain("qwen3_moe")), 3))), expected)


def test_experts_without_tokens() -> None:
    batch = tiny_models.batch(rows=1, length=2, padding="none")
    expected = loss_and_gradients(adapted(plain("qwen3_moe")), **batch)
    assert_same(loss_and_gradients(streamed(adapted(plain("qwen3_moe")), 1), **batch), expected)


def test_adapters_of_other_experts_change_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each tile gets the adapters of the first experts."""
    right = expert_adapters.of_experts

    def of_the_first(name: str, values: torch.Tensor, count: int, experts: slice) -> torch.Tensor:
        return right(name, values, count, slice(0, experts.stop - experts.start))

    monkeypatch.setattr(tiled_computation, "of_experts", of_the_first)
    expected = loss_and_gradients(adapted(plain("qwen3_moe")))
    loss, _ = loss_and_gradients(streamed(adapted(plain("qwen3_moe")), 4))
    assert not torch.equal(loss, expected[0])


@pytest.mark.parametrize(
    ("family", "kind"),
    thinned(
        [("gpt_oss", "mxfp4"), ("mixtral", "4bit"), ("qwen3_moe", "nf4"), ("qwen3_moe", "int4"), ("qwen3_moe", "fp8")]
    ),
)
def test_quantized_experts(family: str, kind: str, tmp_path: Path) -> None:
    """Gradients of the model with the weights that transformers decodes, and the bits of whole blocks."""
    pytest.importorskip("peft")
    from tests.support.quantized_folders import dequantized, opened, save_published

    folder = save_published(family, kind, tmp_path / "model", **{NAMES[family]: EXPERTS})
    expected = loss_and_gradients(adapted(dequantized(folder, kind, opened(folder, kind)).train()))
    whole = loss_and_gradients(adapted(opened(folder, kind, head="whole").train()))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
    for tile in (1, 3):
        assert_same(loss_and_gradients(adapted(opened(folder, kind, head="whole", expert_tile=tile).train())), whole)


# Whole blocks

SETTINGS: list[dict[str, Any]] = [
    {"activation_checkpoints": "host"},
    {"device_micro_batch_size": 2, "activation_checkpoints": "host"},
    {"activation_checkpoints": 1, "device_micro_batch_size": 1},
    {"resident_blocks": 2, "resident_graphs": 1, "activation_checkpoints": "device", "device_micro_batch_size": 2},
]


@pytest.mark.parametrize(
    ("options", "precision", "in_backward"),
    [
        (options, precision, number % 2 == 1)
        for number, (options, precision) in enumerate(
            zip(SETTINGS, ("float32", "fp32_master", "bf16", "float32"), strict=True)
        )
    ],
)
def test_steps_of_whole_blocks(options: dict[str, Any], precision: str, in_backward: bool) -> None:
    results = []
    for tile in (None, 3):
        model = streamed(adapted(plain("qwen3_moe")), tile, precision=precision, head="chunked", **options)
        optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=in_backward)
        results.append((train(model, optimizer, range(4)), weights(model)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_gradients_of_several_backward_passes_are_added() -> None:
    results = []
    for make in (lambda: adapted(plain("qwen3_moe")), lambda: streamed(adapted(plain("qwen3_moe")), 3)):
        model = make()
        for seed in range(3):
            found = loss_and_gradients(model, **tiny_models.batch(seed=seed))
        results.append(found)
    assert_same(results[1], results[0])


def test_a_state_continues_in_tiles_of_another_size(tmp_path: Path) -> None:
    """Adapters that are saved in between are those of whole blocks, and so is the model that they are merged into."""
    runs = []
    for number, tiles in enumerate(((None, None), (3, 1))):
        model = streamed(adapted(plain("qwen3_moe")), tiles[0])
        optimizer = horizon_lm.AdamW(model, lr=1e-2)
        train(model, optimizer, range(2))
        model.save_pretrained(tmp_path / str(number))
        state, moments = model.state_dict(), optimizer.state_dict()
        other = streamed(adapted(plain("qwen3_moe")), tiles[1])
        other.load_state_dict(state)
        continued = horizon_lm.AdamW(other, lr=1e-2)
        continued.load_state_dict(moments)
        losses = train(other, continued, range(2, 4))
        trained = weights(other)
        other.merge_adapter()
        with torch.no_grad():
            runs.append((losses, trained, [*weights(other), other(**tiny_models.batch()).logits]))
    saved = [(tmp_path / str(number) / "adapter_model.safetensors").read_bytes() for number in range(2)]
    assert saved[0] == saved[1]
    assert runs[0][0] == runs[1][0]
    for one, other in zip(runs[0][1:], runs[1][1:], strict=True):
        assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, *runs[0][1:]))  # merged


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


def test_planned_bytes() -> None:
    """Buffers have the bytes of the plan, in which adapters of all blocks lie with the outer parameters."""
    pytest.importorskip("peft")
    from horizon_lm.model.adapters import Adapters
    from horizon_lm.planning.arithmetic.choose import choose
    from horizon_lm.planning.arithmetic.device_memory import device_use
    from tests.support import planned_bytes
    from tests.support.planned_bytes import DEFAULTS, HERE, Case, outline_of

    adapters = Adapters(r=4, lora_dropout=0.0, target_modules=("q_proj",), target_parameters=BOTH)
    options = DEFAULTS | {"expert_tile": 3, "activation_checkpoints": "host", "device_micro_batch_size": 1}
    options |= {"head_chunk_tokens": 64, "resident_blocks": 0, "resident_graphs": 0}
    case = Case(3, options, "float32", False, frozenset())
    step = choose(outline_of(plain("qwen3_moe"), adapters=adapters), case.request, HERE).step
    model = horizon_lm.stream(adapters.add_to(plain("qwen3_moe"), draw=True), "cpu", **options)
    planned_bytes.train(model, case)
    counters = model._horizon.engine.device.counters
    assert {kind: n for kind, n in counters.allocated.items() if n} == device_use(step).buffers
    assert counters.allocated_peak == sum(device_use(step).buffers.values())


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


@pytest.mark.parametrize(
    ("options", "seed"),
    covering([{}, {"activation_checkpoints": "host", "device_micro_batch_size": 2}], range(3)),
)
def test_any_order_that_the_waits_allow(seed: int, options: dict[str, Any]) -> None:
    results = []
    for device in ("cpu", SimulatedDevice(seed, eagerness=[None, 0.3, 0.9][seed])):
        model = streamed(adapted(plain("qwen3_moe")), 3, device, **options)
        optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=seed == 2)
        results.append((train(model, optimizer, range(3)), weights(model)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


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
