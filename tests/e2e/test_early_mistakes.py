"""Mistakes in names, sizes and settings are reported before torch is imported, which takes seconds."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_mistake_that_is_found_later() -> None:
    """The control: packages that are imported are seen."""
    assert "torch" in run_alone("plan --model . --device h200")[0]
