"""A name that is no folder and that the hub has no answer for: the same line, wherever it is opened, with the model that it may mean."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from horizon_lm.errors import ConfigError
from horizon_lm.model import hub
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training.early_mistakes import mistakes_in_plan

OPEN: dict[str, Callable[[str], Any]] = {
    "plan": lambda name: hub.fetch_config(name, trust_remote_code=False),
    "train and generate": hub.local_folder,
}
LIST = "horizon-lm plan --list lists the models that are known by name"


def message_about(name: str, open_model: Callable[[str], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        open_model(name)
    return str(caught.value)


@pytest.fixture(params=["offline", "without an answer"])
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub that gives no answer, and the reason that is stated."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", request.param == "offline")
    nowhere = "http://127.0.0.1:9"  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    )
    refused = f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}"
    return "HF_HUB_OFFLINE is set" if request.param == "offline" else refused


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama-3.1-8b", "did you mean meta-llama/Llama-3.1-8B?"),
        ("llama-3-8b", LIST),  # another model than Llama 3.1
        ("meta-llama/Meta-Llama-3-8B", ""),
        ("qwen3", LIST),
        ("smollm2", LIST),
        ("someone/keeper", ""),
    ],
)
def test_one_line_everywhere(name: str, hint: str, reason: str) -> None:
    meant, names = (f"; {hint}" if hint and is_shown else "" for is_shown in (hint != LIST, hint == LIST))
    expected = f"{name} is neither a folder nor a model that could be fetched from the hub{meant} ({reason}){names}"
    assert {place: message_about(name, open_model) for place, open_model in OPEN.items()} == dict.fromkeys(
        OPEN, expected
    )


@pytest.mark.parametrize(
    ("typed", "is_found", "mistakes"),
    [
        ("tinny", True, 0),
        ("tinny", False, 1),
        ("owner/model", False, 0),  # no folder has such a name, so it is asked for when it is needed
        ("Qwen2.5-7B", False, 0),  # known without the hub
    ],
)
def test_the_hub_is_asked_early_only_beside_a_folder_of_a_similar_name(
    typed: str, is_found: bool, mistakes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the hub has is no mistake, whatever folders there are."""
    for name in ("tiny", "Qwen2.5-7Bs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", partial(answer, is_found=is_found))
    config = as_config({"model_name_or_path": typed, "datasets": "owner/rows", "output_dir": "out"})
    assert len(list(mistakes_in_plan(config))) == mistakes


def answer(url: str, is_found: bool) -> None:
    """Stand for a hub that has every model, or none."""
    if not is_found:
        raise RepositoryNotFoundError("404", response=MagicMock(status_code=404))


def test_a_known_model_needs_no_hint(reason: str) -> None:
    expected = (
        f"qwen3-8b is neither a folder nor a model that could be fetched from the hub as Qwen/Qwen3-8B ({reason})"
    )
    assert message_about("qwen3-8b", hub.local_folder) == expected


def test_a_name_that_the_hub_cannot_have() -> None:
    assert (
        message_about("llama3:8b", hub.local_folder)
        == f"llama3:8b is not a folder; relative paths start in {os.getcwd()}"
    )
