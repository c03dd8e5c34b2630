"""Hostile files of processors of images: absurd sizes are named before an image is scaled to them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from horizon_lm.errors import ConfigError
from horizon_lm.runs.data.vision import Vision
from tests.e2e.command import run
from tests.e2e.tiny import write_jsonl
from tests.support.image_models import picture, save_llava, save_qwen2_5_vl


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models by the name of the file of their processor."""
    return {
        "processor_config.json": save_llava(tmp_path_factory.mktemp("llava")),
        "preprocessor_config.json": save_qwen2_5_vl(tmp_path_factory.mktemp("qwen")),
    }


def edited(folder: Path, name: str, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a model, and change settings of its processor: those of the part for images, or of the whole if that has them."""
    shutil.copytree(folder, target)
    settings = json.loads((target / name).read_text())
    part = settings.get("image_processor", settings)
    for key, value in changes.items():
        (settings if key in settings else part)[key] = value
    (target / name).write_text(json.dumps(settings))
    return target


LLAVA, QWEN = "processor_config.json", "preprocessor_config.json"
HOSTILE = [
    (LLAVA, {"size": {"shortest_edge": 10**9}}, "shortest_edge is 1,000,000,000, but must be from 1 to 4,096"),
    (LLAVA, {"size": {"shortest_edge": 0}}, "shortest_edge is 0, but"),
    (LLAVA, {"size": {"shortest_edge": float("nan")}}, "shortest_edge is nan, but"),
    (LLAVA, {"crop_size": {"height": 1e9, "width": 16}}, "height is 1,000,000,000.0, but"),
    (LLAVA, {"crop_size": [16, -1]}, "crop_size is -1, but"),
    (LLAVA, {"patch_size": 0}, "patch_size is 0, but"),
    (LLAVA, {"num_additional_image_tokens": 10**9}, "num_additional_image_tokens is 1,000,000,000, but must be from 0 to 65,536"),
    (LLAVA, {"image_seq_length": 1e9}, "image_seq_length is 1,000,000,000.0, but"),
    (LLAVA, {"max_patches": 10**9}, "max_patches is 1,000,000,000, but must be from 0 to 4,096"),
    (QWEN, {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}}, "shortest_edge is 1,000,000,000, but must be from 0 to 67,108,864"),
    (QWEN, {"merge_size": 0}, "merge_size is 0, but"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), HOSTILE)
def test_absurd_sizes_are_named(
    folders: dict[str, Path], name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edited(folders[name], name, tmp_path / "model", changes)
    with pytest.raises(ConfigError) as caught:
        _ = Vision(folder, AutoConfig.from_pretrained(folder)).processor
    assert f"{folder / name}: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (LLAVA, {"size": {"shortest_edge": 2048}, "num_additional_image_tokens": 0}),
        (QWEN, {"size": {"shortest_edge": 3136, "longest_edge": 2**24}}),  # as published, in pixels
    ],
)
def test_sizes_of_published_processors_are_accepted(
    folders: dict[str, Path], name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = edited(folders[name], name, tmp_path / "model", changes)
    assert Vision(folder, AutoConfig.from_pretrained(folder)).processor


@pytest.mark.parametrize("content", ["[1]", "{", "null", '"a"'])
def test_files_that_are_no_settings_are_named(folders: dict[str, Path], content: str, tmp_path: Path) -> None:
    folder = shutil.copytree(folders[LLAVA], tmp_path / "model")
    (folder / LLAVA).write_text(content)
    with pytest.raises(ConfigError, match=r"processor_config.json"):
        _ = Vision(folder, AutoConfig.from_pretrained(folder)).processor


def test_a_command_reports_one_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(folders[LLAVA], LLAVA, tmp_path / "model", {"patch_size": 0})
    picture().save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "I."}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns, "images": ["a.png"]}] * 3)
    result = run("inspect", "--model_name_or_path", folder, "--datasets", rows)
    assert result.exit_code == 2
    assert result.stderr.count("patch_size is 0") == 1
