"""Mistakes in names, sizes, settings and files are reported before torch is imported, which takes seconds, and all at once."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import DataError
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.config.text import RUN_CONFIG_HEADER
from horizon_lm.runs.data import first_rows
from horizon_lm.runs.data.first_rows import check_first_rows
from tests.e2e import tiny
from tests.support.image_models import picture

PROGRAM = """
import sys
from horizon_lm import cli
try:
    cli.app()
finally:
    print(*sorted({"torch", "transformers", "datasets"} & set(sys.modules)))
"""


def run_alone(arguments: str) -> tuple[str, str]:
    """Return the heavy packages that a command has imported, and its errors."""
    command = [sys.executable, "-c", PROGRAM, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --model Qwen3-8B --device rtx490", "did you mean rtx-4090?"),
        (
            "plan --model Qwen3-8B --host-memory 64",
            "error: --host-memory: 64: must be at least 4096 bytes; write a unit, such as 64GiB\n",
        ),
        ("plan --model Qwen3-8B --lerning_rate 1", "did you mean learning_rate?"),
        ("plan --model Qwen3-8B --lora_target q_proj", "--lora_target is not a setting; use lora_target_modules\n"),
        ("plan --model Qwen3-8B --gradient_clipping 1", "use max_grad_norm\n"),
        ("plan --model Qwen3-8B --max_seq_len 9", "use max_length\n"),
        ("plan --device h200", "name a run file, or a model"),
        ("plan --largest --device rtx490", "did you mean rtx-4090?"),
        (
            "plan --largest --device h200 --host-memory 64GB,banana",
            "error: --host-memory: 'banana': is not a size; write for example 64MiB",
        ),
        ("plan --model ./nowhere --device h200", "--model: './nowhere': no such folder"),
        ("train nowhere.yaml", "nowhere.yaml: No such file"),
        ("train --config sft.yaml", "error: --config is not an option; write horizon-lm train sft.yaml\n"),
        ("plan --config=a/sft.yaml --seed 1", "error: --config is not an option; write horizon-lm plan a/sft.yaml\n"),
        ("sft sft.yaml", "No such command 'sft'; use train, with objective: sft in the run file"),
        ("run nowhere/train.py --seed 1", "nowhere/train.py: no such script"),
        ("run --device rtx490 --plan train.py", "no such script"),
        ("run -m nowhere.to.be.found", "-m nowhere.to.be.found: "),
        ("chat model", "No such command 'chat'; use generate"),
        ("merge_lora adapters out", "No such command 'merge_lora'; use merge"),
        ("inspect --device_memory banana", "\n--device_memory: 'banana': is not a size; write for example 64MiB"),
        (
            "generate model hi --device-memory banana",
            "error: --device-memory: 'banana': is not a size; write for example 64MiB",
        ),
        (
            "eval model --tasks a --device-memory banana",
            "error: --device-memory: 'banana': is not a size; write for example 64MiB",
        ),
        (
            "export model out --max-shard-size 5",
            "error: --max-shard-size: '5': must be at least 4096 bytes; write a unit",
        ),
        ("export model out --dtype int8", "choose one of bfloat16"),
        ("merge model out --dtype int8", "choose one of bfloat16"),
        (
            "export model out --format GGUF --dtype q4_k_m",
            "choose one of bfloat16, float16, float32, and quantize the file with llama.cpp's llama-quantize\n",
        ),
    ],
)
def test_nothing_heavy_is_imported(arguments: str, message: str) -> None:
    packages, errors = run_alone(arguments)
    assert (packages, message in errors) == ("", True), errors


DAMAGES = {
    "version 99 of GGUF is not supported": struct.pack("<IQQ", 99, 0, 0),
    "it ends within its header, at byte 24": struct.pack("<IQQ", 3, 0, 9),
    "it has a value of unknown type 77": struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 77),
    "its header has more than 100,000 entries": struct.pack("<IQQ", 3, 2**60, 0),
}


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("generate FOLDER hi --gguf-file model.gguf", "version 99 of GGUF is not supported"),
        ("eval FOLDER --tasks a --gguf-file model.gguf", "it ends within its header, at byte 24"),
        ("plan --model FOLDER --gguf_file model.gguf --device h200", "it has a value of unknown type 77"),
        (
            "train --model_name_or_path FOLDER --gguf_file model.gguf --datasets FOLDER/rows.jsonl",
            "its header has more than 100,000 entries",
        ),
    ],
)
def test_a_damaged_gguf_file(tmp_path: Path, command: str, damage: str) -> None:
    """The damage is named, and not that the file should be named."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + DAMAGES[damage])
    packages, errors = run_alone(command.replace("FOLDER", str(tmp_path)))
    assert (packages, "gguf_file" in errors) == ("", True)
    assert f"cannot be read ({damage}); download it again" in errors


def test_a_mistake_that_is_found_later(tmp_path: Path) -> None:
    """The control: packages that are imported are seen."""
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert "torch" in run_alone(f"plan --model {tmp_path} --device h200")[0]


# Mistakes of a run in files and packages, each command in the same process, which is what takes the time of a test

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from horizon_lm.cli import app
found = []
for arguments, missing in json.load(sys.stdin):
    sys.modules.update(dict.fromkeys(missing))  # these are not installed
    result = CliRunner().invoke(app, arguments)
    for name in missing:
        del sys.modules[name]
    heavy = sorted({"torch", "transformers", "datasets"} & set(sys.modules))
    found.append([result.exit_code, result.stderr, heavy])
print(json.dumps(found))
"""
USUAL = {"model_name_or_path": "model", "datasets": "rows.jsonl", "output_dir": "out", "device": "cpu"}
NO_CONFIG, NO_WEIGHTS = "no-config: no usable config.json (there is none)", "no-weights has neither model.safetensors"
NO_TOKENIZER = "no-tokenizer has no tokenizer that can be read"
MISTAKES: list[tuple[dict[str, Any], int, str]] = [  # settings, exit code, error
    ({"model_name_or_path": "no-config"}, 2, NO_CONFIG),
    ({"model_name_or_path": "bad-config"}, 2, "bad-config/config.json cannot be read ("),
    ({"model_name_or_path": "no-type"}, 2, "no-type: no usable config.json (it has no model_type)"),
    ({"model_name_or_path": "no-weights"}, 2, NO_WEIGHTS),
    ({"model_name_or_path": "torn"}, 2, "torn/model.safetensors cannot be read (it has "),
    ({"model_name_or_path": "pointer"}, 2, "pointer/model.safetensors cannot be read (it is a pointer of Git LFS); run git lfs pull in its folder"),
    ({"model_name_or_path": "no-tokenizer"}, 2, NO_TOKENIZER),
    ({"model_name_or_path": "adapters"}, 2, "it holds adapters: name their base"),
    ({"adapter_name_or_path": "folder", "use_peft": "true"}, 2, "folder has no adapter_config.json"),
    ({"adapter_name_or_path": "adapters", "use_peft": "true"}, 2, "adapters has no adapter_model.safetensors"),
    ({"datasets": "broken.jsonl"}, 4, "broken.jsonl:2:2: not valid JSON"),
    ({"datasets": "empty.jsonl"}, 4, "empty.jsonl: no rows found"),
    ({"datasets": "other.jsonl"}, 4, "other.jsonl:1: the row has 'frage', 'antwort', which matches no known format"),
    ({"datasets": "bad.jsonl"}, 4, "bad.jsonl:9: field 'output' is missing"),
    ({"datasets": "unanswered.jsonl"}, 4, "training data: no row is left to train on: rows that have no text or answer to train on: 9 (unanswered.jsonl:1-9); nothing"),
    ({"eval_datasets": "blank.jsonl"}, 4, "blank: no row is left to evaluate: rows that have no text or answer to train on: 2 (blank.jsonl:1-2)"),
    ({"objective": "dpo"}, 4, "rows in alpaca format are not supported with objective: dpo"),
    ({"datasets": "latin.jsonl"}, 4, "latin.jsonl:1:11: not UTF-8 text"),
    ({"datasets": "folder"}, 4, "folder: no files of rows in this folder"),
    ({"datasets": "rows.pdf"}, 4, "files with suffix .pdf are not supported"),
    ({"eval_datasets": "empty.jsonl"}, 4, "empty.jsonl: no rows found"),
    ({"output_dir": "rows.jsonl"}, 2, "output_dir: rows.jsonl is a file; choose another folder"),
    ({"output_dir": "rows.jsonl/out"}, 2, "/rows.jsonl is a file; choose another folder"),
    ({"output_dir": "finished"}, 2, "output_dir: finished holds a finished run"),
    ({"output_dir": "foreign"}, 2, "output_dir: foreign/metrics.jsonl was not written by horizon-lm"),
    ({"output_dir": "model"}, 2, "output_dir: model is the folder of the model to start from"),
    ({"fallback_dir": "rows.jsonl"}, 2, "fallback_dir: rows.jsonl is a file"),
    ({"resume_from_checkpoint": "true"}, 2, "resume_from_checkpoint: out has no checkpoint"),
    ({"resume_from_checkpoint": "folder"}, 2, "folder is not a checkpoint of horizon-lm"),
    ({"chat_template_path": "latin.jsonl"}, 2, "chat_template_path: latin.jsonl cannot be read"),
    ({"chat_template_path": "open.jinja"}, 2, "chat_template_path: open.jinja:2: unexpected 'end of template'"),
    ({"report_to": "wandb"}, 2, "report_to: wandb: its package is not installed"),
    ({"use_peft": "true"}, 2, "adapters need PEFT: pip install"),
    ({"packing": "true"}, 2, "packing needs TRL; install it"),
    (
        {"eval_datasets": "rows.jsonl", "eval_strategy": "epoch", "load_best_model_at_end": "true", "metric_for_best_model": "f1"}, 2,
        "metric_for_best_model: evaluations have no eval_f1",
    ),
]  # fmt: skip
SEVERAL: list[tuple[dict[str, Any], list[str]]] = [
    ({"lerning_rate": 1, "model_name_or_path": "no-config"}, ["--lerning_rate is not a setting", NO_CONFIG]),
    ({"max_steps": 0, "datasets": "broken.jsonl"}, ["--max_steps: 0: must be at least 1", "broken.jsonl:2:2: not valid"]),
    ({"chat_template_path": "./x", "output_dir": "finished"}, ["--chat_template_path: './x': no such", "holds a finished"]),
    (
        {"datasets": "./x", "resume_from_checkpoint": "./y", "use_peft": "true"},
        ["--datasets[0].path: './x': no such file", "--resume_from_checkpoint: './y': no", "adapters need PEFT"],
    ),
    ({"model_name_or_path": "wrap", "output_dir": "finished"}, ["no usable config.json (there is none); did you mean wrap/inner?", "output_dir: finished holds"]),
    (
        {"model_name_or_path": "modell", "output_dir": "finished"},
        ["modell is neither a folder nor a model that could be fetched from the hub; did you mean model? (", "output_dir: finished holds"],
    ),
    ({"model_name_or_path": "no-tokenizer", "datasets": "bad.jsonl"}, [NO_TOKENIZER, "bad.jsonl:9: field 'output'"]),
    ({"model_name_or_path": "no-weights", "output_dir": "finished"}, [NO_WEIGHTS, "output_dir: finished holds"]),
    ({"datasets": "bad.jsonl", "eval_datasets": "empty.jsonl"}, ["bad.jsonl:9: field 'output'", "empty.jsonl: no rows"]),
    (
        {"precision": "fp16", "model_name_or_path": "no-weights", "datasets": "bad.jsonl", "output_dir": "foreign", "use_peft": "true"},
        ["--precision: 'fp16'", NO_WEIGHTS, "adapters need PEFT", "bad.jsonl:9: field", "output_dir: foreign/metrics.jsonl"],
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, rows, and damaged copies of them."""
    here = tmp_path_factory.mktemp("mistakes")
    tiny.save_model(here / "model")
    for name in ("no-config", "bad-config", "no-type", "no-weights", "torn", "pointer", "no-tokenizer"):
        shutil.copytree(here / "model", here / name)
    shutil.copytree(here / "model", here / "wrap" / "inner")
    (here / "no-config" / "config.json").unlink()
    (here / "bad-config" / "config.json").write_text("{")
    (here / "no-type" / "config.json").write_text("{}")
    (here / "no-weights" / "model.safetensors").unlink()
    weights = here / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (here / "pointer" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    )
    for path in (here / "no-tokenizer").glob("tokenizer*"):
        path.unlink()
    for name in ("adapters", "folder", "finished/model", "foreign"):
        (here / name).mkdir(parents=True)
    (here / "adapters" / "adapter_config.json").write_text("{}")
    (here / "finished" / "config.yaml").write_text(f"{RUN_CONFIG_HEADER}\n")
    (here / "foreign" / "metrics.jsonl").write_text("mine")
    tiny.write_jsonl(here / "rows.jsonl", tiny.alpaca_rows(8))
    tiny.write_jsonl(here / "bad.jsonl", [*tiny.alpaca_rows(8), {"instruction": "a"}])
    tiny.write_jsonl(here / "other.jsonl", [{"frage": "a", "antwort": "b"}])
    tiny.write_jsonl(here / "unanswered.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 9)
    tiny.write_jsonl(here / "blank.jsonl", [{"prompt": "a", "completion": " "}] * 2)
    (here / "broken.jsonl").write_text('{"text": "a"}\n{bad\n')
    (here / "latin.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (here / "open.jinja").write_text("a\n{% for")
    for name in ("empty.jsonl", "rows.pdf"):
        (here / name).write_text("")
    return here


def results(files: Path, command: str, cases: list[dict[str, Any]]) -> list[tuple[int, str, list[str]]]:
    """Return the exit codes, the errors, and the heavy packages that are imported after each of some commands."""
    arguments = [
        [command, *(text for name, value in (USUAL | each).items() for text in (f"--{name}", str(value)))]
        for each in cases
    ]
    missing = [[] if "adapter_name_or_path" in each else ["peft", "trl", "wandb"] for each in cases]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], input=json.dumps(list(zip(arguments, missing, strict=True))), capture_output=True,
        text=True, check=True, cwd=files,
    )  # fmt: skip
    found: list[tuple[int, str, list[str]]] = json.loads(done.stdout)
    return found


def test_mistakes_in_files_and_packages(files: Path) -> None:
    found = results(files, "train", [settings for settings, _, _ in MISTAKES])
    for (settings, code, message), (exit_code, error, heavy) in zip(MISTAKES, found, strict=True):
        assert (exit_code, heavy, message in error) == (code, [], True), (settings, error)
        assert error.count("\n") == 1, error  # one mistake, one line
    assert not (files / "out").exists()


def test_several_mistakes_are_one_message(files: Path) -> None:
    """Invalid settings come first; the exit code is that of data only if all mistakes are in data."""
    found = results(files, "train", [settings for settings, _ in SEVERAL])
    for (settings, messages), (exit_code, error, heavy) in zip(SEVERAL, found, strict=True):
        heading, *lines = error.splitlines()
        code = 4 if settings.keys() <= {"datasets", "eval_datasets"} else 2
        assert (exit_code, heavy, heading) == (code, [], f"error: {len(messages)} mistakes:")
        assert all(message in line for message, line in zip(messages, lines, strict=True)), error


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("inspect", ["bad.jsonl:9"]),
        ("plan", ["adapters need PEFT", "bad.jsonl:9"]),
        ("train", ["adapters need PEFT", "bad.jsonl:9", "output_dir: finished holds"]),
    ],
)
def test_commands_look_at_what_they_read(files: Path, command: str, others: list[str]) -> None:
    """`inspect` needs neither weights nor an output folder, and `plan` looks at the rows that are named."""
    settings = {"model_name_or_path": "no-config", "datasets": "bad.jsonl", "output_dir": "finished"}
    [(exit_code, error, heavy)] = results(files, command, [settings | {"use_peft": "true"}])
    assert (exit_code, heavy) == (2, [])
    for message in (NO_CONFIG, *others):
        assert message in error
    assert error.count("\n") == len(others) + 2


def test_a_plan_counts_the_weights_that_are_there(files: Path) -> None:
    [(exit_code, error, heavy)] = results(files, "plan", [{"model_name_or_path": "torn"}])
    assert (exit_code, heavy, "torn/model.safetensors cannot be read" in error) == (2, [], True)


@pytest.mark.parametrize(("first_bad", "shown"), [(5, "rows.jsonl:6-1505 (1,500 rows): field 'text'"), (1200, None)])
def test_all_rows_are_read_only_if_one_of_the_first_is_invalid(
    tmp_path: Path, first_bad: int, shown: str | None
) -> None:
    rows = [{"text": "a" if number < first_bad or number > 1504 else 1} for number in range(2000)]
    config = DatasetConfig(path=str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)))
    if shown is None:
        check_first_rows(config, "pretrain")
        return
    with pytest.raises(DataError, match=re.escape(shown)):
        check_first_rows(config, "pretrain")


@pytest.mark.parametrize(
    ("num_answered", "name", "shown"),
    [(0, "eval", "eval: no row is left to evaluate.* 2,000 .*rows.jsonl:1-2000"), (1, "eval", None), (0, None, None)],
)
def test_rows_without_answers_are_rejected_only_if_there_are_no_others(
    tmp_path: Path, num_answered: int, name: str | None, shown: str | None
) -> None:
    """An answer behind the first rows suffices, and one in another entry of ``datasets``, which is not looked at here."""
    rows = [{"text": " "}] * (2000 - num_answered) + [{"text": "a"}] * num_answered
    config = DatasetConfig(path=str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)))
    if shown is None:
        check_first_rows(config, "pretrain", name)
        return
    with pytest.raises(DataError, match=shown):
        check_first_rows(config, "pretrain", name)


def test_bad_pictures_are_reported_with_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one error, without heavy packages, and without downloads. Pictures of valid rows are not decoded here."""
    picture().save(tmp_path / "good.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    references = ["good.png", "gone.png", "torn.png", "https://host.invalid/a.png", "good.png"]
    rows = [{"prompt": "<image>Who?", "completion": "I.", "images": [each]} for each in references]
    config = DatasetConfig(path=str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)))
    with monkeypatch.context() as patch:
        patch.setattr(first_rows, "decode", lambda image: pytest.fail("an image was decoded"))
        check_first_rows(config, "sft")
    rows[4]["prompt"] = "<image><image>Who?"
    tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError,
        match=r"^3 invalid rows:\n.*jsonl:2: image 'gone.png' .*\n.*jsonl:3: image 'torn.png' .*\n.*jsonl:5: the row has 2",
    ):
        check_first_rows(config, "sft", allow_downloads=True)
    with pytest.raises(
        DataError, match=r"^4 invalid rows:(.*\n)*.*jsonl:4: image 'https://host.invalid/a.png' is on the web"
    ):
        check_first_rows(config, "sft")
    packages, errors = run_alone(f"train --model_name_or_path {tmp_path} --datasets {tmp_path}/rows.jsonl")
    assert (packages, "'torn.png' cannot be decoded" in errors, "2 placeholders" in errors) == ("", True, True)
