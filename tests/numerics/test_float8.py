"""Products in FP8: the bits of an independent reference, in outputs and gradients, wherever blocks compute."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import horizon_lm
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model.float8 import casting, linear
from horizon_lm.model.float8.casting import CastWeight, cast_rows, multiply, multiply_and_scale, multiply_gradients
from horizon_lm.model.float8.kernels import require_float8
from horizon_lm.model.float8.layers import float8_layers, is_float8
from tests.support import tiny_models
from tests.support.float8_reference import product, rounded, use_reference

DTYPES = (torch.float32, torch.bfloat16)


# Casts and products


def rows_of_all_sizes() -> torch.Tensor:
    """Return rows (R, 64) of all magnitudes, with zeros, halves between two values of FP8, and values too small for it."""
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-15, 15, (200, 1), generator=generator)
    largest = torch.tensor([447.9, 448.0, 448.1, 449.0, 480.0, 511.9, 512.0, 896.0, 897.0])[:, None].expand(-1, 64)
    halves = torch.arange(1, 65) / 16 * 448 / 64
    small = 448 * 2.0 ** -torch.arange(64.0)
    return torch.cat(
        [torch.randn(200, 64, generator=generator) * scales, torch.zeros(1, 64), largest, halves[None], small[None]]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    matrix = rows_of_all_sizes().to(dtype)
    cast = cast_rows(matrix)
    assert torch.equal(cast.codes.float() * cast.scales, rounded(matrix))
    assert cast.codes.is_contiguous()
    of_columns = cast_rows(matrix.t())
    assert torch.equal(of_columns.codes.float() * of_columns.scales, rounded(matrix.t()))
    assert of_columns.codes.is_contiguous()


def test_another_largest_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows whose largest value would be up to 512 lose values above 448."""
    monkeypatch.setattr(casting, "_LARGER_MANTISSA", 0)
    matrix = rows_of_all_sizes()
    cast = cast_rows(matrix)
    assert not torch.equal(cast.codes.float() * cast.scales, rounded(matrix))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_float32_products_of_what_is_cast(dtype: torch.dtype) -> None:
    """Also without fast accumulation, where the result is scaled."""
    left, right = torch.randn(40, 32).to(dtype), torch.randn(16, 32).to(dtype)
    for compute in (multiply, multiply_gradients, multiply_and_scale):
        result = compute(cast_rows(left), cast_rows(right), dtype)
        assert result.dtype == dtype
        assert torch.equal(result, product(left, right))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_stays_visible(value: float, dtype: torch.dtype) -> None:
    """In the row that has it, and in no other."""
    left, right = torch.randn(3, 32).to(dtype), torch.randn(16, 32).to(dtype)
    left[1, 5] = value
    for compute in (multiply, multiply_gradients, multiply_and_scale):
        found = compute(cast_rows(left), cast_rows(right), dtype).isfinite()
        assert found[[0, 2]].all()
        assert not found[1].any()


# Models


def streamed(plain: Any, **options: Any) -> Any:
    settings = {"precision": "float32", "head": "whole", "products": "float8", **options}
    return horizon_lm.stream(copy.deepcopy(plain), "cpu", **settings)


def differing(model: Any, reference: Any) -> list[str]:
    """Return the names of parameters whose gradients differ after a step of both, and `loss` if the losses do."""
    losses = [each(**tiny_models.batch(rows=4)).loss for each in (model, reference)]
    for loss in losses:
        loss.backward()
    found = dict(reference.named_parameters())
    grads = {name: (param.grad, found[name].grad) for name, param in model.named_parameters() if param.requires_grad}
    assert any(expected is not None and expected.count_nonzero() for _, expected in grads.values())
    of_loss = [] if torch.equal(*losses) else ["loss"]
    return of_loss + [name for name, (grad, expected) in grads.items() if not torch.equal(grad, expected)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gpt_neox", "gemma2", "olmo2", "mixtral"])
def test_a_step_has_the_bits_of_the_reference(family: str) -> None:
    """With biases (Qwen2, GPT-NeoX), and with experts that stay as they are; a recompute has the bits of the forward pass."""
    plain = tiny_models.build(family)
    model = streamed(plain, check_recompute=True)
    assert differing(model, use_reference(copy.deepcopy(plain))) == []
    assert differing(streamed(plain), use_reference(copy.deepcopy(plain))) == []


def test_the_plain_model_has_other_bits() -> None:
    """The control of the comparison."""
    plain = tiny_models.build("llama")
    assert "loss" in differing(streamed(plain), copy.deepcopy(plain))
    assert differing(streamed(plain, products="plain"), copy.deepcopy(plain)) == []


@pytest.mark.parametrize("what", ["columns", "rows", "gradients", "grad_of_weight"])
def test_each_of_the_three_products_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: one operand in other bits, or the gradient of a weight in FP8."""
    plain = tiny_models.build("llama")
    if what in ("columns", "rows"):
        cast = CastWeight.of

        def halved(weight: torch.Tensor, differentiates: bool) -> CastWeight:
            found = cast(weight, differentiates)
            changed = getattr(found, what)
            if changed is None:
                return found
            return found._replace(**{what: changed._replace(scales=changed.scales * 2)})

        monkeypatch.setattr(CastWeight, "of", halved)
    elif what == "gradients":
        monkeypatch.setattr(linear, "multiply_gradients", lambda left, right, dtype: multiply(left, right, dtype) * 1.5)
    else:
        backward = linear._Product.backward

        def cast_too(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
            of_inputs, of_weight, *others = backward(ctx, grad)
            return of_inputs, rounded(of_weight), *others

        monkeypatch.setattr(linear._Product, "backward", staticmethod(cast_too))
    found = differing(streamed(plain), use_reference(copy.deepcopy(plain)))
    assert found
    assert ("loss" in found) == (what == "rows")


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoints": "host"},
        {"activation_checkpoints": 2, "resident_blocks": 2, "resident_graphs": 1},
        {"mlp_chunk_tokens": 1000},
        {"device": "simulated"},
    ],
)
def test_wherever_blocks_compute(options: dict[str, Any]) -> None:
    plain, options = tiny_models.build("llama"), dict(options)
    model = horizon_lm.stream(
        copy.deepcopy(plain), options.pop("device", "cpu"), "float32", head="whole", products="float8", **options
    )
    assert differing(model, use_reference(copy.deepcopy(plain))) == []


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_micro_batches_add_gradients(family: str) -> None:
    """Each micro-batch casts its own rows, and gradients of weights are added; those of biases and norms are added in another order."""
    plain = tiny_models.build(family)
    model = streamed(plain, device_micro_batch_size=2)
    found = differing(model, use_reference(copy.deepcopy(plain), pieces=2))
    others = {name for name, param in model.named_parameters() if param.ndim == 1}
    assert set(found) <= others


def test_weights_are_cast_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph for the outputs alone; a backward pass, which computes a block again, for both products."""
    cast, calls = CastWeight.of, []

    def counted(weight: torch.Tensor, differentiates: bool) -> CastWeight:
        calls.append(differentiates)
        return cast(weight, differentiates)

    monkeypatch.setattr(CastWeight, "of", counted)
    model = streamed(tiny_models.build("llama"), device_micro_batch_size=1)
    num_layers = sum(len(float8_layers(each)) for each in model.model.layers)
    assert num_layers == 3 * 7
    loss = model(**tiny_models.batch(rows=4)).loss
    assert calls == [False] * num_layers
    calls.clear()
    loss.backward()
    assert calls == [True] * num_layers
    assert not any(casting.CAST in each.__dict__ for each in model.modules())


def test_frozen_weights_get_no_gradient() -> None:
    plain = tiny_models.build("llama")
    for name, param in plain.named_parameters():
        param.requires_grad_("mlp" in name or "layers.2" in name)
    model = streamed(plain)
    assert differing(model, use_reference(copy.deepcopy(plain))) == []
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None


def test_adapters_stay_as_they_are() -> None:
    """The products of the base are in FP8, those of LoRA are not, though their widths would be even."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(tiny_models.build("llama"), config)
    model = streamed(plain)
    reference = use_reference(copy.deepcopy(plain), skip=lambda name: "lora_" in name)
    assert differing(model, reference) == []
    block = model.get_decoder().layers[0]
    assert is_float8(block.self_attn.q_proj.base_layer)
    assert not any(is_float8(each) for name, each in block.named_modules() if "lora_" in name)


@pytest.mark.parametrize("kind", ["nf4", "int4", "fp8"])
def test_adapters_on_a_quantized_base(kind: str, tmp_path: Path) -> None:
    """The decoded weights are cast, as those of a plain base are."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    from tests.support import quantized_folders as folders

    folder = folders.save_published("llama", kind, tmp_path / "base")
    of_adapters = folders.adapter_folder(folder, tmp_path)
    model = horizon_lm.from_pretrained(of_adapters, "cpu", "float32", head="whole", products="float8")
    plain = folders.dequantized(folder, kind, folders.opened(folder, kind))
    reference = peft.PeftModel.from_pretrained(plain, of_adapters, is_trainable=True)
    use_reference(reference, skip=lambda name: "lora_" in name)
    batch = tiny_models.batch()
    losses = [each.train()(**batch).loss for each in (model, reference)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    found = dict(reference.named_parameters())
    grads = {name: (param.grad, found[name].grad) for name, param in model.named_parameters() if param.requires_grad}
    assert grads
    assert [name for name, (grad, expected) in grads.items() if not torch.equal(grad, expected)] == []


def test_experts_and_routers_stay_as_they_are() -> None:
    """A router that is a linear layer, with an even number of experts; shared experts are computed in FP8."""
    plain = tiny_models.build("qwen3_next", num_experts=16, shared_expert_intermediate_size=32)
    plain.model.layers[0].mlp.router = nn.Linear(32, 16)
    with pytest.warns(UserWarning, match="not multiples of 16: .*shared_expert_gate"):
        model = streamed(plain)
    names = {name for name, each in model.model.layers[0].named_modules() if is_float8(each)}
    assert {"mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"} <= names
    assert not any(
        "router" in name or ".gate" in name or "mlp.experts" in name for name in names - {"mlp.shared_expert.gate_proj"}
    )


@pytest.mark.parametrize("tile", [1, 3])
def test_experts_in_tiles(tile: int) -> None:
    plain = tiny_models.build("mixtral")
    assert differing(streamed(plain, expert_tile=tile), use_reference(copy.deepcopy(plain))) == []


def test_autocast_has_the_bits_of_the_reference() -> None:
    """Inputs are converted to its dtype, and the product is not, which autocast would compute in bfloat16 on a CPU."""
    layer = nn.Linear(32, 16)
    inputs = torch.randn(2, 5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear.compute(layer, CastWeight.of(layer.weight, True), inputs)
    rows = inputs.to(torch.bfloat16).view(-1, 32)
    expected = (rounded(rows) @ rounded(layer.weight).t()).to(torch.bfloat16).view(2, 5, 16)
    assert torch.equal(output, expected + layer.bias.to(torch.bfloat16))


def test_evaluation_and_generation_use_the_same_products() -> None:
    plain = tiny_models.build("llama").eval()
    model, reference = streamed(plain), use_reference(copy.deepcopy(plain))
    batch = tiny_models.batch()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, reference(**batch).logits)
        prompt = {"input_ids": batch["input_ids"][1:2], "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(**prompt), reference.generate(**prompt))


def test_parameters_and_files_do_not_change(tmp_path: Any) -> None:
    plain = tiny_models.build("llama")
    model = streamed(plain)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float32)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))


# What a recompute leaves out


class Counting(TorchDispatchMode):
    """A mode that counts products in FP8, whether they make their result or are given it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op._schema.name == "aten::_scaled_mm"
        return op(*args, **(kwargs or {}))


def trained(model: Any) -> list[torch.Tensor]:
    """Return the gradients of a second step."""
    for seed in range(2):
        model.zero_grad()
        model(**tiny_models.batch(seed=seed)).loss.backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize(("family", "left_out"), [("llama", 1), ("gpt_neox", 2), ("gemma2", 0)])
def test_the_tail_is_left_out(family: str, left_out: int) -> None:
    """As of products in other dtypes; the lazy part begins at the layer of the first unread product."""
    plain = tiny_models.build(family)
    counts, grads = [], []
    for options in ({}, {"check_recompute": True}):
        model = streamed(plain, **options)
        grads.append(trained(model))
        loss = model(**tiny_models.batch(seed=3)).loss
        with Counting() as found:
            loss.backward()
        counts.append(found.count)
        if not options:
            tails = [tail for each in model._horizon.blocks.blocks for tail in each._tails.values()]
            assert all((tail._first is not None) == bool(left_out) for tail in tails)
            assert all(tail._first is None or is_float8(tail._first) for tail in tails)
    assert all(map(torch.equal, *grads))
    assert counts[1] - counts[0] == left_out * len(model._horizon.blocks.blocks)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block() -> None:
    """Its recompute leaves out the last product, too, and its gradients have the bits of one that computes all of it."""
    from horizon_lm.model import compiled_block

    plain, found = tiny_models.build("llama"), []
    shorten = compiled_block._without_outputs

    def watch(module: Any, num_outputs: int) -> Any:
        shorter = shorten(module, num_outputs)
        graphs = [each.graph for each in (module, shorter) if each is not None]
        found.append([sum("_scaled_mm" in str(node.target) for node in graph.nodes) for graph in graphs])
        return shorter

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_block, "_without_outputs", watch)
        grads = [trained(streamed(plain, compile=True, **each)) for each in ({}, {"check_recompute": True})]
    assert found == [[7, 6]]
    assert all(map(torch.equal, *grads))
    expected = trained(use_reference(copy.deepcopy(plain)))
    differences = [(a - b).norm() / b.norm() for a, b in zip(grads[0], expected, strict=True)]
    assert max(differences) < 0.05  # a value that is rounded otherwise before a cast may take another code


def test_what_has_no_gradient_is_computed_at_once() -> None:
    from horizon_lm.model.lazy_products import LazyProducts

    layer = nn.Linear(32, 16, bias=False).requires_grad_(False)
    inputs, cast = torch.randn(4, 32), CastWeight.of(layer.weight, True)
    with LazyProducts() as products:
        output = linear.compute(layer, cast, inputs)
    assert not products.left_out
    assert torch.equal(output, product(inputs, layer.weight))


# Rejections


def test_a_model_without_linear_layers() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"no torch\.nn\.Linear whose widths are multiples of 16"):
        streamed(tiny_models.build("gpt2"))


def test_uneven_layers_are_named() -> None:
    plain = tiny_models.build("llama", intermediate_size=40)
    with pytest.warns(UserWarning, match=r"not multiples of 16: 0|mlp.down_proj \(40 to 32\)"):
        model = streamed(plain)
    reference = use_reference(copy.deepcopy(plain), skip=lambda name: "mlp" in name)
    assert differing(model, reference) == []


def test_an_unknown_value() -> None:
    with pytest.raises(ConfigError, match="products is 'fp8'; choose 'plain' or 'float8'"):
        streamed(tiny_models.build("llama"), products="fp8")


class _Card:
    name = "a card"


def on_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Callable[[torch.dtype], None]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return lambda dtype: require_float8(torch.device("cuda", 0), dtype)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_with_float8(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_card(monkeypatch, capability)(torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((8, 6), torch.bfloat16, "compute capability 8.9 or later .*; a card has 8.6. Leave products: plain"),
        ((9, 0), torch.float32, "needs weights in bfloat16 on a GPU; use precision fp32_master or bf16, or leave products: plain"),
    ],
)  # fmt: skip
def test_cards_without(
    capability: tuple[int, int], dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_card(monkeypatch, capability)(dtype)


def test_cards_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="was written for NVIDIA's GPUs, and a card is none; leave products: plain"):
        on_card(monkeypatch, (9, 4))(torch.bfloat16)
