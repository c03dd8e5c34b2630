"""Each invalid setting or row gives one clear error with place and remedy, compared word for word.

``python -m tests.e2e.test_bad_input`` regenerates the expected texts; read them before committing.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.command import run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

CONFIGS = {
    "unknown setting": "lerning_rate: 1e-5",
    "setting of another objective": "beta: 0.1",
    "setting of another trainer": "gradient_checkpointing: true",
    "old name": "warmup_ratio: 0.03",
    "duplicate key": "seed: 1\nseed: 2",
    "not YAML": "datasets: [rows.jsonl",
    "a tab": "\tseed: 1",
    "a list": "- seed: 1",
    "number as a name": "1: 2",
    "text for a number": "learning_rate: fast",
    "negative rate": "learning_rate: -1e-5",
    "infinite rate": "learning_rate: .inf",
    "fraction of a row": "per_device_train_batch_size: 1.5",
    "zero rows": "per_device_train_batch_size: 0",
    "true for a number": "max_steps: true",
    "no steps": "max_steps: 0",
    "fractional warm-up steps": "warmup_steps: 2.5",
    "unknown choice": "precision: fp16",
    "unknown schedule": "lr_scheduler_type: cosinus",
    "arguments of a constant schedule": "lr_scheduler_type: constant\nlr_scheduler_kwargs: {a: 1}",
    "unknown objective": "objective: grpo",
    "no such file": "datasets: nowhere.jsonl",
    "no such eval file": "eval_datasets: nowhere.jsonl",
    "dataset without a path": "datasets: [{columns: {prompt: q}}]",
    "unknown key of a dataset": "datasets: [{path: rows.jsonl, colums: {prompt: q}}]",
    "split of a file": "datasets: [{path: rows.jsonl, split: train}]",
    "fraction of two": "datasets: [{path: rows.jsonl, fraction: 2}]",
    "unknown format": "datasets: [{path: rows.jsonl, format: chatml}]",
    "two eval sets": "eval_datasets: rows.jsonl\ntest_split_size: 0.1",
    "evaluation without an eval set": "eval_strategy: steps",
    "interval without strategy": "eval_datasets: rows.jsonl\neval_steps: 5",
    "packing without a length": "packing: true\nmax_length: null",
    "strategy without packing": "packing_strategy: wrapped",
    "chunk size with a whole head": "head: whole\nhead_chunk_tokens: 8",
    "yes as in YAML 1.1": "packing: yes",
    "invalid word for a union of words and a number": "activation_checkpoints: none",
    "unknown unit": "device_memory: 3 gigs",
    "clipping in the backward": "update_in_backward: true",
    "unknown device": "device: tpu",
    "unknown tracker": "report_to: stdout",
    "no such template": "chat_template_path: nowhere.jinja",
    "empty pattern": "trainable: '|'",
    "nothing to train": "freeze_language_model: true",
    "frozen components beside patterns": "trainable: lm_head\nfreeze_vision_tower: false",
    "weights without losses": "objective: dpo\nloss_type: [sigmoid, ipo]\nloss_weights: [1.0]",
    "smoothing without the robust loss": "objective: dpo\nlabel_smoothing: 0.1",
    "three at once": "lerning_rate: 1\nprecision: fp16\nmax_steps: 0",
}

CHAT = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "I."}


def _rows(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


DATA: dict[str, str | bytes | tuple[str, Mapping[str, str]]] = {
    "empty file": "",
    "empty list": "[]",
    "truncated file": '{"text": "a"}\n{"text": "b',
    "single quotes": "{'text': 'a'}\n",
    "list with a missing entry": '[{"text": "a"},, {"text": "b"}]',
    "unterminated list": '[{"text": "a"}',
    "text after the list": '[{"text": "a"}]\n{"text": "b"}',
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "numbers": "1\n2\n",
    "unknown fields": _rows({"frage": "a", "antwort": "b"}),
    "no fields": "{}\n",
    "text that is a number": _rows({"text": 7}),
    "text that is null": _rows({"text": None}),
    "second row without its field": _rows({"text": "a"}, {"txt": "b"}),
    "messages that are text": _rows({"messages": "Who?"}),
    "no messages": _rows({"messages": []}),
    "no answer": _rows({"messages": [CHAT]}),
    "unknown role": _rows({"messages": [CHAT, {"role": "bot", "content": "I."}]}),
    "no role": _rows({"messages": [CHAT, {"content": "I."}]}),
    "no content": _rows({"messages": [CHAT, {"role": "assistant"}]}),
    "an image": _rows({"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}, ANSWER]}),
    "unknown key of a message": _rows({"messages": [CHAT, {**ANSWER, "weight": 1}]}),
    "two questions": _rows({"messages": [CHAT, CHAT, ANSWER]}),
    "system message not first": _rows({"messages": [CHAT, {"role": "system", "content": "Be short."}, ANSWER]}),
    "tool without a call": _rows({"messages": [CHAT, {"role": "tool", "content": "7"}, ANSWER]}),
    "tools that are not JSON": _rows({"messages": [CHAT, ANSWER], "tools": "[{"}),
    "arguments that are not JSON": _rows(
        {
            "messages": [
                CHAT,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ANSWER,
            ]
        }
    ),
    "sharegpt without values": _rows({"conversations": [{"from": "human"}]}),
    "unknown speaker": _rows({"conversations": [{"from": "bot", "value": "I."}]}),
    "unknown fields beside known ones": _rows({"instruction": "a", "input": "b", "response": "c"}),
    "alpaca without output": _rows({"instruction": "a", "output": None}),
    "prompt without completion": _rows({"prompt": "a", "completion": ""}),
    "prompt as text, completion as a list": _rows({"prompt": "a", "completion": [ANSWER]}),
    "pictures": _rows({"messages": [CHAT, ANSWER], "images": ["a.png"]}),
    "placeholder of a picture": _rows({"messages": [{"role": "user", "content": "<image>\nWho?"}, ANSWER]}),
    "good and bad answers": _rows({"prompt": "a", "completion": "b", "label": False}),
    "preferences": _rows({"chosen": "a", "rejected": "b"}),
    "nothing to train on": _rows({"messages": [CHAT, {"role": "assistant", "content": ""}]}),
    "doubled begin-of-sequence token": _rows({"text": "<|im_start|><|im_start|>a"}),
    "missing column": (
        "datasets: [{path: rows.jsonl, columns: {text: body}}]",
        {"rows.jsonl": _rows({"text": "a"})},
    ),
    "wrong format": ("datasets: [{path: rows.jsonl, format: alpaca}]", {"rows.jsonl": _rows({"text": "a"})}),
    "train_on without an assistant": (
        "datasets: rows.jsonl\ntrain_on: assistant",
        {"rows.jsonl": _rows({"text": "a"})},
    ),
    "more rows held out than exist": ("datasets: rows.jsonl\ntest_split_size: 5", {"rows.jsonl": _rows({"text": "a"})}),
    "broken CSV": ("datasets: rows.csv", {"rows.csv": 'text\n"a\n'}),
    "broken Parquet": ("datasets: rows.parquet", {"rows.parquet": "not parquet"}),
    "unknown ending": ("datasets: rows.pdf", {"rows.pdf": "a"}),
    "same answers": (
        "objective: dpo\ndatasets: rows.jsonl",
        {"rows.jsonl": _rows({"prompt": "a", "chosen": "b", "rejected": "b"})},
    ),
    "no common prompt": (
        "objective: dpo\ndatasets: rows.jsonl",
        {"rows.jsonl": _rows({"chosen": "a", "rejected": "b"})},
    ),
}


def run_with_settings(text: str) -> tuple[int, str]:
    """Return exit code and error of a run with additional settings, in a folder with a model and ``rows.jsonl``."""
    usual = "model_name_or_path: model\n" + (
        "" if "datasets:" in text.replace("eval_datasets:", "") else "datasets: rows.jsonl\n"
    )
    Path("run.yaml").write_text(f"{usual}{text}\n")
    result = run("train", "run.yaml")
    return result.exit_code, result.stderr.replace(f"{Path.cwd()}", "HERE")


def run_with_rows(case: str | bytes | tuple[str, Mapping[str, str]]) -> tuple[int, str]:
    """Return exit code and error of a run with these rows."""
    settings, content = case if isinstance(case, tuple) else ("datasets: rows.jsonl", {"rows.jsonl": case})
    for name, text in content.items():
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("run.yaml").write_text(f"model_name_or_path: model\ndevice: cpu\n{settings}\n")
    command = "train" if "test_split_size" in settings else "inspect"
    result = run(command, "run.yaml")
    return result.exit_code, result.stderr.replace(f"{Path.cwd()}", "HERE")


@pytest.fixture
def here(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    return tmp_path


def _expected(kind: str) -> dict[str, str]:
    parts = (GOLDEN / f"bad_{kind}.txt").read_text(encoding="utf-8").split("## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].rstrip("\n") for part in parts}


@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_settings(name: str, here: Path) -> None:
    code, error = run_with_settings(CONFIGS[name])
    assert code == 2
    assert error.rstrip("\n") == _expected("configs")[name]


@pytest.mark.parametrize("name", DATA)
def test_invalid_rows(name: str, here: Path) -> None:
    code, error = run_with_rows(DATA[name])
    assert code in (2, 4)
    assert error.rstrip("\n") == _expected("data")[name]


def _regenerate() -> None:
    import os
    import tempfile

    for kind, cases, run_case in (("configs", CONFIGS, run_with_settings), ("data", DATA, run_with_rows)):
        lines = []
        for name, case in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                tiny.save_model(Path("model"))
                tiny.write_jsonl(Path("rows.jsonl"), tiny.alpaca_rows())
                code, error = run_case(case)  # type: ignore[operator]
                assert code in (2, 4), (name, code, error)
                lines.append(f"## {name}\n{error.rstrip()}\n")
        (GOLDEN / f"bad_{kind}.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    _regenerate()
