"""Runs ask no host, write no secret and keep to the umask; absurd settings are rejected before anything is made."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.runs.config.yaml_file import read_yaml
from tests.e2e import tiny
from tests.e2e.command import run

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_" + "S3cret" * 6
# Imported by every interpreter that starts, those of helper processes included.
WATCH = """
import os, sys
def hook(event, args):
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.bind", "socket.gethostname"):
        if event != "socket.connect" or isinstance(args[1], tuple):
            with open(os.environ["WATCHED"], "a") as file:
                file.write(f"{event} {args!r}\\n")
            raise OSError("no network here")
sys.addaudithook(hook)
"""
COMMANDS = """
import os, sys
from horizon_lm.cli import app
from typer.testing import CliRunner
os.umask(0o027)
rows, prompts = "rows.jsonl", '["Who?"]'
usual = ["--device", "cpu", "--max_steps", "2"]
for arguments, code in (
    (["plan", "--model", "model", "--device", "h200"], 0),
    (["plan", "--model", "runs/modle"], 2),
    (["train", "--model_name_or_path", "model", "--datasets", "runs/rosw", *usual], 2),
    (["train", "--model_name_or_path", "model", "--datasets", "rows.parquet", "--eval_datasets", rows, "--save_strategy",
      "steps", "--save_steps", "1", "--sample_prompts", prompts, "--sample_steps", "1", "--sample_max_new_tokens", "2",
      "--trace_steps", "1", "--output_dir", "runs/sft", *usual], 0),
    (["train", "--objective", "dpo", "--model_name_or_path", "model", "--datasets", "pairs.jsonl", "--output_dir",
      "runs/dpo", *usual], 0),
    (["inspect", "--model_name_or_path", "model", "--datasets", "rows.csv"], 0),
    (["generate", "runs/sft/model", "Who?", "--max-new-tokens", "2", "--device", "cpu"], 0),
    (["report", "runs/sft"], 0),
):
    result = CliRunner().invoke(app, arguments)
    print(result.output)
    assert result.exit_code == code, (arguments, result.exception)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder in which some commands ran, what they printed, and what they asked of the network."""
    here = tmp_path_factory.mktemp("here")
    tiny.save_model(here / "model")
    rows = tiny.alpaca_rows()
    tiny.write_jsonl(here / "rows.jsonl", rows)
    tiny.write_jsonl(
        here / "pairs.jsonl", [{"prompt": f"Who {n}?", "chosen": "I.", "rejected": "You."} for n in range(8)]
    )
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.table({"prompt": [row["instruction"] for row in rows], "completion": [row["output"] for row in rows]})
    pa.parquet.write_table(table, here / "rows.parquet")
    pa.csv.write_csv(table, here / "rows.csv")
    for folder in ("runs", "watch", "home"):
        (here / folder).mkdir()
    (here / "watch" / "sitecustomize.py").write_text(WATCH)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join([str(here / "watch"), str(ROOT / "src"), str(ROOT)]),
        "WATCHED": str(here / "asked.txt"), "HOME": str(here / "home"), "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", COMMANDS], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = (here / "asked.txt").read_text() if (here / "asked.txt").exists() else ""
    return here, done.stdout + done.stderr, asked


def test_no_host_is_asked(finished: Any) -> None:
    assert finished[2] == ""


def test_the_watch_sees_what_is_asked(tmp_path: Path) -> None:
    """The negative control of the test above."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "WATCHED": str(tmp_path / "asked.txt")}
    subprocess.run([sys.executable, "-c", "import socket; socket.create_connection(('a.invalid', 1))"], env=environment,
                   stderr=subprocess.DEVNULL)  # fmt: skip
    assert "socket.getaddrinfo ('a.invalid'" in (tmp_path / "asked.txt").read_text()


def test_no_secret_is_written_or_printed(finished: Any) -> None:
    here, printed, _ = finished
    files = [path for path in here.rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in files)
    assert any(path.name == "report.html" for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in printed


def test_files_have_the_modes_of_the_umask(finished: Any) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in finished[0].joinpath("runs").rglob("*")}
    assert {path: oct(mode) for path, mode in modes.items() if mode != (0o750 if path.is_dir() else 0o640)} == {}


ABSURD = {
    "max_steps": 10**12,
    "per_device_train_batch_size": 10**9,
    "gradient_accumulation_steps": 10**9,
    "num_train_epochs": 1e300,
    "seed": 10**12,
    "dataset_num_proc": 10**6,
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_settings(name: str, model: Path) -> None:
    result = run("plan", "--model", model, "--device", "cpu", f"--{name}", ABSURD[name])
    assert result.exit_code == 2
    assert re.search(rf"--{name}: \S+: must be less than", result.stderr)


def test_too_many_rows_in_a_step(model: Path) -> None:
    arguments = ("--per_device_train_batch_size", 65_536, "--gradient_accumulation_steps", 2)
    result = run("plan", "--model", model, "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert "more than 65,536 rows per step" in result.stderr


def test_a_billion_saves_are_counted_at_once(model: Path) -> None:
    result = run(
        "plan", "--model", model, "--device", "cpu", "--max_steps", 2**31, "--save_steps", 1, "--save_total_limit", 3,
        "--logging_steps", 10**6,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr


MERGES = "a: &a {k: 1}\n" + "".join(
    f"{x}: &{x} {{<<: [*{y}, *{y}]}}\n"
    for y, x in zip("abcdefghijklmnopqrstuvw", "bcdefghijklmnopqrstuvwx", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        MERGES,
        "a: &a {<<: *a}",
        "a: [&a 1, &a 2]",
        'seed: "\\UFFFFFFFF"',
        "".join(f"k{n}: 1\n" for n in range(10_000)),
        "seed: !!python/object/apply:os.system ['touch ran']",
        "seed: !!python/name:os.system",
        "a: &a [1]\n" + "".join(f"{x}: &{x} [{', '.join([f'*{y}'] * 9)}]\n" for y, x in zip("abcdefgh", "bcdefghi", strict=True)),
        "seed: &a [*a]",
        "seed: " + "[" * 3000,
        "seed: 0x" + "f" * 5000,
        "seed: " + "9" * 5000,
        "? [1, 2]\n: 3",
        "#" * 300_000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_run_files_with_tags_and_bombs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f"model_name_or_path: model\n{text}\n")
    result = run("train", "run.yaml")
    assert result.exit_code == 2, result.stderr
    assert len(result.stderr) < 1000
    assert not Path("ran").exists()
    Path("run.yaml").rename("config.yaml")
    assert run("report", ".").exit_code == (0 if text.startswith("? [1, 2]") else 2)  # settings that are only shown


def test_merge_keys_of_ordinary_files(tmp_path: Path) -> None:
    """A mapping that is merged stands for its settings, as YAML 1.1 says."""
    (tmp_path / "run.yaml").write_text("usual: &usual {seed: 7, max_steps: 3}\n<<: *usual\nmax_steps: 5\n")
    settings, places = read_yaml(str(tmp_path / "run.yaml"))
    assert (settings["seed"], settings["max_steps"]) == (7, 5)
    assert places.position(("max_steps",)) == (3, 1)
