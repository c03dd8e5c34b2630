"""Files to begin with, our own and those translated from other trainers: they are valid, and they train."""

import json
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.config.file import read_run_config
from tests.e2e import tiny
from tests.e2e.command import run

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the foreign files name."""
    monkeypatch.chdir(tmp_path)
    tiny.save_model(tmp_path / "base-model")
    rows = [
        {"messages": [{"role": "user", "content": f"Night {n}?"}, {"role": "assistant", "content": f"{n} stars."}]}
        for n in range(20)
    ]
    tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    tiny.write_jsonl(tmp_path / "keepers.json", tiny.alpaca_rows(20))
    info = {"keepers": {"file_name": "keepers.json", "columns": {"prompt": "instruction", "response": "output"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for path in FOREIGN.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    return tmp_path


EXPECTED: dict[str, dict[str, Any]] = {
    "trl": {
        "packing": True, "max_length": 96, "warmup_steps": 0.1, "train_on": "assistant", "rows_per_step": 8, "seed": 3,
        "learning_rate": 2e-5, "lr_scheduler_type": "cosine",
    },
    "llamafactory": {
        "max_length": 128, "warmup_steps": 0.1, "test_split_size": 0.2, "eval_strategy": "steps", "eval_steps": 2,
        "dataset_num_proc": 2, "rows_per_step": 2, "trust_remote_code": True, "overwrite_output_dir": True,
    },
    "axolotl": {
        "max_length": 128, "packing": True, "eval_packing": False, "moments": "8bit", "rows_per_step": 2,
        "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5,
        "attn_implementation": "varlen", "learning_rate": 2e-5,
    },
}  # fmt: skip
LEFT_OUT = {
    "trl": ("gradient_checkpointing: every block is recomputed", "bf16: weights are bf16 with an fp32 master in any case"),
    "llamafactory": ("deepspeed: weights stream", "template: the model's own", "finetuning_type: ", "max_samples: use fraction"),
    "axolotl": ("gradient_checkpointing: ", "bf16: ", "pad_to_sequence_len: ", "special_tokens: ", "dataset_prepared_path: "),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of multiprocessing, about forks and threads
@pytest.mark.parametrize("name", list(EXPECTED))
def test_foreign_files_translate_and_train(work: Path, name: str) -> None:
    printed = run("init", "--from", f"{name}.yaml")
    assert printed.exit_code == 0, printed.stderr
    for line in LEFT_OUT[name]:
        assert line in printed.stdout
    (work / "ours.yaml").write_text(printed.stdout)
    config = read_run_config("ours.yaml")
    assert {key: getattr(config, key) for key in EXPECTED[name]} == EXPECTED[name]
    here = ["--device", "cpu", "--trust_remote_code", "false", "--max_steps", "3"]
    trained = run("train", "ours.yaml", *here)
    assert trained.exit_code == 0, trained.stderr
    assert (work / f"out-{name}" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("objective", ["sft", "pretrain", "dpo"])
def test_files_to_begin_with_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    printed = run("init", objective)
    assert printed.exit_code == 0
    (tmp_path / "run.yaml").write_text(printed.stdout)
    row = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    config = read_run_config(str(tmp_path / "run.yaml"), ["--datasets", str(row)])
    assert config.objective == objective
    # with its comments taken off, every setting is there, at its default
    whole = "".join(line.removeprefix("# ") + "\n" for line in printed.stdout.splitlines() if not line.startswith("##"))
    whole = whole[whole.index("objective:") :]
    whole = "\n".join(line for line in whole.splitlines() if not line.startswith("---"))
    (tmp_path / "whole.yaml").write_text(whole)
    assert read_run_config(str(tmp_path / "whole.yaml"), ["--datasets", str(row)]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo"], "'grpo' is not an objective; there are sft, pretrain, dpo"),
        (["--from", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--from", "other.yaml"], "not a file of TRL, LLaMA-Factory or Axolotl"),
        (["--from", "ours.yaml"], "ours.yaml: all its settings are Horizon-LM's own"),
        (["--from", "ppo.yaml"], "stage: 'ppo' is not an objective here"),
    ],
)
def test_what_cannot_be_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "ppo.yaml").write_text("stage: ppo\nfinetuning_type: full\n")
    (tmp_path / "ours.yaml").write_text(run("init", "dpo").stdout)
    result = run("init", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nmicro_batch_size: 1\ndatasets: 5\n", "datasets: not as Axolotl has them"),
        ("base_model: m\nmicro_batch_size: 1\ndatasets: [5]\n", "datasets: not as Axolotl has them"),
        ("model_name_or_path: m\ncutoff_len: 8\ndataset: 5\n", "dataset: not as LLaMA-Factory has them"),
        ("model_name_or_path: m\nstage: [[sft]]\ncutoff_len: 8\n", None),
        ("base_model: m\nmicro_batch_size: 1\nevals_per_epoch: often\n", None),
        ("model_name_or_path: m\nloss_type: [[a]]\n", None),
    ],
)
def test_values_of_the_wrong_kind(tmp_path: Path, text: str, message: str | None) -> None:
    """Refused with their name, or left out with a word; never a traceback."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    result = run("init", "--from", path)
    if message is None:
        assert result.exit_code in (0, 2), result.stderr
    else:
        assert result.exit_code == 2
        assert message in result.stderr


def test_a_file_of_adapters_says_what_changes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_r: 16\nlearning_rate: 2e-4\n")
    result = run("init", "--from", path)
    assert "the learning rate is usually a tenth of theirs" in " ".join(result.stdout.replace("#", "").split())
    assert "lora_r: adapters are not supported yet" in result.stdout
