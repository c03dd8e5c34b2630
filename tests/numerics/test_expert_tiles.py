"""Experts that are streamed in tiles: the numbers of plain autograd, on a device that holds a few of them at a time."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_moe import modeling_qwen3_moe

import horizon_lm
from horizon_lm.common import units
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.units.block_autograd import BlockAutograd
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.fixed_routing import Choices
from horizon_lm.errors import ConfigError, ModelNotSupportedError, StreamingError
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import Kind, Schedule
from tests.census.subject import Subject
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.expert_models import EXPERTS, NAMES, assert_same, loss_and_gradients, plain
from tests.support.gradients import assert_equal_gradients, losses_together
from tests.support.schedule_proofs import without_wait
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned
from tests.support.training_steps import weights


def streamed(family: str, tile: int | None, device: Any = "cpu", experts: int = EXPERTS, **options: Any) -> Any:
    options = {"precision": "float32", "head": "whole"} | options
    return horizon_lm.stream(plain(family, experts), device, expert_tile=tile, **options)


# Plain autograd


@pytest.mark.parametrize("options", [{}, {"device_micro_batch_size": 1, "activation_checkpoints": "host"}], ids=str)
def test_feed_forward_layers_in_chunks(options: dict[str, Any]) -> None:
    """Dense blocks and shared experts compute chunks of tokens beside tiles of routed experts."""
    options = options | {"mlp_chunk_tokens": 5, "check_recompute": True}
    expected = loss_and_gradients(streamed("deepseek_v3", None, **options))
    assert_same(loss_and_gradients(streamed("deepseek_v3", 3, **options)), expected)


# Whole blocks


def test_gradients_of_several_backward_passes_are_added() -> None:
    results = []
    for tile in (None, 3):
        model = streamed("qwen3_moe", tile, precision="bf16")
        optimizer = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=0.1)
        for seed in range(3):
            loss, grads = loss_and_gradients(model, **tiny_models.batch(seed=seed))
        optimizer.step()
        results.append((loss, grads | dict(enumerate(weights(model)))))
    assert_same(results[1], results[0])


@torch.no_grad()
def test_answers() -> None:
    models = [streamed("qwen3_moe", tile).eval() for tile in (None, 3)]
    prompt = torch.tensor([[5, 9, 3]])
    one, other = (model.generate(prompt, max_new_tokens=6, do_sample=False) for model in models)
    assert torch.equal(one, other)
    one, other = (model(**tiny_models.batch()).logits for model in models)
    assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", None), ("gpt_oss", "mxfp4")])
def test_few_tokens_stream_the_experts_that_they_are_routed_to(family: str, kind: str | None, tmp_path: Path) -> None:
    """A token of a model with 16 experts reads two of them, and the bits are those of streaming all."""

    def build_model(**options: Any) -> Any:
        if kind is None:
            return streamed(family, experts=16, **options).eval()
        pytest.importorskip("peft")
        from tests.support.quantized_folders import opened, save_published

        folder = tmp_path / "model"
        if not folder.exists():
            save_published(family, kind, folder, **{NAMES[family]: 16})
        return opened(folder, kind, expert_tile=options.pop("tile"), **options).eval()

    model, whole = build_model(tile=3), build_model(tile=None)
    token = torch.tensor([[7]])
    assert torch.equal(model(token).logits, whole(token).logits)
    read, experts = (
        {key: count for key, count in moved(each).items() if ".tile" in key and count} for each in (model, whole)
    )
    assert sum(read.values()) == sum(experts.values()) > 0
    assert len(read) <= 2 * model.config.num_hidden_layers
    many = tiny_models.batch(rows=3, length=11)["input_ids"]
    assert torch.equal(model(many).logits, whole(many).logits)
    one, other = (
        each.generate(token, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
        for each in (model, whole)
    )
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-5, atol=1e-6)  # `batched_mm` multiplies single rows


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_few_tokens_in_any_order(seed: int) -> None:
    """What is not streamed is NaN on the simulated device."""
    models = [
        streamed("qwen3_moe", 3, device, experts=16).eval()
        for device in ("cpu", SimulatedDevice(seed, eagerness=[None, 0.3, 0.9][seed]))
    ]
    for tokens in ([[7]], [[5, 9]], [[3] * 30]):
        one, other = (model(torch.tensor(tokens)).logits for model in models)
        assert torch.equal(one, other)


def test_several_batches_share_the_tiles() -> None:
    batches = [tiny_models.batch(length=5), tiny_models.batch(length=11)]
    models = [streamed("qwen3_moe", tile, device_micro_batch_size=2) for tile in (None, 3)]
    assert losses_together(models[0], batches) == losses_together(models[1], batches)
    assert_equal_gradients(models[1], models[0])


@pytest.mark.parametrize("rows", [None, 2])
def test_sums_over_two_backward_passes_are_rounded_as_those_of_whole_blocks(rows: int | None) -> None:
    models = [
        streamed("qwen3_moe", tile, precision="fp32_master", device_micro_batch_size=rows, grad_dtype=torch.bfloat16)
        for tile in (None, 1, 3)
    ]
    for model in models:
        for seed in range(2):
            model(**tiny_models.batch(seed=seed)).loss.backward()
    for model in models[1:]:
        assert_equal_gradients(model, models[0])


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_have_the_signs_of_whole_blocks(grad_dtype: torch.dtype) -> None:
    """Of experts that one micro-batch has tokens for, which no loss depends on, and the others have none for."""
    batch = tiny_models.batch(rows=3, length=3, padding="none")
    batch["labels"][1] = -100
    results = []
    for tile in (None, 1):
        model = streamed("mixtral", tile, precision="bf16", grad_dtype=grad_dtype, device_micro_batch_size=1)
        results.append(loss_and_gradients(model, **batch)[1])
    for name, grad in results[0].items():
        assert torch.equal(results[1][name], grad)
        assert torch.equal(results[1][name].signbit(), grad.signbit()), name


def test_dropout_draws_the_numbers_of_whole_blocks() -> None:
    results = []
    for tile in (None, 3):
        model = horizon_lm.stream(
            plain("qwen3_moe", attention_dropout=0.3),
            "cpu",
            precision="float32",
            device_micro_batch_size=2,
            expert_tile=tile,
        )
        torch.manual_seed(11)
        results.append((*loss_and_gradients(model), torch.get_rng_state()))
    assert_same(results[1], results[0])
    assert torch.equal(results[0][2], results[1][2])


def test_gradients_are_checked_against_plain_autograd() -> None:
    loss_and_gradients(streamed("qwen3_moe", 3, check_gradients=3))


# What moves, and what the device holds


def moved(model: Any) -> dict[str, int]:
    return {key: count for key, count in horizon_lm.stats(model)["moved_bytes"].items() if ":block" in key}


@pytest.mark.parametrize("options", [{}, {"device_micro_batch_size": 1}])
def test_each_weight_is_moved_twice_a_step(options: dict[str, Any]) -> None:
    whole, tiled = (streamed("qwen3_moe", tile, **options) for tile in (None, 3))
    for model in (whole, tiled):
        loss_and_gradients(model)
    for kind in (Kind.STREAM_IN, Kind.STREAM_OUT):
        by_model = [
            sum(count for key, count in moved(model).items() if key.startswith(f"{kind}:")) for model in (whole, tiled)
        ]
        assert 0 < by_model[1] <= by_model[0]  # without the padding between tensors
        assert by_model[1] > 0.99 * by_model[0]
    tiles = [key for key in moved(tiled) if ".tile" in key and key.startswith(f"{Kind.STREAM_IN}:")]
    assert len(tiles) == 3 * tiled.config.num_hidden_layers


def peaks(experts: int, device: Any = "cpu", **options: Any) -> tuple[int, int]:
    """Return the peak bytes of the engine's buffers and of all tensors on the device, without router and its gradients."""
    model = horizon_lm.stream(
        plain("qwen3_moe", experts, hidden_size=64, output_router_logits=False), device,
        expert_tile=2, activation_checkpoints="host", compile=False, **options,
    )  # fmt: skip
    with StorageMeter() as meter:
        for _ in range(2):
            model(**tiny_models.batch(rows=4, length=16)).loss.backward()
    return horizon_lm.stats(model)["device_bytes_peak"], meter.peak


@pytest.mark.parametrize("precision", thinned(["fp32_master", "float32"], every=2))
def test_device_peak_does_not_depend_on_the_number_of_experts(precision: str) -> None:
    """But for the router, which has a row for each: two slots of its weights and two of its gradients."""
    (few, _), (many, _) = (peaks(experts, precision=precision) for experts in (8, 64))
    router, size = (64 - 8) * 64, 4 if precision == "float32" else 2
    assert many - few == router * (2 * 4 + 2 * size)  # computed in float32 on the CPU
    whole = horizon_lm.stream(plain("qwen3_moe", 64, hidden_size=64), "cpu", precision=precision)
    loss_and_gradients(whole)
    assert horizon_lm.stats(whole)["device_bytes_peak"] > 4 * many


def test_one_graph_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the graph of one micro-batch."""
    alive: list[weakref.ref[torch.Tensor]] = []
    recompute = BlockAutograd._recompute

    def recompute_alone(self: BlockAutograd, number: int, inputs: Any) -> Any:
        assert all(each() is None for each in alive)
        graph = recompute(self, number, inputs)
        alive[:] = [weakref.ref(output) for output in graph.outputs]
        return graph

    monkeypatch.setattr(BlockAutograd, "_recompute", recompute_alone)
    loss_and_gradients(streamed("qwen3_moe", 3, device_micro_batch_size=1))
    assert alive


def test_the_host_waits_when_all_micro_batches_are_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks where the rows of each expert begin, once in a step, and not while another micro-batch could be computed."""
    events: list[str] = []
    begin, bounds = ExpertCall.__init__, ExpertCall._bounds.func

    def call(self: ExpertCall, *args: Any) -> None:
        begin(self, *args)
        events.append("call")

    def wait(self: ExpertCall) -> list[int]:
        events.append("wait")
        return bounds(self)

    monkeypatch.setattr(ExpertCall, "__init__", call)
    monkeypatch.setattr(ExpertCall._bounds, "func", wait)
    model = streamed("qwen3_moe", 3, device_micro_batch_size=1)
    loss_and_gradients(model)
    num_blocks, num_calls = len(model._horizon.blocks.blocks), events.count("wait") // len(model._horizon.blocks.blocks)
    assert num_calls > 1
    forward, backward = num_blocks * num_calls * 2, num_blocks * num_calls
    assert events[:forward] == ([*["call"] * num_calls, *["wait"] * num_calls] * num_blocks)
    assert events[forward:] == ["call"] * backward


def test_on_the_emulated_gpu() -> None:
    """Nothing mixes host and device, and a device holds as much for many experts as for few."""
    with emulated_gpu():
        expected, got = (
            loss_and_gradients(streamed("qwen3_moe", tile, CudaDevice("cuda:0", None), compile=False))
            for tile in (None, 3)
        )
        few, many = (
            horizon_lm.stats(model)["device_bytes_peak"]
            for model in (streamed("qwen3_moe", 2, CudaDevice("cuda:0", None), experts) for experts in (8, 32))
            if loss_and_gradients(model)
        )
    assert_same(got, expected)
    assert (
        many - few <= 6 * (32 - 8) * 32 * 4
    )  # the rows of the router, in two slots, two of gradients, and in transfer


# Order


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("_forward", Kind.FORWARD, units.tile(0, 2)),
        ("_forward", Kind.STREAM_IN, units.tile(1, 1)),
        ("_backward", Kind.BACKWARD, units.tile(1, 0)),
        ("_backward", Kind.STREAM_OUT, units.tile(1, 2)),
        ("_backward", Kind.BACKWARD, units.tile(0, 1)),
    ],
)
def test_a_dropped_wait_changes_the_numbers(name: str, kind: Kind, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def run(device: Any) -> list[torch.Tensor]:
        model = streamed("qwen3_moe", 3, device)
        return [*loss_and_gradients(model)[1].values()]

    expected, made = run("cpu"), getattr(build, name)

    def without(*args: Any) -> Schedule:
        schedule = made(*args)
        position = schedule.positions[kind, unit]
        for wait in schedule.ops[position].waits:
            schedule = without_wait(schedule, position, wait)
        return schedule

    monkeypatch.setattr(build, name, without)
    devices = [SimulatedDevice(seed, eagerness=each) for seed, each in itertools.product(range(3), [0.0, 0.3, 0.9])]
    assert not all(all(map(torch.equal, run(device), expected)) for device in devices)


# Routing


@contextmanager
def turned_ties(model: Any) -> Iterator[None]:
    """Let experts whose scores are equal change places when blocks are computed again, as another kernel might."""
    linear = torch.nn.functional.linear
    calls = itertools.count()
    layers = model.config.num_hidden_layers

    def rounded(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scores = linear(hidden, weight, bias)
        if weight.shape[0] != EXPERTS:
            return scores
        order = torch.arange(EXPERTS) if next(calls) < layers else torch.arange(EXPERTS).flip(0)
        return scores * (1 + 1e-6 * order * scores.sign())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_moe.F, "linear", rounded)
        yield


def tied(model: Any) -> Any:
    """Give each two experts the same scores."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                param[1::2] = param[::2]
    return model


def test_the_recomputed_block_routes_as_the_forward_pass() -> None:
    model = tied(plain("qwen3_moe", num_experts_per_tok=1, output_router_logits=False))
    with turned_ties(model):
        expected = loss_and_gradients(model)

    def run() -> dict[str, torch.Tensor]:
        model = tied(plain("qwen3_moe", num_experts_per_tok=1, output_router_logits=False))
        model = horizon_lm.stream(model, "cpu", precision="float32", expert_tile=3)
        with turned_ties(model):
            return loss_and_gradients(model)[1]

    def off(got: dict[str, torch.Tensor]) -> float:
        return max(
            float((got[name] - grad).norm() / grad.norm()) for name, grad in expected[1].items() if grad.norm() > 0
        )

    assert off(run()) < 1e-4
    with pytest.MonkeyPatch.context() as patch:  # negative control: the recomputed block routes again
        patch.setattr(Choices, "repeated", Choices.recorded)
        assert not off(run()) < 0.1  # not a number where an expert is used that was not streamed


# Rejections


def test_what_cannot_be_cut_is_rejected() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"LlamaForCausalLM has no experts .* leave it unset"):
        horizon_lm.stream(tiny_models.build("llama"), "cpu", expert_tile=2)
    with pytest.raises(ConfigError, match="expert_tile is 0"):
        horizon_lm.stream(plain("qwen3_moe"), "cpu", expert_tile=0)
    with pytest.raises(ConfigError, match=r"compile=True .* expert_tile"):
        horizon_lm.stream(plain("qwen3_moe"), "cpu", expert_tile=2, compile=True)


def test_a_function_whose_order_is_unknown_is_rejected() -> None:
    model = streamed("qwen3_moe", 2)
    model.config._experts_implementation_internal = "deepgemm"
    with pytest.raises(ModelNotSupportedError, match="experts_implementation='deepgemm' cannot be cut into tiles"):
        model(**tiny_models.batch())


def test_experts_with_weights_that_all_of_them_share_are_rejected() -> None:
    """Such a weight would get a gradient from each tile."""
    if "muse_spark" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such experts")
    with pytest.raises(ModelNotSupportedError, match="has no experts that can be cut into tiles"):
        Subject("image_text", "muse_spark").stream(expert_tile=1)


class ListedExperts(torch.nn.Module):
    """Experts as remote code has them: a list of modules, of which each is computed for its own tokens."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList()
        for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True):
            layers = [torch.nn.Linear(*reversed(weight.shape), bias=False) for weight in (gate_up, down)]
            for layer, weight in zip(layers, (gate_up, down), strict=True):
                layer.weight.data.copy_(weight.detach())
            self.experts.append(torch.nn.ModuleList(layers))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for number, (gate_up, down) in enumerate(self.experts):
            tokens, ranks = torch.where(ids == number)
            gate, up = gate_up(hidden[tokens]).chunk(2, dim=-1)
            weighted = down(torch.nn.functional.silu(gate) * up) * weights[tokens, ranks, None]
            output = output.index_add(0, tokens, weighted)
        return output


def listed(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.experts = ListedExperts(layer.mlp.experts)
    return model


def test_experts_in_a_list_are_streamed_with_their_block() -> None:
    """No type of transformers has them; a model with remote code may."""
    expected = loss_and_gradients(listed(plain("qwen3_moe")))
    assert_same(
        loss_and_gradients(horizon_lm.stream(listed(plain("qwen3_moe")), "cpu", precision="float32", head="whole")),
        expected,
    )
    with pytest.raises(ModelNotSupportedError, match=r"only those of transformers' experts interface can"):
        horizon_lm.stream(listed(plain("qwen3_moe")), "cpu", expert_tile=2)


def test_an_activation_inside_a_block_has_no_gradient() -> None:
    model = streamed("qwen3_moe", 3)
    kept = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    model(**tiny_models.batch())
    with pytest.raises(StreamingError, match="a loss depends on an activation that a forward hook inside a block kept"):
        kept[0].sum().backward()
