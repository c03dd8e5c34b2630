"""Runs of a model that comes with its own code are exported and merged with that code."""

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import horizon_lm
from horizon_lm.model import hf_config, hub
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

from .parts_of_keeper import SCALE


class KeeperConfig(LlamaConfig):
    model_type = "keeper"


class KeeperForCausalLM(LlamaForCausalLM):
    config_class = KeeperConfig
    scale = SCALE
"""
TOKENIZER_CODE = """
from transformers import PreTrainedTokenizerFast


class KeeperTokenizer(PreTrainedTokenizerFast):
    pass
"""
CODE = {"modeling_keeper.py", "parts_of_keeper.py", "tokenization_keeper.py"}


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose classes are in files of the folder."""
    folder = tiny.save_model(tmp_path_factory.mktemp("keeper"))
    (folder / "modeling_keeper.py").write_text(MODEL_CODE)
    (folder / "parts_of_keeper.py").write_text("SCALE = 1\n")
    (folder / "tokenization_keeper.py").write_text(TOKENIZER_CODE)
    names = {"AutoConfig": "modeling_keeper.KeeperConfig", "AutoModelForCausalLM": "modeling_keeper.KeeperForCausalLM"}
    change(folder / "config.json", model_type="keeper", architectures=["KeeperForCausalLM"], auto_map=names)
    tokenizer = {"AutoTokenizer": [None, "tokenization_keeper.KeeperTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="KeeperTokenizer", auto_map=tokenizer)
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def code_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.py")}


@pytest.mark.parametrize("adapters", thinned([True, False], every=2))
def test_export_and_merge(keeper: Path, tmp_path: Path, adapters: bool) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    trust = ["--trust-remote-code", "--allow-unproven-model"]
    settings: dict[str, Any] = {
        "model_name_or_path": str(keeper), "datasets": [str(rows)], "output_dir": str(tmp_path / "run"), "device": "cpu",
        "max_steps": 2, "save_steps": 1, "trust_remote_code": True, "allow_unproven_model": True,
    }  # fmt: skip
    if adapters:
        settings |= {"use_peft": True, "lora_target_modules": "all-linear"}
    said: list[str] = []
    result = horizon_lm.train(settings, print_fn=said.append)
    assert f'generate {result.model_dir} "..." {" ".join(trust)}\n' in said[-1]  # the commands that are printed work
    assert f'"{result.model_dir}", trust_remote_code=True)' in said[-1]
    checkpoint, exported, merged = tmp_path / "run" / "checkpoint-1", tmp_path / "exported", tmp_path / "merged"

    rejected = run("export", checkpoint, exported)
    assert (rejected.exit_code, "--trust-remote-code" in rejected.stderr) == (2, True), rejected.stderr
    printed = run("export", checkpoint, exported, "--trust-remote-code")
    assert (printed.exit_code, f'generate {exported} "..." --trust-remote-code' in printed.stdout) == (0, True)
    assert code_of(exported) == CODE
    folders = [exported, result.model_dir]
    if adapters:
        rejected = run("merge", result.model_dir, merged)
        assert (rejected.exit_code, "--trust-remote-code" in rejected.stderr) == (2, True), rejected.stderr
        assert run("merge", result.model_dir, merged, "--trust-remote-code").exit_code == 0
        assert code_of(merged) == CODE
        folders.append(merged)
    for folder in folders:
        assert run("generate", folder, "Who?", "--max-new-tokens", 2, *trust).exit_code == 0
    rejected = run("generate", folders[-1], "Who?")
    assert (rejected.exit_code, "--trust-remote-code" in rejected.stderr) == (2, True), rejected.stderr


def test_code_of_a_model_on_the_hub_is_downloaded(
    keeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        for path in keeper.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(path, tmp_path / path.name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = hf_config.load_config(hub.local_folder("someone/keeper"), trust_remote_code=True)
    assert type(config).__name__ == "KeeperConfig"
