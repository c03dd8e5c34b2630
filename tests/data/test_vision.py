"""Processors of many types write the tokens of images into texts, and make tensors, as their own calls do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from horizon_lm.errors import ConfigError
from horizon_lm.runs.data import vision
from horizon_lm.runs.data.vision import Vision
from tests.support.image_models import picture, tokenizer_with

_CROPS = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_GRID = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_QWEN = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 8}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
# Of each type: its tokens, its image processor with arguments, and the arguments of the processor.
TYPES: dict[str, tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any]]] = {
    "Idefics3": (
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_ROWS),
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        {"image_seq_len": 4},
    ),
    "LlavaNext": (("<image>",), "LlavaNextImageProcessorPil", _CROPS | _GRID, _LLAVA),
    "LlavaOnevision": (
        ("<image>", "<video>"),
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 16, "width": 16}, **_GRID},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "Qwen2VL": (_QWEN_TOKENS, "Qwen2VLImageProcessorPil", _QWEN, {}),
    "Qwen3VL": (_QWEN_TOKENS, "Qwen2VLImageProcessorPil", _QWEN, {}),
}


def saved(folder: Path, name: str) -> Vision:
    """Return the processor of a type, whose files are written into a folder."""
    tokens, image_processor, arguments, of_processor = TYPES[name]
    tokenizer_with(None, *tokens).save_pretrained(folder)
    getattr(transformers, image_processor)(**arguments).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{name}Processor", **of_processor}))
    return Vision(folder, getattr(transformers, f"{name}Config")())


@pytest.mark.parametrize("name", TYPES)
def test_tokens_and_tensors_are_those_of_the_processor(tmp_path: Path, name: str) -> None:
    made = saved(tmp_path, name)
    processor, images = made.processor, [[picture(0, (50, 30))], [], [picture(1, (24, 60)), picture(2, (20, 20))]]
    token = processor.image_token
    texts = [f"See {token} and wait.", "Wait.", f"{token}{token}\nWho?"]
    plain = {"add_special_tokens": False, "padding": True, "padding_side": "right", "return_tensors": "pt"}
    expected = processor(text=texts, images=[each for each in images if each or name == "Idefics3"], **plain)
    expanded = [made.expand(text, of_text) for text, of_text in zip(texts, images, strict=True)]
    ids = processor.tokenizer([each.text for each in expanded], **plain)
    assert ids["input_ids"].tolist() == expected["input_ids"].tolist()
    inputs = made.inputs(images, ids["input_ids"], ids["attention_mask"])
    assert set(inputs) == set(expected) - {"input_ids", "attention_mask"}
    for key, value in inputs.items():
        others = expected[key]
        if name == "Idefics3":  # which has an empty place for the sequence without images
            others = others[[0, 2]]
        assert value.tolist() == others.tolist(), key
    start, end = expanded[0].moved((len(f"See {token}"), len(texts[0])))
    assert expanded[0].text[start:end] == " and wait."


def _fail(name: str) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(f"\n{name} requires a library. Install it.\n")

    return fail


def test_the_reason_for_a_missing_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(tmp_path, "Qwen2VL")
    monkeypatch.setattr(vision, "_images_only", _fail("PixtralProcessor"))
    with pytest.raises(ConfigError, match=r"can be read \(PixtralProcessor requires a library\); copy"):
        made.expand("<|image_pad|>", [picture()])


def test_code_of_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the user asked on standard input, where nobody may be."""
    made = saved(tmp_path, "Qwen2VL")
    own = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda text="": pytest.fail("the user is asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ConfigError, match="has no processor of images that can be read"):
        made.expand("<|image_pad|>", [picture()])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError):  # with the user's consent it runs, and is no image processor
        Vision(tmp_path, transformers.Qwen2VLConfig(), trust_remote_code=True).expand("<|image_pad|>", [picture()])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("\nLfm2VlImageProcessor requires the Torchvision library but it was not found"), "needs torchvision; install it with pip install torchvision, in the build"),
        (ValueError("None of these classes could be imported. Missing optional dependencies: torchvision. Please"), "needs torchvision; "),
        (ImportError("Package `num2words` is required to run SmolVLM processor."), "needs num2words; install it with pip install num2words"),
        (ModuleNotFoundError("No module named 'einops.layers'", name="einops.layers"), "needs einops; install it with pip install einops"),
        (ValueError("damaged"), "(damaged); copy preprocessor_config.json and processor_config.json into it"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(
    error: Exception, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any) -> Any:
        raise error

    monkeypatch.setattr(vision, "_images_only", fail)
    with pytest.raises(ConfigError) as caught:
        _ = Vision(tmp_path, transformers.LlavaConfig()).processor
    assert remedy in str(caught.value)
