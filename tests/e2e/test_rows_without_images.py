"""Runs on a model that reads images: towers and projector are trained if rows have images and the settings ask for it, otherwise frozen."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

import horizon_lm
from horizon_lm.errors import ConfigError, StreamingError
from tests.e2e import tiny
from tests.e2e.resuming import SAVING, Runs
from tests.support import image_models

TRAINS_ALL = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_models.save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def base(tmp_path: Path, llava: Path) -> dict[str, Any]:
    """A run that trains all components; its rows are in rows.jsonl."""
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    return {
        "model_name_or_path": str(llava), "datasets": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "run"), "device": "cpu",
        "per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no", "learning_rate": 1e-2, **TRAINS_ALL,
    }  # fmt: skip


def write_images(base: dict[str, Any]) -> None:
    """Write rows with images in place of the run's rows of text."""
    file = Path(base["datasets"])
    image_models.picture().save(file.parent / "picture.png")
    tiny.write_jsonl(file, [{**row, "input": "<image>", "image": "picture.png"} for row in tiny.alpaca_rows(4)])


def about_model(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("model: ")]


def trained_beside_text(loop: Any) -> list[str]:
    """Return the parameters of tower and projector that have gradients in host memory."""
    slabs = loop.model._horizon.engine.store.slabs
    return [name for slab in slabs for name in slab.grad_layout if "vision_tower" in name or "projector" in name]


def test_rows_of_text_freeze_towers_and_projector(base: dict[str, Any], runs: Runs) -> None:
    _, lines = runs.train(base)
    assert len([line for line in lines if "are frozen, because no row has an image: " in line]) == 1
    assert trained_beside_text(runs.loops[0]) == []
    written = YAML().load(Path(base["output_dir"], "config.yaml"))
    assert written["freeze_vision_tower"] is written["freeze_multi_modal_projector"] is True


def test_rows_with_images_do_not(base: dict[str, Any], runs: Runs) -> None:
    write_images(base)
    _, lines = runs.train(base)
    assert about_model(lines) == []
    components = {name.split(".")[1] for name in trained_beside_text(runs.loops[0])}
    assert components == {"vision_tower", "multi_modal_projector"}


def test_the_language_model_can_be_frozen(base: dict[str, Any], runs: Runs) -> None:
    write_images(base)
    given = base | {"freeze_language_model": True, "use_peft": True, "lora_target_modules": "all-linear"}
    lines: list[str] = []
    result = horizon_lm.train(given, print_fn=lines.append)
    assert any("language model is frozen" in line for line in lines)
    saved = load_file(result.model_dir / "adapter_model.safetensors")
    adapted = {part for name in saved for part in ("vision_tower", "projector", "language") if part in name}
    assert adapted == {"vision_tower", "projector"}


def test_nothing_is_left_to_train(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="freeze_language_model: true leaves nothing to train, because no row has"):
        horizon_lm.train(base | {"freeze_language_model": True}, print_fn=lambda _: None)


def test_a_resume_is_exact(base: dict[str, Any], tmp_path: Path, runs: Runs) -> None:
    given = base | SAVING
    expected, _ = runs.train(given | {"output_dir": str(tmp_path / "whole")})
    runs.interrupt(given, stop_after=1)
    outcome, lines = runs.train(given)
    assert outcome == expected
    assert any("because no row has an image" in line for line in lines)


def test_a_resume_on_rows_with_images_is_rejected(base: dict[str, Any], runs: Runs) -> None:
    """The checkpoint has no moments for what these rows would train."""
    given = base | SAVING
    runs.interrupt(given, stop_after=1)
    write_images(base)
    with pytest.raises(ConfigError, match=r"freeze_vision_tower: True -> False; .*restore freeze_vision_tower"):
        horizon_lm.train(given, resume_with_changes=True, print_fn=lambda _: None)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_only_a_step_that_would_train_a_tower_is_rejected(base: dict[str, Any], with_gradients: bool) -> None:
    """No row has an image, but a custom loss may bring one."""

    def loss(model: Any, batch: Any) -> Any:
        ids = torch.full((1, 8), 5)
        ids[0, :4] = model.config.image_token_index
        with torch.set_grad_enabled(with_gradients):
            model(input_ids=ids, pixel_values=torch.ones((1, 3, 16, 16)))
        return model(**batch.inputs(), labels=batch.labels).loss

    message = "reaches CLIPVisionModel, but no training row has an image, so the vision tower and projector are frozen"
    with pytest.raises(StreamingError, match=message) if with_gradients else nullcontext():
        horizon_lm.train(base, objective=loss, print_fn=lambda _: None)


def planned(base: dict[str, Any], **settings: Any) -> list[str]:
    """Return what a plan without rows says of the model."""
    from horizon_lm.cli.plan_arguments import Size
    from horizon_lm.cli.planned_run import plan_one
    from horizon_lm.runs.config.load import as_config

    config = as_config(base | {"max_length": 32}, settings)
    return about_model(plan_one(config, None, Size(1, 1)).plan.machine.notes)


def test_a_plan_says_what_rows_decide(base: dict[str, Any]) -> None:
    assert planned(base) == ["model: if no row has an image, vision tower and projector are frozen, too"]
    (line,) = planned(base, freeze_vision_tower=True, freeze_multi_modal_projector=True)
    assert line.endswith("; set freeze_vision_tower or freeze_multi_modal_projector to false to train them")


def test_a_plan_says_the_same_of_packed_rows(base: dict[str, Any]) -> None:
    """They may have images, too."""
    lines = planned(base, packing=True)
    assert lines == planned(base)
    assert any("if no row has an image" in line for line in lines)
