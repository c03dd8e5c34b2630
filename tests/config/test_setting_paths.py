"""A setting whose path does not exist is named before anything is loaded, with the path that was meant."""

import shutil
import struct
from pathlib import Path

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.load import read_run_config


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("models/tiny", "models/rows/part", "out/checkpoint-10", "out/adapter"):
        Path(folder).mkdir(parents=True)
    for file in ("train.jsonl", "chat.jinja", "tiny.gguf", "models/tiny/tiny.gguf", "models/rows/part/a.jsonl"):
        Path(file).touch()
    Path("models/tiny/tiny.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    Path("models/tiny/linked.gguf").symlink_to(Path("models/tiny.gguf").absolute())
    Path("models/tiny.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    Path("models/tiny/damaged.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))


def read(*changes: str) -> RunConfig:
    overrides = [
        f"--{change}" for change in ("use_peft=true", "model_name_or_path=models/tiny", "datasets=train.jsonl")
    ]
    kept = [
        each for each in overrides if each.partition("=")[0] not in {change.partition("=")[0] for change in changes}
    ]
    return read_run_config(None, [*kept, *changes])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model_name_or_path=models/tyny", "'models/tyny': no such folder; did you mean models/tiny?"),
        ("--model_name_or_path=./modles/tiny", "'./modles/tiny': no such folder; did you mean ./models/tiny?"),
        ("--model_name_or_path=./nowhere", "'./nowhere': no such folder; relative paths start in HERE"),
        ("--model_name_or_path=tiny.gguf", "'tiny.gguf': is a file; name its folder, and set gguf_file: tiny.gguf"),
        ("--model_name_or_path=train.jsonl", "'train.jsonl': is a file; name the folder of a model"),
        ("--gguf_file=tinny.gguf", "'tinny.gguf': no such file; did you mean tiny.gguf?"),
        ("--gguf_file=damaged.gguf", "'damaged.gguf': cannot be read (its header has more than 100,000 entries); download it again"),
        ("--gguf_file=linked.gguf", "'linked.gguf': leads to HERE/models/tiny.gguf, outside of HERE/models/tiny; copy the file into the folder if you trust it"),
        ("--gguf_file=other.gguf", "'other.gguf': no such file in models/tiny"),
        ("--chat_template_path=chatt.jinja", "'chatt.jinja': no such file or folder; did you mean chat.jinja?"),
        ("--adapter_name_or_path=out/adaptor", "'out/adaptor': no such folder; did you mean out/adapter?"),
        ("--resume_from_checkpoint=out/checkpoint-20", "'out/checkpoint-20': no such folder; did you mean out/checkpoint-10?"),
        ("--datasets=trian.jsonl", "'trian.jsonl': no such file or folder; did you mean train.jsonl?"),
        ("--datasets={path: models/rows, data_dir: parts}", "'parts': no such folder; did you mean part?"),
        ("--datasets={path: models/rows, data_dir: part, data_files: b.jsonl}", "'b.jsonl': no such file in models/rows/part"),
    ],
)  # fmt: skip
def test_a_path_that_does_not_exist(change: str, message: str) -> None:
    option = change.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        read(change)
    assert str(caught.value).startswith(option)
    assert str(caught.value).endswith(message.replace("HERE", str(Path.cwd())))


def test_a_file_elsewhere_hides_no_suggestion() -> None:
    """A file of the missing name in the working directory, which is not the folder of the model."""
    Path("tinny.gguf").touch()
    with pytest.raises(ConfigError, match=r"did you mean tiny\.gguf\?"):
        read("--gguf_file=tinny.gguf")


def test_all_are_named_together() -> None:
    with pytest.raises(
        ConfigError, match=r"^2 invalid settings:\n--model_name_or_path: .*\n--resume_from_checkpoint: "
    ):
        read("--model_name_or_path=./nowhere", "--resume_from_checkpoint=nowhere")


@pytest.mark.parametrize(
    "change",
    [
        "--model_name_or_path=Qwen/Qwen3-8B", "--model_name_or_path=google/gemma-3-4b-it (text)", "--gguf_file=tiny.gguf", "--chat_template_path=chat.jinja",
        "--chat_template_path=Qwen/Qwen3-8B", "--adapter_name_or_path=owner/adapter", "--resume_from_checkpoint=out/checkpoint-10",
        "--resume_from_checkpoint=true", "--datasets={path: models/rows, data_dir: part, data_files: '*.jsonl'}",
    ],
)  # fmt: skip
def test_other_names_are_accepted(change: str) -> None:
    name = change.removeprefix("--").partition("=")[0]
    assert name in read(change).model_fields_set


def test_links_of_the_hubs_cache_are_accepted() -> None:
    """The files of a snapshot lead out of its folder, to others of the same repository."""
    snapshot, blobs = Path("models--o--m/snapshots/1"), Path("models--o--m/blobs")
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    shutil.copy("models/tiny/tiny.gguf", blobs / "a")
    (snapshot / "tiny.gguf").symlink_to("../../blobs/a")
    assert read(f"--model_name_or_path={snapshot}", "--gguf_file=tiny.gguf").gguf_file == "tiny.gguf"
