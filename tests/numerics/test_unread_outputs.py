"""What a recompute leaves out: products and sums that nobody reads, with the bits of one that computes all of it."""

import copy
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import horizon_lm
from horizon_lm.model import compiled_block, lazy_products
from horizon_lm.model.lazy_products import LazyProducts, LazyTail, require_computed
from tests.support import tiny_models

aten = torch.ops.aten
PRODUCTS = ("mm", "addmm", "bmm")


class Counting(TorchDispatchMode):
    """A mode that counts operations by name, whether they make their result or are given it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op._schema.name.removeprefix("aten::")] += 1
        return op(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    with Counting() as mode:
        yield mode.counts


# Lazy products


def test_what_is_not_read_is_not_computed() -> None:
    inputs, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with counting() as counts, LazyProducts() as products:
        unread = F.linear(inputs, weight) * 2.0 + 1.0
        read = F.linear(inputs, weight) * 3.0
        assert not any(counts[name] for name in PRODUCTS)
        cosine = read.cos()
    assert (counts["mm"], counts["mul"], counts["add"]) == (1, 1, 0)
    assert [call.op for call in products.left_out] == [aten.mm.default, aten.mul.Tensor, aten.add.Tensor]
    plain = F.linear(inputs, weight) * 3.0
    assert torch.equal(cosine, plain.cos())
    grads = [torch.autograd.grad(each.cos().sum(), [inputs, weight]) for each in (read, plain)]
    assert all(map(torch.equal, *grads))
    grads = [torch.autograd.grad(out.sum(), [inputs, weight]) for out in (unread, F.linear(inputs, weight) * 2.0 + 1.0)]
    assert all(map(torch.equal, *grads))


class Doubled(torch.autograd.Function):
    """A function that reads its input in a way that torch does not see, as a kernel of Triton does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(tensor)
        output.numpy()[:] = 2 * tensor.detach().numpy()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


@pytest.mark.parametrize(
    "read",
    [
        lambda product: product.cos(),
        lambda product: product.view(-1).cos(),
        lambda product: (product + product).t().cos(),
        lambda product: product @ product.t() @ product,
        lambda product: Doubled.apply(product),
        lambda product: product.detach().cos(),
        lambda product: product.clone().mul_(2.0),
        lambda product: torch.cat([product, product]),
        lambda product: F.dropout(product, 0.0),
        lambda product: torch.where(product > 0, product, 0.0),
        lambda product: product * product,
        lambda product: product.to(torch.float64),
    ],
    ids=range(12),
)
def test_what_is_read_is_computed(read: Any) -> None:
    inputs, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with LazyProducts():
        output = read(F.linear(inputs, weight, torch.ones(4)) + inputs)
        require_computed(output)
    expected = read(F.linear(inputs, weight, torch.ones(4)) + inputs)
    assert torch.equal(output, expected)
    if expected.requires_grad:
        grads = [torch.autograd.grad(each.sum(), [inputs, weight]) for each in (output, expected)]
        assert all(map(torch.equal, *grads))


def test_inputs_that_change_later_are_read_before() -> None:
    """Both for a change in place, and for a product that is read after it."""
    inputs, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    expected = F.linear(inputs, weight)
    with LazyProducts():
        output = F.linear(inputs, weight)
        inputs.zero_()
        output = output.cos()
    assert torch.equal(output, expected.cos())


def test_sparse_sums_are_computed_at_once() -> None:
    """They have no storage by which a result that is read later would be found."""
    one, two = (torch.full((3,), value).diag().to_sparse().requires_grad_() for value in (1.0, 2.0))
    with torch.enable_grad(), LazyProducts():
        both, twice = one + two, one + one
        values = [each.to_dense().diagonal().tolist() for each in (both, twice)]
    assert values == [[3.0] * 3, [2.0] * 3]


def test_strides_and_types_of_sums_are_those_of_torch() -> None:
    first, second = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    for a, b in ((first, second.t()), (first.t(), second), (first.t(), 2), (second.t(), torch.ones(()))):
        with LazyProducts():
            lazy = a + b
            require_computed(lazy)
        plain = a + b
        assert (lazy.stride(), lazy.dtype) == (plain.stride(), plain.dtype)
        assert torch.equal(lazy, plain)


def test_a_tail_begins_at_the_first_product_that_nobody_reads() -> None:
    """The first time all of the block is lazy; then only what begins with that module."""
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    inputs, tail = torch.randn(2, 4, requires_grad=True), LazyTail()
    for _ in range(2):
        with counting() as counts, tail.lazy(block):
            block(inputs)
        assert counts["addmm"] == 1
    assert tail._first is block[2]
    assert "forward" not in block[2].__dict__
    ended_early = LazyTail()
    for _ in range(2):
        with counting() as counts, ended_early.lazy(block[:2]):
            block[:2](inputs)
        assert counts["addmm"] == 1
    assert ended_early._first is None


# Models


def trained(model: Any, steps: int = 2) -> list[torch.Tensor]:
    for seed in range(steps):
        model.zero_grad()
        torch.manual_seed(seed)
        model(**tiny_models.batch(seed=seed)).loss.backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


# The products that a recompute of a block leaves out: that of the down projection, and those of attention and of a shared expert where
# the block adds these up at its end.
LEFT_OUT = {"llama": 1, "gpt2": 1, "gpt_neox": 2, "cohere2": 2, "gemma2": 0, "qwen3_moe": 0, "deepseek_v3": 1}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_exactly_the_tail_is_missing(family: str) -> None:
    """Counted in the second step of a model, beside one that compares its outputs, and so computes all of them."""
    plain = tiny_models.build(family, **({} if family != "gpt2" else {"resid_pdrop": 0.0}))
    counts, grads = [], []
    for settings in ({}, {"check_recompute": True}):
        model = horizon_lm.stream(copy.deepcopy(plain), precision="float32", head="whole", **settings)
        grads.append(trained(model))
        loss = model(**tiny_models.batch(seed=3)).loss
        with counting() as found:
            loss.backward()
        counts.append(found)
    assert all(map(torch.equal, *grads))
    less, all_of_it = (sum(found[name] for name in PRODUCTS) for found in counts)
    assert all_of_it - less == LEFT_OUT[family] * len(model._horizon.blocks.blocks)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_one_operation_less_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a product that is read, but never computed."""
    plain = tiny_models.build(family)
    expected = trained(horizon_lm.stream(copy.deepcopy(plain), precision="float32"))
    compute = LazyProducts.compute

    def lose_one(self: LazyProducts, tensors: Any) -> None:
        if len(self._put_off) == 1:
            self._put_off.clear()
        compute(self, tensors)

    monkeypatch.setattr(LazyProducts, "compute", lose_one)
    found = trained(horizon_lm.stream(copy.deepcopy(plain), precision="float32"), steps=1)
    assert not all(map(torch.equal, found, expected))
    assert lazy_products.LazyProducts.compute is lose_one


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


@needs_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama", [{"mm": 1}]),
        pytest.param("gpt_neox", [{"addmm": 2}], marks=pytest.mark.slow),
        pytest.param("gemma2", [], marks=pytest.mark.slow),
    ],
)
def test_a_compiled_recompute(family: str, left_out: list[Mapping[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = tiny_models.build(family), []
    shorten = compiled_block._without_outputs

    def watch(module: Any, num_outputs: int) -> Any:
        shorter = shorten(module, num_outputs)
        if shorter is not None:
            before, after = (Counter(_names(each.graph)) for each in (module, shorter))
            found.append({name: num for name, num in (before - after).items() if name in PRODUCTS})
        return shorter

    monkeypatch.setattr(compiled_block, "_without_outputs", watch)
    torch._dynamo.reset()
    grads = [
        trained(horizon_lm.stream(copy.deepcopy(plain), precision="float32", compile=True, **settings))
        for settings in ({}, {"check_recompute": True})
    ]
    assert found == left_out
    assert all(map(torch.equal, *grads))


def test_nothing_is_compiled_while_a_mode_is_active() -> None:
    """As torch does it, whose demand for one graph would be an error then: an emulated GPU is such a mode."""
    block, tensor = compiled_block.CompiledBlock(torch.cos, "inductor"), torch.randn(3)
    with counting() as counts:
        assert torch.equal(block(True, tensor), tensor.cos())
    assert counts["cos"] == 2


def _names(graph: Any) -> list[str]:
    targets = (node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return [target._schema.name.removeprefix("aten::") for target in targets]
