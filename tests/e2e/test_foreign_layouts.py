"""Every layout that other trainers publish becomes a run file with the same training, or is rejected with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from horizon_lm.runs.config.load import read_run_config
from tests.e2e.command import run

_LAYOUTS = YAML(typ="safe", pure=True).load(Path(__file__).parents[1] / "data" / "foreign" / "layouts.yaml")
CASES = {case["name"]: case for case in _LAYOUTS["cases"]}
_SHAREGPT = {"ranking": True, "formatting": "sharegpt"}
_INFO: dict[str, Any] = {  # of LLaMA-Factory's demonstration data
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {"file_name": "dpo_en_demo.json", **_SHAREGPT, "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "mllm_demo": {"file_name": "mllm_demo.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}},
    "clips": {"file_name": "more/clips.json", "formatting": "sharegpt", "columns": {"images": "images", "videos": "videos"}},
}  # fmt: skip
_V1_LISTS: dict[str, Any] = {
    "v1_sft": {"identity": {"path": "data/identity.json", "source": "local", "converter": "alpaca"}},
    "v1_sized": {"alpaca_en_demo": {"path": "data/alpaca_en_demo.json", "source": "local", "converter": "alpaca", "size": 500}},
    "v1_dpo": {"dpo_zh_demo": {"path": "HuggingFaceH4/orca_dpo_pairs", "split": "train_prefs", "converter": "pair"}},
    "v1_multimodal": {"multimodal_demo": {"path": "data/multimodal.jsonl", "source": "local"}},
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the lists of datasets that the files name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(_INFO))
    for each in _INFO.values():
        (tmp_path / "data" / each["file_name"]).write_text("{}\n")
    for name, entries in _V1_LISTS.items():
        (tmp_path / "data" / f"{name}.yaml").write_text(json.dumps(entries))
    (tmp_path / "zephyr.jinja").write_text("{{ messages }}")
    return tmp_path


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", CASES)
def test_layout(work: Path, name: str) -> None:
    case = CASES[name]
    theirs = _merged(_LAYOUTS["files"].get(case["like"], {}), case.get("with", {}))
    for key in case.get("without", ()):
        del theirs[key]
    (work / "theirs.yaml").write_text(json.dumps(theirs))
    result = run("init", *case.get("run", ()), "--from", "theirs.yaml")
    if "rejects" in case:
        assert (result.exit_code, result.stdout) == (2, "")
        for part in case["rejects"]:
            assert part in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    (work / "ours.yaml").write_text(result.stdout)
    assert YAML(typ="safe", pure=True).load(result.stdout) == _merged(
        _LAYOUTS["results"].get(case["like"], {}), case["gives"]
    )
    read_run_config("ours.yaml")  # it is valid
