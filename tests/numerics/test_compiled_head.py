"""The loss of a chunk in compiled code, and the head's gradient as one product a chunk."""

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import horizon_lm
from horizon_lm.engine.units.token_statistics import collect_statistics
from horizon_lm.model import chunk_linear
from horizon_lm.model.compiling import compiled_loss
from horizon_lm.model.functional import STATISTICS, logprobs_of_logits, token_statistics
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.head_probe import head_costs
from tests.support import tiny_models

# torch.compile reads the gradient of a chunk's logits; the warning is hidden unless warnings are errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
TOKENS, VOCABULARY = 24, 4999
VALUES = ["logprobs", "mean", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1"]


def loss(logits: torch.Tensor, labels: torch.Tensor, compiled: bool) -> list[torch.Tensor]:
    """Return the loss of a chunk, as the model's own loss function computes it."""
    model = tiny_models.build("llama")

    def compute() -> list[torch.Tensor]:
        target = labels[None]
        return [
            model.loss_function(
                logits=logits[None], labels=target, shift_labels=target, vocab_size=VOCABULARY, num_items_in_batch=torch.tensor(7)
            )
        ]  # fmt: skip

    if not compiled:
        return compute()
    with compiled_loss(model):
        return compute()


def values(logits: torch.Tensor, labels: torch.Tensor, compiled: bool) -> list[torch.Tensor]:
    return logprobs_of_logits(logits, labels, 1.0, VALUES, compiled)


def statistics(logits: torch.Tensor, labels: torch.Tensor, compiled: bool) -> list[torch.Tensor]:
    return list(token_statistics(logits, labels, compiled).values())


def run(
    compute: Callable[..., list[torch.Tensor]], compiled: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the results of a computation, and the gradient of its logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((TOKENS, VOCABULARY), generator=generator).bfloat16().requires_grad_()
    results = compute(logits, torch.randint(VOCABULARY, (TOKENS,), generator=generator), compiled)
    differentiable = [each for each in results if each.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(each) for each in differentiable])
    return [each.detach() for each in results], [logits.grad]


def tensors_of_logits(code: str) -> list[str]:
    """Return the dtypes of the tensors of the size of the logits that generated code makes."""
    made = re.findall(r"empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.(\w+)\)", code)
    return [dtype for shape, dtype in made if str(VOCABULARY) in shape]


@needs_compiler
@pytest.mark.parametrize(
    ("compute", "made"), [(loss, [[], ["bfloat16"]]), (values, [[], ["bfloat16"]]), (statistics, [[]])]
)
def test_compiled_code_makes_no_tensor_but_the_gradient_of_the_logits(
    compute: Callable[..., list[torch.Tensor]], made: list[list[str]]
) -> None:
    torch._dynamo.reset()
    if compute is statistics:  # without a graph, and without a gradient
        arguments = torch.randn((TOKENS, VOCABULARY)).bfloat16(), torch.randint(VOCABULARY, (TOKENS,))
        results, codes = run_and_get_code(compute, *arguments, True)
        expected = compute(*arguments, False)
    else:
        results, codes = run_and_get_code(run, compute, True)
        expected = run(compute, False)
    torch.testing.assert_close(results, expected, rtol=1e-2, atol=1e-4)  # gradients in bfloat16
    assert [tensors_of_logits(code) for code in codes] == made


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_compiled_loss_and_gradients_are_close_to_plain_ones(family: str) -> None:
    """In several chunks, with the number of targets given as a number and as a tensor."""
    plain = tiny_models.build(family)
    settings: dict[str, Any] = {"precision": "float32", "head": "chunked", "head_chunk_tokens": 7}
    eager = horizon_lm.stream(copy.deepcopy(plain), compile=False, **settings)
    compiled = horizon_lm.stream(plain, compile=True, **settings)
    for number in (11, 13, torch.tensor(13)):
        found = []
        for model in (eager, compiled):
            model.zero_grad()
            with collect_statistics(model) as collected:
                result = model(**tiny_models.batch(), num_items_in_batch=number).loss
            result.backward()
            found.append((result.detach(), collected.values, gradients(model)))
        (expected, of_tokens, grads), (got, same_of_tokens, same_grads) = found
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(same_of_tokens, of_tokens, rtol=1e-4, atol=1e-5)
        for name, grad in grads.items():
            assert (same_grads[name] - grad).norm() <= 1e-5 * grad.norm().clamp(min=1e-3), name
    assert set(STATISTICS) == of_tokens.keys()
    assert "_loss_function" not in vars(compiled)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@needs_compiler
def test_another_number_of_targets_compiles_nothing() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32", compile=True)
    batch = tiny_models.batch()
    model(**batch).loss.backward()
    graphs = counters["stats"]["unique_graphs"]
    for targets in (3, 5, 6):
        model.zero_grad()
        labels = batch["labels"].clone()
        labels[:, targets + 1 :] = -100
        model(**batch | {"labels": labels}).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_loss_function_of_the_user_is_restored() -> None:
    model = tiny_models.build("llama")

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())

    model.loss_function = own
    with compiled_loss(model):
        assert model.loss_function is not own
    assert model.loss_function is own


def test_compiled_head_costs_less() -> None:
    """Two bytes of a logit and two of its gradient, and no passes over float32 copies."""
    parts = find_parts(tiny_models.build("llama", vocab_size=VOCABULARY))
    eager, compiled = (
        head_costs(parts, parts.trunks()[-1], torch.bfloat16, chunked=True, compiled=each, values=())
        for each in (False, True)
    )
    tokens = 4096
    assert 4 * VOCABULARY * tokens <= compiled.peak.at(tokens) < 1.1 * 4 * VOCABULARY * tokens
    assert eager.peak.at(tokens) > 2.5 * compiled.peak.at(tokens)
    assert compiled.forward.at(tokens).products == eager.forward.at(tokens).products
    moved, moved_before = (each.forward.at(tokens) + each.backward.at(tokens) for each in (compiled, eager))
    assert moved.moved_bytes < 0.4 * moved_before.moved_bytes


# The head's gradient


@pytest.fixture
def float32_sums() -> Iterator[list[bool]]:
    """Give the CPU torch's kernel that adds products to a float32 sum, which it lacks. Yield whether each call wrote to its input."""
    in_place: list[bool] = []

    def addmm(
        total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, *,
        beta: float = 1, alpha: float = 1, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        in_place.append(total.data_ptr() == out.data_ptr())
        assert dtype == out.dtype == torch.float32
        product = alpha * (left.float() @ right.float())
        return out.copy_(product + beta * total if beta else product)  # torch ignores NaN in a sum of weight 0

    chunk_linear._can_add.cache_clear()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", addmm, "CPU")
        yield in_place
    chunk_linear._can_add.cache_clear()


def head_grad(unrounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the gradients of two chunks, and the exact one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((5000, 16), generator=generator).bfloat16()
    total, exact = torch.full((5000, 16), torch.nan), torch.zeros((5000, 16), dtype=torch.float64)
    for number in range(2):
        hidden, grad = (torch.randn((1, 9, size), generator=generator).bfloat16() for size in (16, 5000))
        leaf = hidden.requires_grad_()
        target = partial(tuple, (total, number > 0))
        logits = chunk_linear.ChunkLinear.apply(leaf, weight, None, {"weight": target}, unrounded)
        logits.backward(grad)
        exact += grad[0].double().t() @ hidden[0].detach().double()
    return total, exact


def test_products_are_added_unrounded_where_the_device_can(float32_sums: list[bool]) -> None:
    total, exact = head_grad(unrounded=True)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-5)
    assert float32_sums == [True] * 3  # of the trial, and of two chunks


def test_products_are_rounded_without_compiled_code(float32_sums: list[bool]) -> None:
    total, exact = head_grad(unrounded=False)
    error = (total.double() - exact).abs().max()
    assert 1e-3 < error < 1e-1  # of bfloat16
    assert not float32_sums


def test_products_are_rounded_where_the_device_cannot_add_them() -> None:
    chunk_linear._can_add.cache_clear()
    assert torch.equal(head_grad(unrounded=True)[0], head_grad(unrounded=False)[0])
