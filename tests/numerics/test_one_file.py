"""The file that shows the idea, examples/in_one_file.py, has the numbers of the library, and its streams do not race."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.one_file_example import BATCHES, PATH, Weights, load, train, train_streamed
from tests.support.race_checker import RaceChecker


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return load()


def differences(got: tuple[list[torch.Tensor], Weights], expected: tuple[list[torch.Tensor], Weights]) -> list[str]:
    """Return which losses and weights differ in any bit."""
    assert got[1].keys() == expected[1].keys()
    losses = [f"loss {step}" for step, pair in enumerate(zip(got[0], expected[0], strict=True)) if not same_bits(*pair)]
    return losses + [name for name, weight in got[1].items() if not same_bits(weight, expected[1][name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("num_hidden_layers", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_library(one_file: ModuleType, tied: bool, num_hidden_layers: int) -> None:
    model = tiny_models.build("llama", tie_word_embeddings=tied, num_hidden_layers=num_hidden_layers)
    expected = train_streamed(copy.deepcopy(model))
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    got = train(one_file, model)
    assert not differences(got, expected)
    assert not any(torch.equal(weight, start[name]) for name, weight in got[1].items())


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_one_other_bit_is_a_difference(one_file: ModuleType, tied: bool, name: str) -> None:
    model = tiny_models.build("llama", tie_word_embeddings=tied)
    expected = train_streamed(copy.deepcopy(model))
    model.get_parameter(name).data.view(torch.int32).view(-1)[7] ^= 1
    assert name in differences(train(one_file, model), expected)


def test_prints_losses_that_fall(one_file: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    one_file.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 1


def test_is_short_and_imports_nothing_of_the_package() -> None:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    assert not [line for line in lines if line.lstrip().startswith(("import ", "from ")) and "horizon_lm" in line]


# On a GPU: an emulated one finds operations that mix host and device, or make the host wait, and the checker finds races.

TWO_BATCHES = BATCHES[:2]


def train_checked(
    ignored: tuple[str, str] | None = None,
) -> tuple[RaceChecker, list[str], tuple[list[torch.Tensor], Weights]]:
    """Train on an emulated GPU. Return the checker of the streams, the waits of the host, and the losses and weights."""
    with emulated_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        module, checker = load(), RaceChecker(ignored)
        assert module.HAS_GPU
        create = module.StreamedLlama

        def checked(model: Any) -> Any:
            streamed = create(model)
            host = [tensor for param in model.parameters() for tensor in (param.data, param.grad)]
            device = [tensor for each in streamed.buffers for tensor in (*each.weights.values(), *each.grads.values())]
            checker.share(host, device)
            gpu.waits.clear()  # those of the preparation
            return streamed

        patch.setattr(module, "streams", checker)
        patch.setattr(module, "StreamedLlama", checked)
        with checker:
            got = train(module, tiny_models.build("llama", num_hidden_layers=5), TWO_BATCHES)
        return checker, [wait.split()[0] for wait in gpu.waits], got


def test_streams_do_not_race(one_file: ModuleType) -> None:
    checker, waits, got = train_checked()
    assert not checker.races
    assert checker.num_copies > 0
    assert waits == ["to", "to", "to", "cpu"] * len(TWO_BATCHES)  # the batch to the GPU, and the gradients of rows back
    assert not differences(got, train(one_file, tiny_models.build("llama", num_hidden_layers=5), TWO_BATCHES))


@pytest.mark.parametrize(
    "wait",
    [
        ("wait_stream", "fetch"), ("wait", "weights_of"), ("wait", "land"), ("wait_stream", "land"),
        ("synchronize", "land_rows"),
    ],
)  # fmt: skip
def test_every_wait_is_needed(wait: tuple[str, str]) -> None:
    assert train_checked(wait)[0].races
