"""Runs on rows with images: the loss is that of transformers, a resume is exact, and `inspect` shows where images stand."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import horizon_lm
from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.errors import ConfigError, DataError, ModelNotSupportedError
from horizon_lm.runs.data.vision import Vision
from horizon_lm.runs.training.samples import prompt_inputs
from tests.e2e.command import run
from tests.e2e.resuming import SAVING, Runs
from tests.e2e.tiny import save_model, write_jsonl
from tests.support import image_models
from tests.support.image_models import picture, write_rows

SAVE = {
    "llava": image_models.save_llava,
    "gemma3": image_models.save_gemma3,
    "qwen2_5_vl": image_models.save_qwen2_5_vl,
    "qwen3_5": image_models.save_qwen3_5,
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_models.save_llava(tmp_path_factory.mktemp("llava"))


def settings(folder: Path, model: Path, **others: Any) -> dict[str, Any]:
    return {
        "objective": "sft", "model_name_or_path": str(model), "datasets": [str(write_rows(folder, 7))], "device": "cpu",
        "per_device_train_batch_size": 3, "learning_rate": 3e-3, "logging_steps": 1, "max_steps": 4, "precision": "float32",
        "output_dir": str(folder / "run"), **others,
    }  # fmt: skip


@pytest.mark.parametrize("kind", SAVE)
def test_the_first_loss_is_that_of_transformers(kind: str, tmp_path: Path, runs: Runs) -> None:
    """Rows with one, two and no images in one batch. The exported model has the processor that reads them."""
    model = SAVE[kind](tmp_path / "model")
    runs.train(settings(tmp_path, model, max_steps=1, per_device_train_batch_size=6))
    order = runs.loops[0].data.loader.sampler.rows(0)
    assert {number % 3 for number in order} == {0, 1, 2}, "not each kind of row is in the batch; change the seed"
    vision = runs.loops[0].keeper.vision
    processor, reference = vision.processor, AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    images = [[picture(n, (24 + n, 18)) for n in ((number,), (number, 0), ())[number % 3]] for number in order]
    texts = [_text(processor, number) for number in order]
    flat = images if kind == "gemma3" else [image for each in images for image in each]
    inputs = processor(
        text=texts, images=flat, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
    for row, number in enumerate(order):
        answer = processor.tokenizer(f"{number} stars.<|im_end|>", add_special_tokens=False)["input_ids"]
        end = int(inputs["attention_mask"][row].sum()) - 1  # before the line break
        assert inputs["input_ids"][row, end - len(answer) : end].tolist() == answer
        labels[row, end - len(answer) : end] = torch.tensor(answer)
    expected = reference.train()(**inputs, labels=labels).loss
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert (
        tmp_path
        / "run"
        / "model"
        / ("preprocessor_config.json" if kind.startswith("qwen") else "processor_config.json")
    ).is_file()


def _text(processor: Any, number: int) -> str:
    """Return a row of `write_rows` as the template of the model renders it."""
    images = [{"type": "image"}] * (1, 2, 0)[number % 3]
    messages = [
        {"role": "user", "content": [*images, {"type": "text", "text": f"What is seen on night {number}?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": f"{number} stars."}]},
    ]
    return str(processor.apply_chat_template(messages, tokenize=False))


@pytest.mark.parametrize("kind", ["llava", "qwen3_5"])
def test_runs_on_text_keep_the_tower(kind: str, tmp_path: Path, runs: Runs) -> None:
    """The trained model, and that of a checkpoint, are of the class that was read, with its tower and its processor."""
    model = SAVE[kind](tmp_path / "model")
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The keeper."}]
    rows = write_jsonl(tmp_path / "text.jsonl", [{"messages": turns}] * 3)
    given = settings(tmp_path, model, datasets=[str(rows)], max_steps=2, save_strategy="steps", save_steps=1)
    runs.train(given)
    assert run("export", tmp_path / "run" / "checkpoint-1", tmp_path / "exported").exit_code == 0
    before = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    for folder in (tmp_path / "run" / "model", tmp_path / "exported"):
        after, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert type(after) is type(before)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        changed = {
            name
            for (name, new), (_, old) in zip(after.named_parameters(), before.named_parameters(), strict=True)
            if not torch.equal(new, old)
        }
        assert changed
        assert all("language_model" in name or "lm_head" in name for name in changed)
        assert Vision(folder, after.config).processor.image_token


@pytest.mark.parametrize("packing", [False, True])
def test_a_resume_is_exact(packing: bool, llava: Path, tmp_path: Path, runs: Runs) -> None:
    given = settings(tmp_path, llava, packing=packing, max_length=64, per_device_train_batch_size=2) | SAVING
    expected, _ = runs.train(given | {"output_dir": str(tmp_path / "whole")})
    runs.interrupt(given, stop_after=2)
    outcome, _ = runs.train(given)
    assert outcome == expected


def test_a_resume_with_another_image_is_rejected(llava: Path, tmp_path: Path, runs: Runs) -> None:
    given = settings(tmp_path, llava) | SAVING
    runs.interrupt(given, stop_after=2)
    picture(99, (24, 18)).save(tmp_path / "0.png")
    with pytest.raises(ConfigError, match=r"these have changed: the training rows \(other images in 7 rows\)"):
        runs.train(given)


def test_an_image_that_changes_during_a_run_ends_it(llava: Path, tmp_path: Path, runs: Runs) -> None:
    runs.before_step[2] = lambda: [picture(99).save(path) for path in tmp_path.glob("*.png")]
    with pytest.raises(DataError, match=r"rows.jsonl:\d: image '\d.png' has changed since the run began"):
        runs.train(settings(tmp_path, llava, max_steps=7))  # batches of two steps are built ahead


def test_preferences_with_images_are_trained_on(llava: Path, tmp_path: Path, runs: Runs) -> None:
    rows = []
    for number in range(4):
        picture(number).save(tmp_path / f"{number}.png")
        prompt = [{"role": "user", "content": f"<image>What is night {number}?"}]
        answers = {
            name: [{"role": "assistant", "content": text}]
            for name, text in (("chosen", "Stars."), ("rejected", "Rain."))
        }
        rows.append({"prompt": prompt, **answers, "images": [f"{number}.png"]})
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    given = settings(tmp_path, llava, objective="dpo", datasets=[str(path)], max_steps=2, per_device_train_batch_size=2)
    runs.train(given)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert lines[0]["rewards/margins"] == 0


def metrics(folder: Path, name: str) -> list[float]:
    """Return the values of a number in the metrics of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize(("kind", "used"), [("llava", "varlen"), ("qwen2_5_vl", "sdpa"), ("qwen2_5_vl", "varlen")])
def test_packed_rows_train_as_rows_by_themselves(kind: str, used: str, tmp_path: Path, runs: Runs) -> None:
    model = SAVE[kind](tmp_path / "model")
    whole = {"per_device_train_batch_size": 7, "max_steps": 3, "attn_implementation": used, "test_split_size": 2}
    for packing in (False, True):
        given = settings(tmp_path, model, packing=packing, max_length=120, **whole)
        runs.train(
            given | {"output_dir": str(tmp_path / str(packing)), "device_micro_batch_size": 1 if packing else None}
        )
    packed = runs.loops[-1].data.training.packed
    assert any(len(row.segments) > 1 and row.sequences[0].images for row in packed)
    assert len(packed) > 1
    for name in ("loss", "eval_loss", "grad_norm"):
        expected, found = (metrics(tmp_path / str(packing), name) for packing in (False, True))
        assert len(expected) >= 2
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("gemma3", "gets other attention_mask for images"), ("qwen3_5", "gets no mask that separates")],
)
def test_packing_is_rejected_where_it_changes_rows(kind: str, message: str, tmp_path: Path) -> None:
    given = settings(tmp_path, SAVE[kind](tmp_path / "model"), packing=True, max_length=160)
    with pytest.raises(ModelNotSupportedError, match=f"{message}.*remove packing"):
        horizon_lm.train(given, print_fn=lambda line: None)


def test_packing_never_cuts_an_image(llava: Path, tmp_path: Path) -> None:
    given = settings(tmp_path, llava, packing=True, packing_strategy="bfd_split", max_length=160)
    with pytest.raises(
        DataError,
        match=r"packing_strategy: bfd_split cuts rows, but images are never cut: 5 rows have images \(.*rows.jsonl:1-2, .*\); set packing_strategy: bfd",
    ):
        horizon_lm.train(given, print_fn=lambda line: None)


def test_an_image_of_a_packed_row_that_changes_is_named_with_its_row(llava: Path, tmp_path: Path, runs: Runs) -> None:
    runs.before_step[1] = lambda: [picture(99).save(tmp_path / "4.png")]
    given = settings(tmp_path, llava, packing=True, max_length=64, per_device_train_batch_size=1, max_steps=9)
    with pytest.raises(DataError, match=r"rows.jsonl:5: image '4.png' has changed since the run began"):
        runs.train(given)


def test_a_model_of_text_rejects_images(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1-2.*the model reads only text; use a model of images and text"):
        horizon_lm.train(settings(tmp_path, model), print_fn=lambda line: None)


def test_inspect_shows_where_images_stand(llava: Path, tmp_path: Path) -> None:
    picture().save(tmp_path / "<b>.png")
    row = {
        "messages": [{"role": "user", "content": "<image>Who is <b>?"}, {"role": "assistant", "content": "I."}],
        "image": "<b>.png",
    }
    rows, page = write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "page.html"
    arguments = ("inspect", "--model_name_or_path", llava, "--datasets", rows)
    result = run(*arguments, "--html", page)
    assert result.exit_code == 0, result.output
    assert "user\n[image <b>.png: 4 tokens]\nWho is <b>?" in result.output
    assert "[[I.<|im_end|>]]" in result.output
    numbers = json.loads(run(*arguments, "--json").output)["numbers"]
    assert (numbers["images"], numbers["image_tokens"]) == (1, 4)
    text = page.read_text()
    packed = run(*arguments, "--html", page, "--packing")
    assert packed.exit_code == 0, packed.output
    assert page.read_text().partition("<pre>")[2] == text.partition("<pre>")[2]
    assert "Who is &lt;b&gt;?" in text
    assert "[image &lt;b&gt;.png: 4 tokens]" in text
    assert "<b>.png" not in text
    assert text.count('<img src="data:image/png;base64,') == 1
    assert "http" not in text


def test_rows_with_images_are_cut_into_micro_batches(llava: Path, tmp_path: Path, runs: Runs) -> None:
    """The losses are those of whole batches. Eval sets have larger batches than training, which are cut, too."""
    losses = []
    for size in (None, 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        given = {
            "device_micro_batch_size": size,
            "per_device_train_batch_size": 2,
            "test_split_size": 3,
            "max_steps": 2,
        }
        runs.train(settings(folder, llava, **given))
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        losses.append([line[name] for name in ("loss", "eval_loss") for line in lines if name in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 4


def test_prompts_are_given_to_the_template_as_it_renders_them(llava: Path) -> None:
    """The template of LLaVA renders nothing of a content that is a text."""
    tokenizer = AutoTokenizer.from_pretrained(llava)
    inputs = prompt_inputs(tokenizer, "Who counts?", "Be short.")
    text = tokenizer.decode(inputs["input_ids"][0])
    assert (
        text
        == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWho counts?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generate_answers_about_an_image(llava: Path, tmp_path: Path) -> None:
    """The tokens are those of plain transformers with the inputs of its processor."""
    picture(3, (40, 30)).save(tmp_path / "night.png")
    options = ("--precision", "float32", "--device", "cpu", "--max-new-tokens", 6)
    answer = run("generate", llava, "What is seen?", "--image", tmp_path / "night.png", *options)
    assert answer.exit_code == 0, answer.stderr
    processor, plain = (
        Vision(llava, AutoConfig.from_pretrained(llava)).processor,
        AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32),
    )
    content = [{"type": "image"}, {"type": "text", "text": "What is seen?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=text, images=[picture(3, (40, 30))], return_tensors="pt")
    tokens = plain.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.stdout.strip() == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize("has_template", [True, False])
def test_the_example_at_the_end_of_a_run_answers_about_an_image(
    has_template: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = image_models.save_llava(tmp_path / "model", *[] if has_template else [None])
    printed: list[str] = []
    rows = [{"prompt": "<image>\nWhat is it?", "completion": " A star.", "images": ["0.png"]}]
    given = settings(tmp_path, model, max_steps=1, per_device_train_batch_size=1)
    horizon_lm.train(given | {"datasets": [str(write_jsonl(tmp_path / "rows.jsonl", rows))]}, print_fn=printed.append)
    assert f'generate {tmp_path / "run" / "model"} "..." --image FILE' in printed[-1]
    example = dedent(printed[-1].partition("Use it in Python:\n")[2])
    exec(example.replace("FILE", str(tmp_path / "0.png")))
    assert "'generated_text': " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("What?", "--image", "{}/none.png"), "none.png' cannot be read"),
        (("What? <image><image>", "--image", "{}/night.png"), "2 placeholders of images, but 1 image"),
        (("What?", "--image", "{}/torn.png"), "torn.png' cannot be decoded"),
    ],
)
def test_bad_images_of_generate(llava: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    picture(3, (40, 30)).save(tmp_path / "night.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "night.png").read_bytes()[:60])
    result = run("generate", llava, *(each.format(tmp_path) for each in arguments))
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_image_for_a_model_of_text_is_rejected(tmp_path: Path) -> None:
    picture(3, (40, 30)).save(tmp_path / "night.png")
    model = save_model(tmp_path / "text")
    result = run("generate", model, "What?", "--image", tmp_path / "night.png")
    assert result.exit_code == 2
    assert "reads only text" in result.stderr


def test_a_system_prompt_that_the_template_drops_is_named_with_images_too(tmp_path: Path) -> None:
    picture(3, (40, 30)).save(tmp_path / "night.png")
    template = image_models.LLAVA_TEMPLATE.replace("in messages %}", "in messages if message['role'] != 'system' %}")
    model = image_models.save_llava(tmp_path / "model", template)
    result = run("generate", model, "What?", "--image", tmp_path / "night.png", "--system", "Be brief.")
    assert result.exit_code == 2
    assert "the chat template drops the system prompt" in result.stderr
