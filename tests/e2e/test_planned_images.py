"""Plans of runs whose rows have images, with the processor in the model's folder and without one."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaConfig, LlavaForConditionalGeneration, PixtralVisionConfig

from horizon_lm.cli.plan_arguments import Size, read_arguments
from horizon_lm.cli.planned_run import plan_one
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import plan_lines
from tests.support.image_models import save_gemma3, save_llava, save_qwen2_5_vl

PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def planned(folder: Path, images: int | None, **settings: Any) -> Plan:
    """Plan a run on another machine, as the command does."""
    values = {"max_length": 256, "per_device_train_batch_size": 2, "device_micro_batch_size": 1} | settings
    options = [token for name, value in values.items() for token in (f"--{name}", str(value))]
    run, hardware = read_arguments(options, str(folder), "rtx-4090", None)
    return plan_one(run, hardware, Size(), images).plan


def without_processor(folder: Path) -> Path:
    for name in PROCESSOR:
        (folder / name).unlink(missing_ok=True)
    return folder


def line_of(plan: Plan) -> str:
    return next(line for line in plan_lines(plan) if line.startswith("images"))


def test_a_config_and_a_processor_say_the_same(tmp_path: Path) -> None:
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    with_processor = planned(folder, 2, image_max_pixels=4096)
    from_config = planned(without_processor(folder), 2, image_max_pixels=4096)
    assert (
        line_of(with_processor).split(maxsplit=1)[1] == "2 a row, each 64 patches in the tower and 16 tokens of the row"
    )
    assert line_of(with_processor) == line_of(from_config)
    uses = [device_use(each.step) for each in (with_processor, from_config)]
    assert uses[0] == uses[1]
    assert uses[0].images > device_use(planned(folder, 1, image_max_pixels=4096).step).images > 0


@pytest.mark.parametrize("save", [save_llava, save_gemma3])
def test_models_with_images_of_one_size(save: Any, tmp_path: Path) -> None:
    plan = planned(save(tmp_path / "model"), 1)
    assert plan.step.outline.images is not None
    assert (
        plan.step.outline.images.tokens >= 4
    )  # with line breaks and other tokens that the processor writes around them
    images = planned(without_processor(tmp_path / "model"), 1).step.outline.images
    assert images is not None
    assert images.tokens == 4
    assert "16 x 16 pixels" in images.note


def test_images_take_time(tmp_path: Path) -> None:
    """A frozen tower computes its forward pass alone, a trained one is recomputed and differentiated, too."""
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    seconds = []
    for images, frozen in ((0, True), (1, True), (4, True), (4, False)):
        plan = planned(folder, images, image_max_pixels=65536, freeze_vision_tower=frozen, max_length=2048)
        assert plan.time is not None
        seconds.append(plan.time.seconds)
        kind = plan.step.outline.kind(0)
        assert (kind.backward.at(2).products > 0) is (not frozen)
    assert seconds == sorted(set(seconds))


def test_what_a_plan_says(tmp_path: Path) -> None:
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    assert any("images_per_row" in line for line in plan_lines(planned(folder, None)))
    lines = list(plan_lines(planned(folder, 2, image_max_pixels=4096, max_length=24)))
    assert any("images take 32 tokens of a row, and max_length is 24" in line for line in lines)
    with pytest.raises(ConfigError, match="give --image_max_pixels"):
        planned(without_processor(folder), 1)


def test_a_model_of_text_has_no_images(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"images_per_row: .* has no tower"):
        planned(model, 1)


def test_notes_about_frozen_parts_follow_the_images_that_a_plan_counts(tmp_path: Path) -> None:
    """Without images no tower is trained, and with them nothing is said of rows that have none."""
    folder = save_llava(tmp_path / "model")
    settings = {"freeze_vision_tower": "false", "freeze_multi_modal_projector": "false"}
    notes = {images: " ".join(planned(folder, images, **settings).machine.notes) for images in (None, 0, 1)}
    assert "if no row has an image, vision tower and projector are frozen, too" in notes[None]
    assert "vision tower and projector are frozen, because no row has an image" in notes[0]
    assert "image" not in notes[1].replace("images are", "")


def test_a_tower_with_a_mask_over_all_images_is_rejected(tmp_path: Path) -> None:
    folder = save_llava(tmp_path / "model")
    config = LlavaConfig.from_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config.vision_config = PixtralVisionConfig(image_size=16, patch_size=8, **sizes)
    config.vision_feature_select_strategy = "full"
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"images_per_row: .* mask over the patches of all images"):
        planned(without_processor(folder), 1)
