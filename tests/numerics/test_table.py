"""The embedding's gradient: rows of earlier steps are cleared, and no other rows."""

import copy
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import horizon_lm
from horizon_lm.device import cpu
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.cuda_link import CudaLink
from horizon_lm.device.transfers import LandRows
from horizon_lm.memory.kernels import gradients
from tests.support import tiny_models
from tests.support.gradients import assert_equal_gradients
from tests.support.queued_streams import Transport, replace_cuda

EVERYTHING = slice(None)


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the rows that each landing clears: their number, everything or nothing."""
    found: list[Any] = []
    run = LandRows.run

    def note(move: LandRows, link: Any) -> None:
        found.append(len(move.clear) if isinstance(move.clear, torch.Tensor) else move.clear)
        run(move, link)

    monkeypatch.setattr(LandRows, "run", note)
    return found


def models(tied: bool = False) -> tuple[Any, Any]:
    plain = tiny_models.build("llama", tie_word_embeddings=tied)
    return plain, horizon_lm.stream(
        tiny_models.build("llama", tie_word_embeddings=tied), precision="float32", head="whole"
    )


def same_gradients(plain: Any, streamed: Any, seed: int, zero: bool = True) -> None:
    for model in (plain, streamed):
        if zero:
            model.zero_grad()
        model(**tiny_models.batch(seed=seed), use_cache=False).loss.backward()
    streamed._horizon.engine.access.wait_for_grads()
    grads = {name: streamed._horizon.engine.store.grad(name) for name, _ in streamed.named_parameters()}
    for name, param in plain.named_parameters():
        assert torch.equal(param.grad, grads[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_the_previous_step_are_cleared(tied: bool, cleared: list[Any]) -> None:
    plain, streamed = models(tied)
    for seed in range(4):
        same_gradients(plain, streamed, seed)
    if tied:  # the head's gradient has all rows
        assert cleared == [None] * 4
    else:
        ids = [set(tiny_models.batch(seed=seed)["input_ids"].flatten().tolist()) for seed in range(4)]
        overwritten = [len(before & now) for before, now in pairwise(ids)]
        assert min(overwritten) > 0
        assert cleared == [EVERYTHING, *(len(before - now) for before, now in pairwise(ids))]


def test_everything_is_cleared_after_accumulation(cleared: list[Any]) -> None:
    plain, streamed = models()
    for seed, zero in enumerate((True, True, False, True)):
        same_gradients(plain, streamed, seed, zero)
    assert [type(number) for number in cleared] == [slice, int, type(None), slice]


def test_a_gradient_held_by_other_code_is_cleared(cleared: list[Any]) -> None:
    plain, streamed = models()
    same_gradients(plain, streamed, 0)
    gradient = streamed.get_input_embeddings().weight.grad
    same_gradients(plain, streamed, 1)
    streamed.zero_grad()
    gradient.fill_(7.0)
    same_gradients(plain, streamed, 2)
    assert cleared == [EVERYTHING] * 3


def test_rows_are_cleared_before_the_host_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the copies is ahead of the device then, so clearing takes no time at the end of the backward pass."""
    table, rows, clear = torch.ones(6, 4), torch.tensor([1, 2]), torch.tensor([0, 5])
    cleared: list[bool] = []

    class Waiting:
        def record(self) -> None:
            return

        def synchronize(self) -> None:
            cleared.append(not table[clear].any())

    replace_cuda(monkeypatch)
    monkeypatch.setattr(
        Transport, "stage", lambda _, numel, dtype: (torch.empty(numel, dtype=dtype), Waiting()), raising=False
    )
    link = CudaLink(torch.device("cpu"))
    LandRows(table, torch.full((2, 4), 3.0), rows, clear=clear, add=False, report=float).run(link)
    assert cleared == [True]
    assert table[:, 0].tolist() == [0, 3, 3, 1, 1, 0]


def make_threads_meet(monkeypatch: pytest.MonkeyPatch, name: str) -> set[str]:
    """Make two calls of a kernel wait for each other, so that only two threads can finish them. Return the names of threads."""
    compile_kernel = getattr(gradients, name)
    seen: set[str] = set()
    barrier = threading.Barrier(2, timeout=60)

    def meeting(*args: Any) -> Any:
        land = compile_kernel(*args)

        def run(*arrays: Any) -> float:
            seen.add(threading.current_thread().name)
            barrier.wait()
            return float(land(*arrays))

        return run

    monkeypatch.setattr(gradients, name, meeting)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_rows_land_in_several_threads(dtype: torch.dtype, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient and its sum of squares do not depend on the number of threads, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(300, 64, generator=generator).to(dtype) if add else torch.zeros(300, 64, dtype=dtype)
    source = torch.randn(200, 64, generator=generator).to(dtype)
    rows = torch.randperm(300, generator=generator)[:200].sort().values
    expected = before.clone()
    expected[rows] = (expected[rows].float() + source.float()).to(dtype)
    seen = make_threads_meet(monkeypatch, "rows_kernel")
    monkeypatch.setattr(cpu, "_LANDED_ELEMENTS", 100 * 64)
    sums = []
    for threads in (2, 4):
        seen.clear()
        monkeypatch.setattr(cpu, "usable_cores", lambda threads=threads: threads)
        table = before.clone()
        sums.append(HostLink().land_rows(table, source, rows, add))
        assert torch.equal(table, expected)
    assert len(seen) == 2
    assert sums[0] == sums[1]
    change = expected.double().square().sum() - before.double().square().sum()
    torch.testing.assert_close(torch.tensor(sums[0], dtype=torch.float64), change, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("add", [False, True])
def test_slabs_land_in_several_threads(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient and its sum of squares do not depend on the number of threads, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    before, source = (torch.randn(4000, generator=generator) for _ in range(2))
    kept = before.bfloat16()
    expected = (kept.float() + source if add else source).bfloat16()
    seen = make_threads_meet(monkeypatch, "landing_kernel")
    monkeypatch.setattr(cpu, "_LANDED_ELEMENTS", 1000)
    sums = []
    for threads in (2, 4):
        seen.clear()
        monkeypatch.setattr(cpu, "usable_cores", lambda threads=threads: threads)
        landed = kept.clone()
        sums.append(HostLink().land(landed, source, add))
        assert torch.equal(landed, expected)
    assert len(seen) > 1
    assert sums[0] == sums[1]
    assert sums[0] == pytest.approx(float(expected.double().square().sum()), rel=1e-12)


def test_an_interrupted_landing_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing of the next pass would race with it."""
    begun, ended = threading.Event(), threading.Event()

    def compile_kernel(*_: Any) -> Any:
        def land(target: Any, source: Any) -> float:
            if target[0]:
                begun.wait(60)
                raise KeyboardInterrupt
            begun.set()
            ended.wait(0.2)  # nobody sets it: long enough to be at work when the other thread is interrupted
            ended.set()
            return 0.0

        return land

    monkeypatch.setattr(gradients, "landing_kernel", compile_kernel)
    monkeypatch.setattr(cpu, "_LANDED_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "usable_cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        HostLink().land(torch.tensor([1.0, 0.0]), torch.zeros(2), False)
    assert ended.is_set()


class _WithPlaceholders(LlamaForCausalLM):  # type: ignore[misc]
    """A model that finds the placeholders of images among the embeddings of its caller, as Gemma 4 does."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
        if inputs_embeds is not None:
            placeholder = self.get_input_embeddings()(torch.tensor(7, device=inputs_embeds.device))
            inputs_embeds = inputs_embeds.where(
                (inputs_embeds != placeholder).any(-1, keepdim=True), 0.5 * inputs_embeds
            )
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)


@pytest.mark.filterwarnings("ignore::horizon_lm.UnprovenModelWarning")
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_lookup_beside_the_embeddings_of_the_caller(device: str) -> None:
    plain = _WithPlaceholders(tiny_models.build("llama").config)
    model = horizon_lm.stream(
        copy.deepcopy(plain), device, precision="float32", head="whole", allow_unproven_model=True
    )
    ids = torch.tensor([[5, 7, 9, 7, 3]])
    hidden = plain.get_input_embeddings()(ids).detach()
    losses = [each(inputs_embeds=hidden, labels=ids, use_cache=False).loss for each in (plain, model)]
    assert torch.equal(*losses)
    assert losses[0] != plain(input_ids=ids, labels=ids).loss
    for loss in losses:
        loss.backward()
    assert_equal_gradients(model, plain)


def test_lookups_during_a_backward_pass_and_after_one_that_failed() -> None:
    plain, model = models()
    ids = tiny_models.batch()["input_ids"]
    found: list[torch.Tensor] = []

    def look_up(grad: torch.Tensor) -> None:
        found.append(model.get_input_embeddings()(ids))
        if len(found) > 1:
            raise ZeroDivisionError

    def backward() -> None:
        output = model(**tiny_models.batch(), output_hidden_states=True)
        output.hidden_states[1].register_hook(look_up)
        output.loss.backward()

    backward()
    with pytest.raises(ZeroDivisionError):
        backward()
    with torch.no_grad():
        found.append(model.get_input_embeddings()(ids))
    expected = plain.get_input_embeddings()(ids)
    assert len(found) == 3
    assert all(torch.equal(each, expected) for each in found)
