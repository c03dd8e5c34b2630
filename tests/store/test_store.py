"""Slabs, layouts, the split of masters, and reading and writing of folders."""

import copy
import json
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.common.constants import PAGE, SLAB_ALIGNMENT
from horizon_lm.errors import CheckpointWarning, ConfigError, ModelNotSupportedError
from horizon_lm.memory.arena import Arena
from horizon_lm.memory.layout.slabs import SlabLayout
from horizon_lm.memory.precision import join_master, split_master
from tests.support import tiny_models
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200))
def test_split_and_join_are_inverse(bits: list[int]) -> None:
    master = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_master(master, high, low)
    joined, numbers = join_master(high, low), ~master.isnan()
    assert torch.equal(joined[numbers].view(torch.int32), master[numbers].view(torch.int32))
    assert joined[~numbers].isnan().all()
    assert high[~numbers].isnan().all()


def test_high_half_is_nearest_bf16() -> None:
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    high, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, high, low)
    assert torch.equal((high.float() - master).abs(), (master.to(torch.bfloat16).float() - master).abs())


def test_arenas_are_exact_and_slabs_page_aligned() -> None:
    arena = Arena(3 * PAGE)
    first, second = arena.take(10, torch.float32), arena.take(PAGE, torch.uint8)
    assert second.data_ptr() - first.data_ptr() == PAGE
    assert first.data_ptr() % PAGE == 0
    with pytest.raises(AssertionError, match="asked for"):
        arena.take(2 * PAGE, torch.uint8)


def test_layout_views_do_not_overlap() -> None:
    layout = SlabLayout({"a": torch.Size([3, 5]), "b": torch.Size([7]), "c": torch.Size([64])})
    slab = torch.zeros(layout.numel)
    for number, name in enumerate(layout, 1):
        layout.view(slab, name).fill_(number)
    for gap in layout.gaps(slab):
        assert (gap == 0).all()
    assert [int((slab == n).sum()) for n in (1, 2, 3)] == [15, 7, 64]
    assert layout.restrict(["c", "a"]).numel == 2 * SLAB_ALIGNMENT


@pytest.mark.parametrize(("family", "precision"), thinned(product(tiny_models.FAMILIES, ("float32", "fp32_master"))))
def test_folder_round_trip(family: str, precision: str, tmp_path: Path) -> None:
    reference = tiny_models.build(family)
    reference.save_pretrained(tmp_path / "in")
    model = horizon_lm.from_pretrained(tmp_path / "in", precision=precision)
    model.save_pretrained(tmp_path / "out", max_shard_size=30_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert back.keys() == reference.state_dict().keys()
    assert [n for n, t in reference.state_dict().items() if not torch.equal(back[n], t)] == []
    assert _tensors(tmp_path / "out") == _tensors(tmp_path / "in")
    for name in ("config.json", "generation_config.json"):
        assert _json(tmp_path / "out" / name) == _json(tmp_path / "in" / name)


def _tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the name, shape and dtype of all tensors in the safetensors files of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {n: (tuple(file.get_slice(n).get_shape()), file.get_slice(n).get_dtype()) for n in file.keys()}  # noqa: SIM118
    return found


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_tied_weight_is_known_by_both_names(tmp_path: Path) -> None:
    reference = tiny_models.build("llama", tie_word_embeddings=True)
    model = horizon_lm.stream(copy.deepcopy(reference))
    table, other = (torch.randn(reference.lm_head.weight.shape) for _ in range(2))
    model.load_state_dict({"lm_head.weight": table}, strict=False)
    model.save_pretrained(tmp_path / "loaded", dtype=torch.float32)
    model.save_pretrained(tmp_path / "given", state_dict={"lm_head.weight": other})
    for folder, expected in (("loaded", table), ("given", other)):
        assert torch.equal(load_file(tmp_path / folder / "model.safetensors")["model.embed_tokens.weight"], expected)


def test_a_given_value_of_another_shape_is_not_written(tmp_path: Path) -> None:
    """It would be too late to reject it: the model is trained."""
    model = horizon_lm.stream(tiny_models.build("llama"))
    with pytest.warns(CheckpointWarning, match=r"model.norm.weight of shape \(3,\), and the model \(32,\)"):
        model.save_pretrained(tmp_path / "out", state_dict={"model.norm.weight": torch.zeros(3)})
    assert _tensors(tmp_path / "out")["model.norm.weight"][0] == (32,)


def test_export_dtype(tmp_path: Path) -> None:
    reference = tiny_models.build("llama").to(torch.bfloat16)
    model = horizon_lm.stream(copy.deepcopy(reference))
    model.save_pretrained(tmp_path / "same")
    assert {d for _, d in _tensors(tmp_path / "same").values()} == {"BF16"}
    model.save_pretrained(tmp_path / "fp32", dtype=torch.float32)
    assert {d for _, d in _tensors(tmp_path / "fp32").values()} == {"F32"}
    assert _json(tmp_path / "fp32" / "config.json")["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "same").dtype == torch.bfloat16


def test_values_that_float16_makes_infinite_are_reported(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    streamed = horizon_lm.stream(model)
    with pytest.warns(CheckpointWarning, match=r"lm_head.weight has values above 65,504, which float16 makes infinite"):
        streamed.save_pretrained(tmp_path / "half", dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed.save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)


def test_saving_again_removes_stale_shards(tmp_path: Path) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"))
    model.save_pretrained(tmp_path, max_shard_size=30_000)
    model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]


def test_streaming_keeps_parameter_objects(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tie_word_embeddings=True)
    before = dict(model.named_parameters())
    streamed = horizon_lm.stream(model)
    assert streamed is model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(param is before[name] for name, param in streamed.named_parameters())
    assert streamed.lm_head.weight is streamed.model.embed_tokens.weight


def test_random_weights_are_drawn_unit_by_unit() -> None:
    config = tiny_models.build("llama", num_hidden_layers=8).config
    torch.manual_seed(0)
    with StorageMeter() as meter:
        model = horizon_lm.from_config(config, precision="fp32_master")
    store = model._horizon.engine.store
    buffers = model._horizon.engine.device.counters.allocated_total
    drawn = 2 * max(slabs.layout.numel for slabs in store.units.values())
    assert meter.peak < drawn + buffers + 64 * 1024  # a copy of the whole model would be 4 times `drawn`
    assert 2 * sum(slabs.layout.numel for slabs in store.units.values()) > 4 * drawn
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").float()
    assert abs(weight.std().item() - config.initializer_range) < 0.3 * config.initializer_range
    assert (model.get_parameter("model.norm.weight") == 1).all()
    model(**tiny_models.batch()).loss.backward()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: _edit(f, hidden_size=64), "does not belong|shape"),
        (lambda f: _edit(f, num_hidden_layers=4), "lacks 9 of"),
    ],
    ids=["no weights", "no config", "broken config", "other width", "other depth"],
)
def test_broken_folders(break_it: Any, message: str, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path)
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=message):
        horizon_lm.from_pretrained(tmp_path)


def _edit(folder: Path, **changes: Any) -> None:
    config = _json(folder / "config.json") | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_names_without_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        horizon_lm.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="neither a folder nor a model"):
        horizon_lm.from_pretrained("somebody/something")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelNotSupportedError, match="no causal language model"):
        horizon_lm.from_pretrained(tmp_path)
