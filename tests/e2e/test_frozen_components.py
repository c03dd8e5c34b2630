"""Runs on a model with a tower: what they freeze by default costs nothing but its weights, and they say so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component
from horizon_lm.model.freezing import freeze
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.measure.model_outline import outline_model
from tests.census.tiny_models import build
from tests.e2e import tiny
from tests.support.planned_bytes import DEFAULTS, HERE, LENGTH, Case, train

TOWER, PROJECTOR, TEXT = Component
TRAINS_ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), tiny.build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    build("gemma3", "image_text", text_config=sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path, images: Path) -> dict[str, Any]:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    return {
        "model_name_or_path": str(images), "datasets": str(rows), "output_dir": str(tmp_path / "run"), "device": "cpu",
        "per_device_train_batch_size": 4, "max_steps": 1, "save_strategy": "no", "learning_rate": 1e-2,
    }  # fmt: skip


def run(base: dict[str, Any], **settings: Any) -> list[str]:
    """Train, and return the lines that are printed about the model."""
    printed: list[str] = []
    horizon_lm.train(base | settings, print_fn=printed.append)
    return [line for line in printed if line.startswith("model: ")]


@pytest.mark.parametrize("trains_all", [False, True])
def test_a_run_on_text_freezes_towers_and_projector(base: dict[str, Any], images: Path, trains_all: bool) -> None:
    lines = run(base, weight_decay=0.5, **(TRAINS_ALL if trains_all else {}))
    before, after = (load_file(folder / "model.safetensors") for folder in (images, Path(base["output_dir"]) / "model"))
    beside = [name for name in before if "vision_tower" in name or "projector" in name]
    assert [name for name in beside if not torch.equal(before[name], after[name])] == []
    assert not torch.equal(before["language_model.model.norm.weight"], after["language_model.model.norm.weight"])
    numel = sum(before[name].numel() for name in beside)
    assert f"model: vision tower and projector are frozen, because no row has an image: {numel:,} parameters" in lines


@pytest.mark.parametrize("settings", [{"freeze_vision_tower": False}, {"freeze_multi_modal_projector": False}])
def test_a_model_of_text_has_no_such_components(base: dict[str, Any], model: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}: false: the model has no .*; remove it"):
        run(base | {"model_name_or_path": str(model)}, **settings)


def test_a_plan_from_python_freezes_nothing() -> None:
    model = horizon_lm.stream(build("gemma3", "image_text"), precision="float32")
    planned = horizon_lm.plan(model, TrainingArguments(use_cpu=True, report_to="none"), length=16)
    assert not any("frozen" in reason for reason in planned.reasons)
    assert planned.step.outline.layout.num_trained == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("frozen", [(), (TOWER, PROJECTOR), (TOWER,), (TEXT,)])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_frozen_components_have_weights_alone(frozen: tuple[Component, ...], precision: str) -> None:
    """On rows of text, which reach no tower. Planned and counted bytes are equal."""
    model = build("gemma3", "image_text")
    freeze(model, None, frozen)
    trained = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    case = Case(2, {**DEFAULTS, "precision": precision, "device": "cpu"}, "float32", False, frozenset())
    source = ModelSource(model.config, "tiny", attn_implementation=model.config._attn_implementation)
    outline = outline_model(source, length=LENGTH, dtype=torch.float32, frozen=frozen)
    step = choose(outline, case.request, HERE).step
    streamed = horizon_lm.stream(model, **case.options)
    train(streamed, case)
    store = streamed._horizon.engine.store
    counted = {kind: n for kind, n in store.num_bytes.items() if n}
    assert counted == host_bytes(step)
    assert {name for slab in store.slabs for name in slab.grad_layout} == trained.keys()
    itemsize = 4 if precision == "float32" else 2  # of gradients; small tensors are padded
    assert counted["grads"] == pytest.approx(itemsize * sum(trained.values()), rel=0.15)
    assert counted["moments"] == pytest.approx(8 * sum(trained.values()), rel=0.15)
