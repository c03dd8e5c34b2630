"""The file or folder that a command writes has the name that was asked for, or the name is rejected before anything is read."""

from pathlib import Path

import pytest

from tests.e2e.command import run

COMMANDS = {  # each with OUT for its output; what it reads does not exist, so it could not get any further
    "export": ("export", "model", "OUT"),
    "export as GGUF": ("export", "model", "OUT", "--format", "gguf"),
    "merge": ("merge", "model", "OUT"),
    "report": ("report", "model", "--output", "OUT"),
    "eval": ("eval", "model", "--tasks", "task.yaml", "--output", "OUT"),
    "doctor": ("doctor", "--output", "OUT"),
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a folder ``there``, ``there.json`` and ``there.html``, and with a file ``file`` and ``file.gguf``."""
    monkeypatch.chdir(tmp_path)
    for name in ("there", "there.json", "there.html"):
        (tmp_path / name).mkdir()
    for name in ("file", "file.gguf"):
        (tmp_path / name).write_text("kept")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "output", "message"),
    [
        ("export", "there", "there exists; choose another name"),
        ("export", "file", "file exists; choose another name"),
        ("export", "my.safetensors", "my.safetensors: a folder is written; choose a name without .safetensors"),
        ("export", "my.gguf", "my.gguf: a folder is written; choose a name without .gguf, or add --format gguf"),
        ("export as GGUF", "there", "there exists; choose another name"),
        ("export as GGUF", "file.gguf", "file.gguf exists; choose another name"),
        ("export as GGUF", "my.safetensors", "my.safetensors: a folder is written; choose a name without .safetensors"),
        ("merge", "there", "there exists; choose another name"),
        ("merge", "my.gguf", "my.gguf: a folder is written; choose a name without .gguf; then horizon-lm export FOLDER my.gguf --format gguf"),
        ("report", "there.html", "--output: there.html is a folder; name a file in it"),
        ("report", "nowhere/page.html", "--output: nowhere does not exist; create it"),
        ("report", "page.pdf", "--output: page.pdf: the page is HTML; choose a name with .html"),
        ("eval", "there.json", "--output: there.json is a folder; name a file in it"),
        ("eval", "nowhere/results.json", "--output: nowhere does not exist; create it"),
        ("eval", "results.csv", "--output: results.csv: the results are JSON; choose a name with .json"),
        ("doctor", "there.json", "there.json"),
        ("doctor", "profile.yaml", "--output: profile.yaml: the profile is JSON; choose a name with .json"),
    ],
)  # fmt: skip
def test_names_that_are_rejected(work: Path, command: str, output: str, message: str) -> None:
    before = sorted(work.rglob("*"))
    result = run(*(output if each == "OUT" else each for each in COMMANDS[command]))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize("command", ["export", "export as GGUF", "merge", "report", "eval"])
def test_other_names_get_further(work: Path, command: str) -> None:
    """The control: only what is read is missing then."""
    output = {"report": "page.html", "eval": "~/results.json", "export as GGUF": "my.gguf"}.get(command, "llama-3.1-8b")
    result = run(*(output if each == "OUT" else each for each in COMMANDS[command]))
    assert result.exit_code == 2
    assert Path(output).name not in result.stderr
