"""Rows with images: every form of an image and of its place, the tokens that stand for it, and what is rejected by name."""

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.errors import ConfigError, DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data import image_files
from horizon_lm.runs.data.findings import reject_errors
from horizon_lm.runs.data.loader import collate
from horizon_lm.runs.data.preprocess import PreprocessConfig, Report, prepare
from horizon_lm.runs.data.vision import Vision
from tests.support import image_models
from tests.support.image_models import data_uri, encoded, picture
from tests.support.prepared_rows import write

ANSWER = {"role": "assistant", "content": "The keeper."}
SAVE = {
    "llava": image_models.save_llava,
    "gemma3": image_models.save_gemma3,
    "qwen2_5_vl": image_models.save_qwen2_5_vl,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of tiny models by their type."""
    return {kind: save(tmp_path_factory.mktemp(kind)) for kind, save in SAVE.items()}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a folder with a picture, for rows beside it."""
    picture().save(tmp_path / "a.png")
    picture(1, (40, 30)).save(tmp_path / "b.png")
    return tmp_path


def vision_of(folder: Path, **limits: int) -> Vision:
    return Vision(folder, AutoConfig.from_pretrained(folder), **limits)


def prepared(
    model: Path, path: Path, *, objective: str = "sft", limits: dict[str, int] | None = None, **options: Any
) -> Report:
    tokenizer = AutoTokenizer.from_pretrained(model)
    vision = vision_of(model, **limits or {})
    return prepare([DatasetConfig(path=str(path))], tokenizer, PreprocessConfig(objective, **options), vision=vision)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def conversation(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [user(content), ANSWER], **fields}


def shapes(report: Report) -> list[tuple[int, ...]]:
    """Return the sizes of the images of all rows, as they are loaded for a batch."""
    return [
        image.size
        for row in report.rows
        for number in range(len(row.sequences))
        for images in row.load_images(number)
        for image in images
    ]


PART = {"type": "image"}
TEXT = {"type": "text", "text": "Who?"}
ROWS: dict[str, dict[str, Any]] = {
    "placeholder, images": conversation("<image>Who?", images=["a.png"]),
    "placeholder, image": conversation("Who?<image>", image="a.png"),
    "no placeholder, as TRL": conversation("Who?", images=["a.png"]),
    "part and column": conversation([PART, TEXT], images=["a.png"]),
    "part with a path": conversation([{"type": "image", "image": "a.png"}, TEXT]),
    "part of Qwen": conversation([TEXT, {"type": "image", "url": "a.png"}]),
    "part of OpenAI": conversation([{"type": "image_url", "image_url": {"url": data_uri(picture())}}, TEXT]),
    "object with a path": conversation("<image>", image={"path": "a.png", "bytes": None}),
    "data URI": conversation("<image>Who?", images=[data_uri(picture())]),
    "alpaca": {"instruction": "<image>Who?", "input": "", "output": "I.", "images": ["a.png"]},
    "alpaca, input": {"instruction": "Who?", "input": "See <image>.", "output": "I.", "images": ["a.png"]},
    "question": {"question": "<image>Who?", "answer": "I.", "image": "a.png"},
    "sharegpt": {"conversations": [{"from": "human", "value": "<image>Who?"}, {"from": "gpt", "value": "I."}], "images": ["a.png"]},
    "prompt as messages": {"prompt": [user([PART, TEXT])], "completion": [ANSWER], "images": ["a.png"]},
    "prompt as text": {"prompt": "<image>Who?", "completion": "I.", "images": ["a.png"]},
    "text": {"text": "See <image>, the dome.", "images": ["a.png"]},
    "system": {"messages": [{"role": "system", "content": "Be short."}, user("<image>Who?"), ANSWER], "images": ["a.png"]},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kind", SAVE)
def test_an_image_stands_where_the_row_says(models: dict[str, Path], kind: str, name: str, work: Path) -> None:
    report = prepared(models[kind], write(work, [ROWS[name]]))
    assert shapes(report) == [(24, 18)]
    (tokens,) = report.rows[0].sequences
    (image,) = tokens.images
    config, ids = AutoConfig.from_pretrained(models[kind]), tokens.ids[image.start : image.end]
    token = vision_of(models[kind]).token_ids[0]
    expected = {"llava": 4, "gemma3": 4, "qwen2_5_vl": 2}[kind]
    assert (ids == token).sum() == (tokens.ids == token).sum() == expected, config
    assert not tokens.trained[image.start : image.end].any()
    assert tokens.trained[1:].any()


OTHER = {**ANSWER, "content": "Nobody."}
PREFERENCES: dict[str, dict[str, Any]] = {
    "prompt as messages": {"prompt": [user("<image>Who?")], "chosen": [ANSWER], "rejected": [OTHER]},
    "whole conversations": {"chosen": [user([PART, TEXT]), ANSWER], "rejected": [user([PART, TEXT]), OTHER]},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "<image>Who?"}],
        "chosen": {"from": "gpt", "value": "I."},
        "rejected": {"from": "gpt", "value": "Nobody."},
    },
    "text": {"prompt": "<image>Who?", "chosen": "I.", "rejected": "Nobody."},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_images_of_preferences_are_those_of_both_answers(models: dict[str, Path], name: str, work: Path) -> None:
    row = PREFERENCES[name] | {"images": ["a.png"]}
    report = prepared(models["qwen2_5_vl"], write(work, [row, row | {"images": ["b.png"]}]), objective="dpo")
    assert shapes(report) == [(24, 18), (24, 18), (40, 30), (40, 30)]
    batch = collate(report.rows[:2])
    grid = batch.image_inputs["image_grid_thw"].tolist()  # of the chosen answers, then of the rejected ones
    assert grid == [grid[0], grid[1]] * 2
    assert grid[0] != grid[1]


@pytest.mark.parametrize("kind", SAVE)
def test_tokens_are_those_of_the_processor(models: dict[str, Path], kind: str, work: Path) -> None:
    """The processor's own template and call give the same ids, and the batch has the pixels that it gives."""
    rows = [
        conversation("<image>Who?", images=["a.png"]),
        conversation("Who waits?"),
        conversation([PART, TEXT, PART], images=["b.png", "a.png"]),
    ]
    report = prepared(models[kind], write(work, rows))
    processor, images = vision_of(models[kind]).processor, [picture(), picture(1, (40, 30)), picture()]
    parts = [[PART, TEXT], [{"type": "text", "text": "Who waits?"}], [PART, TEXT, PART]]
    answer = {"role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]}
    texts = [processor.apply_chat_template([user(each), answer], tokenize=False) for each in parts]
    for row, text, of_row in zip(report.rows, texts, (images[:1], None, images[1:]), strict=True):
        expected = processor(text=[text], images=of_row, add_special_tokens=False)["input_ids"]
        assert row.sequences[0].ids.tolist() == list(expected[0])
    batch = collate(report.rows[:3])
    expected = processor(text=texts, images=[images[:1], [], images[1:]] if kind == "gemma3" else images, return_tensors="pt",
                         padding=True, padding_side="right", add_special_tokens=False)  # fmt: skip
    names = [name for name in expected if name not in ("input_ids", "attention_mask")]
    assert set(names) == set(batch.image_inputs)
    for name in names:
        torch.testing.assert_close(batch.image_inputs[name], expected[name], rtol=0, atol=0)
    assert (
        batch.labels[torch.isin(batch.input_ids, torch.tensor(vision_of(models[kind]).token_ids))] == IGNORE_INDEX
    ).all()


def test_train_on_all_leaves_images_out(models: dict[str, Path], work: Path) -> None:
    report = prepared(models["llava"], write(work, [conversation("<image>Who?", images=["a.png"])]), train_on="all")
    (tokens,) = report.rows[0].sequences
    image = range(tokens.images[0].start, tokens.images[0].end)
    assert [index for index in range(len(tokens.ids)) if not tokens.trained[index]] == [*image]


def test_marks_of_the_template_are_used(tmp_path: Path, work: Path) -> None:
    model = image_models.save_qwen2_5_vl(tmp_path / "marked", image_models.MARKED_TEMPLATE)
    plain = image_models.save_qwen2_5_vl(tmp_path / "plain")
    path = write(work, [conversation("<image>Who?", images=["a.png"])])
    (marked,), (located,) = (prepared(each, path).rows[0].sequences for each in (model, plain))
    assert marked.ids.tolist() == located.ids.tolist()
    assert marked.trained.tolist() == located.trained.tolist()


# Files


def test_bytes_of_a_table_are_used_whatever_it_declares(models: dict[str, Path], tmp_path: Path) -> None:
    images = [{"bytes": encoded(picture()), "path": "/nowhere/a.png"}]
    rows = {"messages": [[user("<image>Who?"), ANSWER]], "images": [images]}
    plain = Features(
        {
            "images": [{"bytes": Value("binary"), "path": Value("string")}],
            "messages": [{"role": Value("string"), "content": Value("string")}],
        }
    )
    declared = Features(plain | {"images": [ImageFeature()]})
    for name, features in {"plain": plain, "declared": declared}.items():
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
        Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / name)
        assert shapes(prepared(models["llava"], tmp_path / f"{name}.parquet")) == [(24, 18)]
        assert shapes(prepared(models["llava"], tmp_path / name)) == [(24, 18)]


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees
    picture().save(path, exif=exif)


GOOD: dict[str, Any] = {
    "frames.gif": lambda path: picture().save(path, save_all=True, append_images=[picture(1)]),
    "cmyk.jpg": lambda path: picture(mode="CMYK").save(path),
    "rotated.jpg": rotated,
    "one.png": lambda path: picture(size=(1, 1)).save(path),
    "a.webp": lambda path: picture().save(path),
    "alpha.png": lambda path: picture(mode="RGBA").save(path),
    "gray.bmp": lambda path: picture(mode="L").save(path),
}
SIZES = {"rotated.jpg": (18, 24), "one.png": (1, 1)}


@pytest.mark.parametrize("name", GOOD)
def test_pictures_are_converted(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    GOOD[name](tmp_path / name)
    report = prepared(models["llava"], write(tmp_path, [conversation("<image>Who?", image=name)]))
    ((image,),) = report.rows[0].load_images(0)
    assert (image.mode, image.size) == ("RGB", SIZES.get(name, (24, 18)))
    if name == "frames.gif":
        with Image.open(tmp_path / name) as frames:
            assert np.array_equal(np.array(image), np.array(frames.convert("RGB")))


def write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def claims(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its data does not have."""
    content = bytearray(encoded(picture()))
    content[16:24] = width.to_bytes(4) + height.to_bytes(4)
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4)
    return bytes(content)


BAD: dict[str, tuple[Any, str]] = {
    "missing.png": (lambda path: None, "image 'missing.png' is missing"),
    "truncated.png": (partial(write_bytes, encoded(picture(size=(99, 99)))[:2000]), "'truncated.png' cannot be decoded"),
    "empty.png": (partial(write_bytes, b""), "'empty.png' cannot be decoded"),
    "bomb.png": (partial(write_bytes, claims(50_000, 50_000)), "has more than 89,478,485 pixels; scale it down"),
    "smaller bomb.png": (partial(write_bytes, claims(10_000, 9_000)), "has more than 89,478,485 pixels"),
    "line.png": (lambda path: picture(size=(20_000, 1)).save(path), "has 20000 x 1 pixels, and one side may be at most 200 times"),
    "deep.png": (lambda path: Image.new("I;16", (4, 4)).save(path), "more than 8 bits a channel"),
    "program.eps": (partial(write_bytes, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "cannot be decoded"),
    "text.png": (partial(write_bytes, b"no picture"), "cannot be decoded (UnidentifiedImageError"),
    "link.png": (lambda path: path.symlink_to("/etc/hostname"), "is outside of the folder of the rows"),
    "folder.png": (Path.mkdir, "is missing"),
    "pipe.png": (os.mkfifo, "is missing"),
    "loop.png": (lambda path: path.symlink_to(path), "'loop.png' "),
    "../outside.png": (lambda path: picture().save(path), "is outside of the folder of the rows"),
    "/etc/hostname": (lambda path: None, "is outside of the folder of the rows"),
    "C:\\a.png": (lambda path: None, "is outside of the folder of the rows"),
    "file:///etc/hostname": (lambda path: None, "is outside of the folder of the rows"),
    "http://localhost:1/a.png": (lambda path: None, "is on the web; download it beside the rows, or set allow_downloads: true"),
    "data:image/png,abc": (lambda path: None, "must be in base64"),
    "data:image/png;base64,a*b": (lambda path: None, "is not valid"),
    "data:image/png;base64,YWJj": (lambda path: None, "image 'data URI' cannot be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_named_with_their_row(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    make, message = BAD[name]
    folder = tmp_path / "rows"
    folder.mkdir()
    picture().save(folder / "good.png")
    make(folder / name)
    rows = [conversation("<image>Who?", image=each) for each in ("good.png", name)]
    with pytest.raises(DataError) as caught:
        prepared(models["llava"], write(folder, rows))
    assert "rows.jsonl:2: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (conversation("<image>Who?<image>", images=["a.png"]), "2 placeholders of images, but 1 image for them"),
        (conversation("<image>Who?", images=["a.png", "b.png"]), "1 placeholder of images, but 2 images for them"),
        (conversation([PART, TEXT]), "1 placeholder of images, but 0 images for them"),
        (conversation("Who?\ufffc", images=["a.png"]), "the character U+FFFC"),
        (conversation("<image>Who?", images=["a.png"], image="b.png"), "'image' and 'images' both hold images"),
        (conversation("<image>Who?", images=[7]), "images[0] must be the path of an image"),
        (conversation("<image>Who?", image={"size": 7}), "image must be the path of an image"),
        (conversation([{"type": "image", "image": 7}, TEXT]), "messages[0].content[0] must be the path of an image"),
        ({"messages": [user("Who?"), {**ANSWER, "content": [PART, TEXT]}], "images": ["a.png"]}, "only prompts may have images"),
        ({"messages": [{**user("Who?"), "images": ["a.png"]}, ANSWER]}, "write them in the field 'images' of the row"),
        (conversation("<image>Who?", images=["a.png"], videos=["a.mp4"]), "field 'videos': only text and images"),
        (conversation([{"type": "video", "video": "a.mp4"}, TEXT]), "part of type 'video'; only text and images"),
        (conversation("See `<image>`."), "the token <image>, which the model reads as an image"),
    ],
)  # fmt: skip
def test_rows_whose_images_do_not_fit_their_text_are_named(
    models: dict[str, Path], row: dict[str, Any], message: str, work: Path
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(models["llava"], write(work, [conversation("Who?"), row]))
    assert "rows.jsonl:2: " in str(caught.value)
    assert message in str(caught.value)


def test_an_image_is_never_cut(models: dict[str, Path], work: Path) -> None:
    """A row of which max_length cuts an image is an error, and the longest length with which it does is one token too short."""
    rows = [conversation("Who?"), conversation("Who counts the stars?<image>", images=["a.png"])]
    path = write(work, rows)
    end = prepared(models["qwen2_5_vl"], path).rows[1].sequences[0].images[0].end
    report = prepared(models["qwen2_5_vl"], path, max_length=end - 1)
    with pytest.raises(
        DataError, match=r"have an image that max_length cuts: 1 \(.*rows.jsonl:2\); .* raise max_length"
    ):
        reject_errors(report.findings)
    reject_errors(prepared(models["qwen2_5_vl"], path, max_length=end).findings)


def test_the_number_of_pixels_is_limited(models: dict[str, Path], work: Path) -> None:
    path = write(work, [conversation("<image>Who?", image=name) for name in ("a.png", "b.png")])
    report = prepared(models["qwen2_5_vl"], path, limits={"max_pixels": 600})
    assert shapes(report) == [(24, 18), (28, 21)]
    report = prepared(models["qwen2_5_vl"], path, limits={"min_pixels": 900})
    assert shapes(report) == [(35, 26), (40, 30)]


def test_a_model_without_a_processor_is_named(models: dict[str, Path], work: Path, tmp_path_factory: Any) -> None:
    path = write(work, [conversation("<image>Who?", image="a.png")])
    folder = tmp_path_factory.mktemp("bare")
    for file in models["llava"].iterdir():
        if file.name != "processor_config.json":
            (folder / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="has no processor of images that can be read"):
        prepared(folder, path)


def test_pillow_is_named_if_it_is_missing(models: dict[str, Path], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install Horizon-LM with the extra vision"):
        prepared(models["llava"], write(work, [conversation("<image>Who?", image="a.png")]))
    prepared(models["llava"], write(work, [conversation("Who?")]))


# Lazy loading


def test_changed_files_are_tokenized_again(models: dict[str, Path], work: Path) -> None:
    path = write(work, [conversation("<image>Who?", image="a.png")])
    before = prepared(models["qwen2_5_vl"], path)
    picture(1, (64, 48)).save(work / "a.png")
    with pytest.raises(DataError, match=r"rows.jsonl:1: image 'a.png' has changed since the run began"):
        before.rows[0].load_images(0)
    after = prepared(models["qwen2_5_vl"], path)
    assert len(after.rows[0]) > len(before.rows[0])
    assert after.rows.content_hash != before.rows.content_hash
    (work / "a.png").unlink()
    with pytest.raises(DataError, match=r"rows.jsonl:1: image 'a.png' is missing"):
        after.rows[0].load_images(0)
    with pytest.raises(DataError, match=r"rows.jsonl:1: image 'a.png' is missing"):
        prepared(models["qwen2_5_vl"], path)


def test_repaired_files_are_tokenized_again(models: dict[str, Path], work: Path) -> None:
    """The rows have not changed since the error was cached with them, but their images have."""
    (work / "cut.png").write_bytes(encoded(picture())[:200])
    path = write(work, [conversation("<image>Who?", image=name) for name in ("cut.png", "new.png")])
    with pytest.raises(DataError, match="2 invalid rows"):
        prepared(models["llava"], path)
    picture().save(work / "cut.png")
    with pytest.raises(DataError, match=r"jsonl:2: image 'new\.png' is missing"):
        prepared(models["llava"], path)
    picture().save(work / "new.png")
    assert shapes(prepared(models["llava"], path)) == [(24, 18)] * 2


def test_rows_that_differ_in_their_images_are_no_copies(models: dict[str, Path], work: Path) -> None:
    rows = [conversation("<image>Who?", image=name) for name in ("a.png", "b.png", "a.png")]
    (found,) = prepared(models["llava"], write(work, rows)).findings
    assert found.problem == "are copies of others"
    assert found.rows.places == [f"{work / 'rows.jsonl'}:3"]


def test_rows_are_tokenized_in_several_processes(models: dict[str, Path], work: Path) -> None:
    rows = [conversation(f"<image>Who is {number}?", image="a.png") for number in range(6)]
    one, two = (prepared(models["llava"], write(work, rows, f"{n}.jsonl"), num_proc=n) for n in (1, 2))
    assert one.rows.content_hash == two.rows.content_hash


# Downloads


@pytest.fixture
def address() -> Iterator[str]:
    """Serve a picture once, and redirect another address to a file."""
    served: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.append(self.path)
            self.send_response(302 if self.path == "/file.png" else 200 if served.count(self.path) == 1 else 500)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            self.wfile.write(encoded(picture()))

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _fail(address: str, max_bytes: int) -> bytes:
    raise OSError("the network is down")


def test_an_allowed_download_happens_once(
    models: dict[str, Path], tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = prepared(
        models["llava"], write(tmp_path, [conversation("<image>Who?", image=f"{address}/a.png")]), allow_downloads=True
    )
    assert shapes(report) == shapes(report) == [(24, 18)]
    late = write(tmp_path, [conversation("<image>Who?", image=f"{address}/late.png")], "late.jsonl")
    with monkeypatch.context() as broken:
        broken.setattr(image_files, "download", _fail)
        with pytest.raises(DataError, match="cannot be downloaded"):
            prepared(models["llava"], late, allow_downloads=True)
    assert shapes(prepared(models["llava"], late, allow_downloads=True)) == [(24, 18)]
    row = conversation("<image>Who?", image=f"{address}/file.png")
    with pytest.raises(DataError, match="cannot be downloaded"):
        prepared(models["llava"], write(tmp_path, [row], "redirected.jsonl"), allow_downloads=True)


def test_tables_have_no_pixels(models: dict[str, Path], work: Path) -> None:
    """A table of tokens has no pixels: its size does not depend on that of the images."""
    sizes = []
    for number, size in enumerate(((24, 18), (480, 360))):
        picture(number, size).save(work / f"{number}.png")
        report = prepared(
            models["llava"], write(work, [conversation("<image>Who?", image=f"{number}.png")], f"{number}.jsonl")
        )
        sizes.append(report.rows.parts[0].table.data.nbytes)
    assert abs(sizes[0] - sizes[1]) < 64
    assert json.loads((work / "1.jsonl").read_text())["image"] == "1.png"
