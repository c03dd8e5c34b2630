"""Entropy and accuracy of tokens equal those of Hugging Face's logits, and change neither loss, gradients, memory nor waits."""

import copy
import itertools
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.host_copy import HostCopy
from horizon_lm.engine.units.token_statistics import TokenStatistics, collect_statistics
from horizon_lm.model import compiling, functional
from horizon_lm.planning.measure.meta_recorder import Recorder
from tests.support import tiny_models
from tests.support.emulated_gpu import EmulatedGpu, emulated_gpu
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned

HEADS: dict[str, dict[str, Any]] = {
    "chunked": {"head": "chunked", "head_chunk_tokens": 5},
    "chunked, micro-batches": {"head": "chunked", "head_chunk_tokens": 64, "device_micro_batch_size": 1},
    "whole": {"head": "whole"},
}


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return statistics (B, T) by definition, from all logits (B, T, V) of a forward."""
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    probs = torch.softmax(logits.detach().double(), -1)
    counts = target != -100
    entropy = -torch.xlogy(probs, probs).sum(-1) * counts
    return {"entropy": entropy.float(), "is_top1": ((logits.argmax(-1) == target) & counts).float()}


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    """Return padded or packed rows with different numbers of targets."""
    inputs = tiny_models.batch()
    inputs["labels"][0, :5] = -100
    if kind == "packed":
        del inputs["attention_mask"]
        length = inputs["input_ids"].shape[1]
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(length - 7)]).expand_as(inputs["input_ids"])
        inputs["labels"] = inputs["input_ids"].where(inputs["position_ids"] != 0, -100)
    return inputs


@pytest.mark.parametrize(
    ("family", "kind", "head"),
    thinned(itertools.product(("llama", "gemma2", "granite", "gpt2", "mixtral"), ("padded", "packed"), HEADS), every=5),
)
def test_equal_those_of_all_logits(family: str, kind: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_CACHED_LOGITS", 3 * tiny_models.VOCABULARY)
    plain, inputs = tiny_models.build(family).eval(), inputs_of(kind)
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", **HEADS[head])
    logits = plain(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits
    # Random weights hardly ever hit a label, so half of them become the likeliest token.
    hit = torch.rand(logits.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.5
    inputs["labels"] = inputs["labels"].where(~(hit & (inputs["labels"] != -100)), logits.argmax(-1).roll(1, 1))
    expected = of_logits(logits, inputs["labels"])
    assert 0 < expected["is_top1"].mean() < 0.8
    for forward in (streamed, lambda **call: horizon_lm.token_logprobs(streamed, **call)):
        with collect_statistics(streamed) as statistics:
            forward(**inputs)
        for name in functional.STATISTICS:
            torch.testing.assert_close(statistics.values[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_loss_and_gradients_have_the_same_bits(precision: str, head: str) -> None:
    model = tiny_models.build("llama")
    found = []
    for collected in (False, True):
        streamed = horizon_lm.stream(copy.deepcopy(model), device="cpu", precision=precision, **HEADS[head])
        with collect_statistics(streamed) as statistics:
            if not collected:
                streamed._horizon.statistics = None
            # The head's buffer belongs to the first forward, so the second one computes its gradients in its backward.
            losses = [streamed(**tiny_models.batch(seed=seed)).loss for seed in (1, 2)]
            losses[1].backward()
            losses[0].backward()
        assert bool(statistics.values) == collected
        found.append([*(loss.detach() for loss in losses), *(p.grad for p in streamed.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_backward_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the chunks of one of two forwards a second time."""
    calls = []
    compute = functional._statistics
    monkeypatch.setattr(functional, "_statistics", lambda *piece: calls.append(piece) or compute(*piece))
    streamed = horizon_lm.stream(tiny_models.build("llama"), precision="float32", head="chunked")
    with collect_statistics(streamed):
        losses = [streamed(**tiny_models.batch(seed=seed)).loss for seed in (1, 2)]
        assert len(calls) == 2
        sum(losses).backward()
    assert len(calls) == 2


def test_evaluation_and_batches_without_targets() -> None:
    streamed = horizon_lm.stream(tiny_models.build("llama").eval(), precision="float32", **HEADS["chunked"])
    inputs = inputs_of("padded")
    with collect_statistics(streamed) as statistics:
        streamed(**inputs)
        trained = statistics.values
        with torch.inference_mode():
            streamed(**inputs)
        assert all(torch.equal(statistics.values[name], trained[name]) for name in functional.STATISTICS)
        streamed(**inputs | {"labels": torch.full_like(inputs["labels"], -100)})
        assert not any(values.any() for values in statistics.values.values())
    assert trained["entropy"].any()


def test_masked_vocabulary_ties_and_half_precision() -> None:
    """A logit of minus infinity has probability 0; of equal logits, the first is the likeliest."""
    logits = torch.tensor([[2.0, 2.0, -torch.inf, 1.0], [0.0, 9e4, 0.0, -torch.inf]])
    expected = torch.distributions.Categorical(logits=logits.clamp(min=-1e6)).entropy()
    for dtype in (torch.float32, torch.bfloat16):
        for label, top in ((0, [1.0, 0.0]), (1, [0.0, 1.0])):
            values = functional.token_statistics(logits.to(dtype), torch.tensor([label, label]))
            torch.testing.assert_close(values["entropy"], expected, rtol=1e-6, atol=1e-6)
            assert values["is_top1"].tolist() == top


@pytest.mark.parametrize(("head", "objective"), thinned(product(("chunked", "whole"), ("loss", "logprobs"))))
def test_peak_memory_is_the_same(head: str, objective: str) -> None:
    """The vocabulary is so large that the loss determines the peak, which is in the backward."""
    tokens = 256
    model = tiny_models.build("llama", vocab_size=40_000, max_position_embeddings=tokens)
    ids = torch.randint(3, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))

    def backward(streamed: Any) -> None:
        if objective == "loss":
            streamed(input_ids=ids, labels=ids).loss.backward()
        else:
            horizon_lm.token_logprobs(streamed, input_ids=ids, labels=ids).logprobs.sum().backward()

    peaks = []
    for collected in (False, True):
        options = {"head_chunk_tokens": 128} if head == "chunked" else {}
        streamed = horizon_lm.stream(copy.deepcopy(model), precision="float32", head=head, **options)
        backward(streamed)  # allocates the buffers
        streamed.zero_grad()
        with collect_statistics(streamed), StorageMeter() as storages:
            if not collected:
                streamed._horizon.statistics = None
            backward(streamed)
        peaks.append(storages.peak)
    assert peaks[1] <= peaks[0] + 64 * tokens


class _Operations(TorchDispatchMode):
    """Context manager: count operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("head", ["chunked", "whole"])
def test_an_accelerator_runs_few_operations(gpu: EmulatedGpu, head: str) -> None:
    """Their number depends on the number of chunks, and not on that of tokens or the size of the vocabulary."""
    logits = torch.empty(2304, 152_064, dtype=torch.bfloat16, device="meta")  # a chunk of a 7B model
    with _Operations() as of_chunk:
        functional.token_statistics(logits, torch.empty(2304, dtype=torch.int64, device="meta"))
    assert of_chunk.count < 40
    options = {"head": head} | ({"head_chunk_tokens": 512} if head == "chunked" else {})
    ids = torch.randint(3, tiny_models.VOCABULARY, (8, 128), generator=torch.Generator().manual_seed(0))
    model = horizon_lm.stream(
        tiny_models.build("llama", max_position_embeddings=128), CudaDevice(), "float32", compile=False, **options
    )
    counts = []
    for collected in (False, True, False, True):  # the first step allocates the buffers
        with collect_statistics(model), _Operations() as of_forward:
            if not collected:
                model._horizon.statistics = None
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()
        counts.append(of_forward.count)
    assert counts[3] - counts[2] < 2 * 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps_logits", [False, True], ids=["chunked", "whole"])
def test_an_accelerator_needs_no_more_memory(dtype: torch.dtype, keeps_logits: bool) -> None:
    """The plan counts the backward pass of the loss, which needs more than the statistics do."""
    config = SimpleNamespace(vocab_size=50_000)
    peaks = []
    for collected in (False, True):
        with Recorder(None) as recorder:
            hidden = torch.empty(1, 512, 1, dtype=dtype, device="meta").requires_grad_()
            logits = hidden @ torch.empty(1, config.vocab_size, dtype=dtype, device="meta")
            labels = torch.empty(1, 512, dtype=torch.int64, device="meta")
            loss = ForCausalLMLoss(logits, labels, shift_labels=labels, num_items_in_batch=512, **vars(config))
            if collected:
                statistics = TokenStatistics()
                statistics.begin(labels, compiled=False)
                trained = torch.empty(512, dtype=torch.int64, device="meta")
                statistics.add_batch(trained, logits) if keeps_logits else statistics.add(trained, logits[0])
            if not keeps_logits:
                del logits
            loss.backward()
        peaks.append(recorder.peak)
    assert peaks[1] <= peaks[0] + 64 * 512


@pytest.mark.parametrize("dtype", thinned((torch.bfloat16, torch.float32), every=2), ids=str)
def test_compiled_statistics_are_the_same(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (48, 7):
        logits = (4 * torch.randn(num_tokens, 999, generator=generator)).to(dtype)
        logits[:, 3], logits[0, 4:] = -torch.inf, -torch.inf
        labels = logits.argmax(-1).where(torch.arange(num_tokens) % 2 == 0, 0)
        expected = functional.token_statistics(logits, labels)
        got = functional.token_statistics(logits, labels, compiled=True)
        for name in functional.STATISTICS:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("compiles", [False, True])
def test_statistics_are_compiled_if_blocks_are(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(compiling, "_compile", lambda function, backend: compiled.append(function) or function)
    for head in ("chunked", "whole"):
        streamed = horizon_lm.stream(tiny_models.build("llama"), device="cpu", compile=compiles, head=head)
        with collect_statistics(streamed):
            streamed(**tiny_models.batch())
    assert compiled.count(functional._fused_statistics) == (2 if compiles else 0)


@pytest.mark.usefixtures("whole_installation")
def test_the_host_does_not_wait(gpu: EmulatedGpu) -> None:
    from horizon_lm.runs.data.batch import Batch
    from horizon_lm.runs.objective import sft

    model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), "float32", compile=False, **HEADS["chunked"])
    inputs = inputs_of("padded")
    ids, labels = inputs["input_ids"], inputs["labels"]
    num_trained = int((labels[:, 1:] != -100).sum())
    batch = Batch(ids, inputs["attention_mask"], None, labels, num_trained, ids.numel(), (), ())
    for _ in range(2):
        gpu.waits.clear()
        loss = sft.nll(model, batch)
        number = HostCopy(loss.value)
        loss.value.backward()
        model.zero_grad()
    # Reading waits for events behind the forward pass, not for all that is queued, as `item` does.
    assert number.read().item() > 0
    loss.token_metrics["entropy"].means(1)
    assert gpu.waits == []
    loss.value.item()
    assert len(gpu.waits) == 1


@pytest.mark.usefixtures("whole_installation")
def test_means_are_those_of_micro_batches() -> None:
    """As in TRL, micro-batches have equal weights, whatever the number of their targets."""
    from horizon_lm.runs.objective.base import Loss, TokenSums
    from horizon_lm.runs.training.metrics import Metrics, StepResult

    sums = TokenSums(HostCopy(torch.tensor([4.0, 2.0, 9.0, 0.0, 0.0])), torch.tensor([2, 1, 9, 0, 0]))
    assert sums.means(2) == [2.0, 1.0, 0.0]
    assert sums.means(5) == [15 / 12]

    outline = SimpleNamespace(step_flops=lambda tokens: 1.0)
    plan = SimpleNamespace(
        step=SimpleNamespace(outline=outline, tokens=1), time=None, buffers=SimpleNamespace(bytes=1),
        host=SimpleNamespace(bytes=1),
    )  # fmt: skip
    measured = Metrics(10, 5, plan)
    batch = SimpleNamespace(places=("",) * 5, is_stand_in=False, num_trained=12, num_tokens=20)
    more = TokenSums(HostCopy(torch.tensor([5.0])), torch.tensor([1]))

    def add(value: float, sums: TokenSums) -> None:
        loss = Loss(torch.tensor(1.0), 12.0, token_metrics={"entropy": sums})
        measured.add(StepResult.of(value, loss, batch, 2), 1e-3)

    add(1.0, sums)
    add(float("nan"), more)  # skipped
    add(1.0, more)
    model = horizon_lm.stream(tiny_models.build("llama"), device="cpu")
    optimizer = SimpleNamespace(grad_norm=1.0, unit_grad_norms={}, num_skipped=1)
    assert measured.line(3, optimizer, model)["entropy"] == (2.0 + 1.0 + 0.0 + 5.0) / 4
    add(1.0, more)
    assert measured.line(4, optimizer, model)["entropy"] == 5.0
