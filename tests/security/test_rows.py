"""Hostile rows: what they say is neither run nor obeyed by the terminal, and files that cannot be rows are rejected."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.command import run
from tests.support.thinned_cases import covering

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\u202e\x08"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def here(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    return tmp_path


def python_path() -> dict[str, str]:
    """Return the environment of a new interpreter that imports from the same places as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def inspect(rows: Any, *arguments: Any) -> Any:
    return run("inspect", "--model_name_or_path", "model", "--datasets", rows, *arguments)


def test_escapes_in_rows_are_shown(here: Path) -> None:
    row = {"instruction": f"Who? {ESCAPES}", "output": f"I. {ESCAPES}"}
    result = inspect(tiny.write_jsonl(here / "rows.jsonl", [row] * 2))
    assert result.exit_code == 0, result.stderr
    assert not CONTROLS.search(result.stdout + result.stderr)
    assert r"\x1b]0;owned\x07" in result.stdout


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", ESCAPES: 1},
        {ESCAPES: "a"},
        {"messages": [{"role": ESCAPES, "content": "a"}]},
        {"messages": [{"role": "user", ESCAPES: "a"}]},
    ],
)
def test_escapes_in_errors_are_shown(row: Any, here: Path) -> None:
    result = inspect(tiny.write_jsonl(here / "rows.jsonl", [row]), "--format", ESCAPES)
    assert result.exit_code in (2, 4)
    assert not CONTROLS.search(result.stdout + result.stderr)
    name = f"rows{ESCAPES}.jsonl"
    (here / name).write_text("{\n")
    result = inspect(here / name)
    assert result.exit_code in (2, 4)
    assert not CONTROLS.search(result.stderr)


def test_escapes_in_samples_and_answers_are_shown(here: Path) -> None:
    rows = tiny.write_jsonl(here / "rows.jsonl", tiny.alpaca_rows())
    result = run("train", "--model_name_or_path", "model", "--datasets", rows, "--device", "cpu", "--max_steps", 1,
                 "--sample_prompts", json.dumps([f"Who? <script>alert(1)</script>{ESCAPES}"]), "--sample_steps", 1,
                 "--sample_max_new_tokens", 4, "--output_dir", "run")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert not CONTROLS.search(result.stdout + result.stderr)
    assert "alert(1)" in result.stdout
    assert run("report", "run").exit_code == 0
    page = Path("run/report.html").read_text()
    assert "<script>alert(1)" not in page
    assert "Content-Security-Policy" in page
    answer = run("generate", "run/model", "\x1b[2J", "--max-new-tokens", 20, "--temperature", 9, "--device", "cpu")
    assert not CONTROLS.search(answer.stdout + answer.stderr)


def test_warnings_are_shown_without_escapes(here: Path) -> None:
    """The installed command changes how warnings are shown, which `run` does not."""
    code = "import warnings, horizon_lm.cli as c; c.app = lambda: warnings.warn('a \\x1b[2J b'); c.main()"
    result = subprocess.run([sys.executable, "-c", code], env=python_path(), capture_output=True, text=True, check=True)
    assert r"a \x1b[2J b" in result.stderr


BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "parquet cut off": ("rows.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "cannot be read"),
    "parquet with a huge footer": ("rows.parquet", b"PAR1" + b"\xff" * 16 + b"\xff\xff\xff\x7fPAR1", "cannot be read"),
    "arrow": ("rows.arrow", b"ARROW1\0\0" + b"\xff" * 64, "cannot be read"),
    "csv with one quote": ("rows.csv", 'text\n"' + "a," * 50_000, "cannot be read"),
    "csv with a long header": ("rows.csv", "a" * 200_000 + "\n1\n", ""),
    "gzip that is none": ("rows.json.gz", b"\x1f\x8b\x08garbage", "cannot be read"),
    "nested JSON": ("rows.jsonl", "[" * 100_000, ""),
    "nested row": ("rows.jsonl", '{"text": ' + "[" * 100_000 + "\n", "cannot be read"),
    "nested tools": (
        "rows.jsonl",
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[" * 10**5}),
        "tools",
    ),
    "nested arguments": (
        "rows.jsonl",
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[" * 10**5}}]}, {"role": "assistant", "content": "b"}]}),
        "arguments",
    ),
    "long number": ("rows.jsonl", '{"text": ' + "9" * 10_000 + "}", "cannot be read"),
    "null bytes": ("rows.jsonl", b"\0" * 1000, "not valid JSON"),
    "a text of 17 million characters": ("rows.jsonl", json.dumps({"text": "a" * 17_000_000}), "17,000,000 characters"),
    "pickle": ("rows.pkl", pickle.dumps(["a"]), "not supported"),
    "torch": ("rows.pt", b"PK\x03\x04", "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, here: Path) -> None:
    file, content, message = BAD_FILES[name]
    (here / file).write_bytes(content.encode() if isinstance(content, str) else content)
    result = inspect(here / file)
    assert result.exit_code == 4, result.stdout + result.stderr
    assert message in result.stderr
    assert len(result.stderr) < 2000


@pytest.mark.slow
def test_a_line_of_100_megabytes(here: Path) -> None:
    (here / "rows.jsonl").write_text(json.dumps({"text": "a" * 100_000_000}))
    result = inspect(here / "rows.jsonl")
    assert result.exit_code == 4
    assert "100,000,000 characters" in result.stderr


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_a_pipe_is_no_file_of_rows(suffix: str, here: Path) -> None:
    os.mkfifo(here / f"rows{suffix}")
    result = inspect(here / f"rows{suffix}")
    assert result.exit_code == 4
    assert "is a pipe" in result.stderr


def folder_with(here: Path, files: dict[str, str]) -> Path:
    (here / "data").mkdir()
    for name, content in files.items():
        (here / "data" / name).write_text(content)
    (here / "secret.jsonl").write_text('{"text": "secret"}\n')
    return here / "data"


@pytest.mark.parametrize("named", ["../secret.jsonl", "ABSOLUTE", "https://localhost:1/rows.jsonl"])
def test_a_dataset_card_names_no_files_elsewhere(named: str, here: Path) -> None:
    named = str(here / "secret.jsonl") if named == "ABSOLUTE" else named
    card = f"---\nconfigs:\n- config_name: evil\n  data_files: {named}\n---\n"
    folder = folder_with(here, {"README.md": card, "rows.jsonl": '{"text": "a"}\n'})
    result = inspect(json.dumps([{"path": str(folder), "name": "evil"}]))
    assert result.exit_code in (2, 4), result.stdout
    assert "secret" not in result.stdout


@pytest.mark.filterwarnings("ignore:The Pandas builder")
def test_a_reader_of_pickles_is_rejected(here: Path) -> None:
    """`datasets` has readers for pickles, which a run file could name like a dataset of the hub."""
    (here / "rows.pkl").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    result = inspect(json.dumps([{"path": "pandas", "data_files": str(here / "rows.pkl")}]))
    assert result.exit_code == 4
    assert "pandas is a reader of datasets, not a dataset" in result.stderr
    assert not Path("ran").exists()


@pytest.mark.parametrize(("file", "damage"), covering(("rows.jsonl", "rows.csv"), ("cut off", "one byte")))
def test_altered_tables_in_the_cache_are_made_again(
    file: str, damage: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    lines = (
        [json.dumps({"text": f"a {n} b"}) for n in range(50)] if file.endswith("l") else ["text", *map(str, range(50))]
    )
    (here / file).write_text("\n".join(lines) + "\n")
    expected = inspect(here / file, "--packing", "true", "--max_length", 64)
    assert expected.exit_code == 0, expected.stderr
    tables = sorted((here / "cache").rglob("*.arrow"))
    assert len(tables) >= 2
    for table in tables:
        if not table.exists():  # with an altered table of rows, all tables made of it are made again
            continue
        content = table.read_bytes()
        middle = len(content) // 2
        altered = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        table.write_bytes(content[: len(content) // 3] if damage == "cut off" else altered)
        again = inspect(here / file, "--packing", "true", "--max_length", 64)
        assert again.stdout == expected.stdout, again.stderr


def test_tokens_beyond_the_vocabulary(here: Path) -> None:
    model = tiny.save_model(here / "larger")
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    rows = tiny.write_jsonl(here / "rows.jsonl", [{"text": "a b"}, {"text": "c <new> d"}])
    result = run("train", "--model_name_or_path", model, "--datasets", rows, "--device", "cpu", "--max_steps", 1)
    assert result.exit_code == 4, result.stdout + result.stderr
    assert re.search(r"rows.jsonl:2: token \d+ is beyond the model's \d+ tokens", result.stderr)
    assert not Path("trainer_output").exists()
