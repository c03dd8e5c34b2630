"""Generation within device memory: its key-value cache is counted before the first token, and blocks make room for it."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import DeviceMemoryError, StreamingError
from horizon_lm.model.generation import Generation, cache_of, layer_bytes
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.measure.cache_probe import CacheProbe
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu
from tests.support.limited_device import LimitedDevice, take_room, watch_resident_blocks
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned

SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
# Windows, latent keys and values, states of linear attention, routed experts.
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3")
SHAPES = {"short": (1, 8, 8), "long answer": (2, 8, 60), "long prompt": (3, 150, 10)}  # rows, prompt, new tokens


def plain(family: str) -> Any:
    known = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    if family not in known:
        pytest.skip(f"this transformers has no {family}")
    # With a cache, older versions of transformers cannot compute the auxiliary loss, which generation does not need.
    without = {"output_router_logits": False} if family in tiny_models.MOE_WITH_AUXILIARY_LOSS else {}
    return tiny_models.build(family, **SIZES, **without).eval()


def prompts(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, tiny_models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def generate(model: Any, rows: int, prompt: int, new: int, **settings: Any) -> torch.Tensor:
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | settings
    ids = prompts(rows, prompt)
    result: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return result


@pytest.mark.parametrize(("family", "shape"), thinned(itertools.product(FAMILIES, SHAPES), every=4))
def test_the_stated_peak_is_not_exceeded(family: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of all storages, those of the device's buffers and of the cache among them."""
    expected = generate(plain(family), *SHAPES[shape])
    with StorageMeter() as meter:
        model = horizon_lm.stream(plain(family), LimitedDevice(10**9), precision="float32", resident_blocks=1).eval()
        generate(model, 1, 2, 1)
        before, memory = meter.current, model._horizon.generation
        allocated, reserve = model._horizon.engine.device.counters.allocated_total, memory.reserve

        def count_from_here(*args: Any) -> None:
            reserve(*args)
            meter.peak = meter.current  # trials on the meta device have a few tensors in host memory

        monkeypatch.setattr(memory, "reserve", count_from_here)
        got = generate(model, *SHAPES[shape])
        used = meter.peak - before + allocated
    print(f"stated {memory.peak:,}, counted {used:,}")
    assert torch.equal(got, expected)
    assert 0.8 * memory.peak < used <= memory.peak


@pytest.mark.parametrize("implementation", thinned(["static", "dynamic"], every=2))
def test_resident_blocks_make_room_for_the_time_of_a_call(implementation: str) -> None:
    """Of two resident blocks one is given up, and it is resident again after the call."""
    expected = generate(plain("llama"), 2, 8, 120, cache_implementation=implementation)
    device = LimitedDevice(10**9)
    model = horizon_lm.stream(plain("llama"), device, precision="float32", resident_blocks=2).eval()
    assert torch.equal(generate(model, 2, 8, 120, cache_implementation=implementation), expected)
    take_room(model, device)
    seen = watch_resident_blocks(model)
    assert torch.equal(generate(model, 2, 8, 120, cache_implementation=implementation), expected)
    assert (set(seen), model._horizon.engine.residency.weights) == ({1}, 2)


def test_a_cache_that_does_not_fit_is_rejected_before_the_first_token() -> None:
    with emulated_gpu(free_bytes=2_000_000):
        model = horizon_lm.stream(plain("llama"), CudaDevice(), "float32", compile=False).eval()
        generate(model, 1, 8, 8)
        computed = horizon_lm.stats(model)["block_forward_rows"]
        words = r"key-value cache: .* for 60 rows of 127 tokens, .* for buffers\. Generate fewer rows at once or fewer tokens"
        with pytest.raises(DeviceMemoryError, match=words):
            generate(model, 20, 8, 120, num_beams=3)
        assert horizon_lm.stats(model)["block_forward_rows"] == computed
        generate(model, 1, 8, 8)


def test_the_error_names_the_same_buffers_with_a_given_cache() -> None:
    """The layers that a cache has already are no part of the call's peak, nor of the buffers."""
    model = horizon_lm.stream(plain("llama"), LimitedDevice(10**9), precision="float32").eval()
    cache = cache_of(generate(model, 20, 8, 120, return_dict_in_generate=True))
    model._horizon.engine.device.limit = 0
    buffers = set()
    for layers in ([], cache.layers):
        with pytest.raises(DeviceMemoryError) as error:
            model._horizon.generation.reserve(Generation(rows=20, prompt=8, length=127), SimpleNamespace(layers=layers))
        buffers |= set(re.findall(r"computing, (.*) for buffers", str(error.value)))
    assert len(buffers) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_cache_are_known_without_weights(family: str) -> None:
    """A dynamic cache has these bytes when the last token is computed, if no window has dropped a part of the prompt."""
    model = plain(family)
    probe = CacheProbe(ModelSource(model.config, family), torch.float32, accelerated=False)
    cache = cache_of(generate(model, 2, 2, 40, return_dict_in_generate=True))
    assert probe.cache_bytes(Generation(rows=2, prompt=2, length=41)) == sum(map(layer_bytes, cache.layers))


class NoStream:
    """A stream and the default stream of a device that computes everything at once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded static": {"cache_implementation": "offloaded_static"},
    "none": {"use_cache": False},
    "of beams": {"num_beams": 3},
    "of prompts in chunks": {"prefill_chunk_size": 3},
}


def answers(model: Any, rows: int = 2, **settings: Any) -> list[torch.Tensor]:
    """Return the tokens of two answers, the first to a padded prompt, and the logits of each step."""
    ids = prompts(2, 9)
    ids[0, :3] = 0
    found = model.generate(
        ids[-rows:], attention_mask=(ids[-rows:] != 0).long(), max_new_tokens=10, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    return [found.sequences, *found.logits]


# Dense, with windows that the answer exceeds, and a mixture.
@pytest.mark.parametrize(
    ("family", "tile"), [("llama", None), ("gemma3_text", None), ("mixtral", None), ("mixtral", 2)]
)
def test_bits_of_plain_answers(family: str, tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each kind of cache, and with drafts, whose rejected tokens are taken out of the cache."""
    for module, name in (
        (torch, "Stream"),
        (torch.cuda, "Stream"),
        (torch.cuda, "stream"),
        (torch.cuda, "default_stream"),
    ):
        monkeypatch.setattr(module, name, lambda *args: NoStream())
    model, drafting = plain(family), plain(family)
    with torch.no_grad():  # drafts that are often wrong
        drafting.lm_head.weight.add_(torch.randn(drafting.lm_head.weight.shape, generator=torch.Generator()) * 0.02)
    assistant = horizon_lm.stream(drafting, "cpu", "float32", expert_tile=tile).eval()
    streamed = horizon_lm.stream(plain(family), "cpu", "float32", expert_tile=tile).eval()
    drafts = {"draft": {"rows": 1, "assistant_model": assistant}, "copied": {"rows": 1, "prompt_lookup_num_tokens": 3}}
    for kind, settings in (CACHES | drafts).items():
        expected, got = answers(model, **settings), answers(streamed, **settings)
        assert len(got) == len(expected), kind
        assert all(map(torch.equal, got, expected)), kind


def test_drafts_of_the_first_blocks_are_rejected() -> None:
    model = horizon_lm.stream(plain("llama"), "cpu", "float32").eval()
    with pytest.raises(StreamingError, match="draft with assistant_model or prompt_lookup_num_tokens"):
        answers(model, rows=1, assistant_early_exit=1)
    answers(model)
