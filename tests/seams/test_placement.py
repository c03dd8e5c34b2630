"""``device_map`` and ``max_memory`` of ``from_pretrained``: one device is the one that computes, and several are rejected."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError, IgnoredArgumentWarning
from tests.seams.use import evaluated
from tests.support import tiny_models
from tests.support.emulated_gpu import EmulatedGpu, emulated_gpu

ANYWHERE: list[Any] = ["auto", "balanced", "balanced_low_0", "sequential", None]
HOST: list[Any] = ["cpu", {"": "cpu"}, torch.device("cpu"), {"model": "cpu", "lm_head": "cpu"}]
FIRST: list[Any] = [0, "cuda:0", torch.device("cuda:0"), {"": 0}, {"": "cuda:0"}, {"model": 0, "lm_head": "cuda:0"}, "cuda"]  # fmt: skip
NOWHERE: list[Any] = [{"model": 0, "lm_head": 1}, {"model": 0, "lm_head": "cpu"}, "disk", {"": "disk"}, "meta", "nowhere", -1, True, {}, 1.5, {"": None}]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("llama", seed=2).save_pretrained(path)
    return path


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def opened(folder: Path, device: Any = "auto", **arguments: Any) -> Any:
    return horizon_lm.from_pretrained(folder, device, "float32", compile=False, **arguments)


def place(model: Any) -> str:
    """Return the name of the device that computes."""
    return str(engine_of(model).device.torch_device)


@pytest.mark.parametrize("device_map", [*ANYWHERE, *HOST], ids=str)
def test_a_map_to_host_memory_or_anywhere_changes_nothing(folder: Path, device_map: Any) -> None:
    """A model on one device has no ``hf_device_map``, as in transformers."""
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, dtype=torch.float32)
    for device in ("auto", "cpu", "simulated", SimulatedDevice()):
        model = opened(folder, device, device_map=device_map)
        assert evaluated(model) == evaluated(plain)
        assert hasattr(model, "hf_device_map") == hasattr(plain, "hf_device_map")


@pytest.mark.parametrize("device_map", [*ANYWHERE, *HOST], ids=str)
def test_weights_in_host_memory_are_computed_with_on_the_gpu(folder: Path, device_map: Any, gpu: EmulatedGpu) -> None:
    assert place(opened(folder, device_map=device_map)) == "cuda:0"
    assert place(opened(folder, "cpu", device_map=device_map)) == "cpu"


@pytest.mark.parametrize("device_map", FIRST, ids=str)
def test_a_map_to_one_gpu_chooses_the_device(folder: Path, device_map: Any, gpu: EmulatedGpu) -> None:
    for device in ("auto", "cuda", "cuda:0"):
        assert place(opened(folder, device, device_map=device_map)) == "cuda:0"
    with pytest.raises(
        ConfigError, match=r"device='cpu' and device_map=.* name different devices; leave one of them out"
    ):
        opened(folder, "cpu", device_map=device_map)


def test_the_gpu_of_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scripts that are started once for each GPU. transformers reads ``cuda`` so."""
    with emulated_gpu(index=1):
        for device_map in (1, "cuda:1", {"": 1}):
            for device in ("auto", "cuda"):
                assert place(opened(folder, device, device_map=device_map)) == "cuda:1"
        with pytest.raises(ConfigError, match="name different devices"):
            opened(folder, "cuda:0", device_map=1)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert place(opened(folder, device_map="cuda")) == "cuda:1"


@pytest.mark.parametrize("device_map", NOWHERE, ids=str)
def test_other_maps_are_rejected(folder: Path, device_map: Any) -> None:
    with pytest.raises(ConfigError, match=r"device_map=.* is not supported by a streamed model: .* device_map='auto'"):
        opened(folder, "cpu", device_map=device_map)


def test_the_limit_of_the_device_is_kept(folder: Path, gpu: EmulatedGpu) -> None:
    for max_memory in ({0: "20MB"}, {0: 20_000_000, 1: "1MB"}, {"cuda:0": "20 MB"}, {"": "20MB"}):
        assert engine_of(opened(folder, device_map="auto", max_memory=max_memory)).device.capacity == 20_000_000
    for none in (None, {}, {1: "1GB"}, {"disk": "1GB"}):
        assert engine_of(opened(folder, device_map="auto", max_memory=none)).device.capacity is None
    both = opened(folder, device_memory=30_000_000, max_memory={0: "20MB"})
    assert engine_of(both).device.capacity == 30_000_000  # the argument of ours
    other = opened(folder, "cpu", max_memory={0: "1KB"})
    assert engine_of(other).device.capacity is None  # of a device that is not used


def test_a_limit_of_host_memory_is_named_as_not_kept(folder: Path) -> None:
    """All weights, gradients and moments are there, so nothing could be done about it."""
    with pytest.warns(IgnoredArgumentWarning, match=r"max_memory.*'cpu'.*has no effect.*horizon-lm plan"):
        model = opened(folder, "cpu", device_map="auto", max_memory={0: "1GB", "cpu": "1KB"})
    assert engine_of(model).device.capacity is None


@pytest.mark.parametrize(
    "max_memory", ["1GB", 5, {0: "much"}, {0: None}, {0: 1.5}, {1.5: "1GB"}, {None: "1GB"}], ids=str
)
def test_other_limits_are_rejected(folder: Path, max_memory: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_memory=.* is not supported by a streamed model: .*device_memory"):
        opened(folder, "cpu", max_memory=max_memory)


def test_adapters_are_opened_with_the_same_arguments(folder: Path, tmp_path: Path) -> None:
    """By PEFT onto a streamed model, which has nothing to place, and with their base."""
    plain = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.float32)
    tuned = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base = opened(folder, "cpu", device_map="auto", max_memory={0: "1GB"})
        added = peft.PeftModel.from_pretrained(base, tmp_path, device_map="auto", max_memory={0: "1GB"})
    assert evaluated(added) == pytest.approx(evaluated(tuned), rel=1e-6)
    whole = opened(tmp_path, "cpu", device_map={"": "cpu"}, max_memory={0: "1GB"})
    assert evaluated(whole) == pytest.approx(evaluated(tuned), rel=1e-6)
