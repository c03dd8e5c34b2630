"""What is a path and what a name on the hub; links within the hub's cache, and out of a folder."""

from pathlib import Path

import pytest

from horizon_lm.common.paths import may_be_on_hub, require_inside
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.hf_config import load_config
from horizon_lm.model.hub import local_folder
from tests.e2e import tiny


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-7B", "a/b_c.d-e", "0x/y"])
def test_names_on_the_hub(name: str) -> None:
    assert may_be_on_hub(name)


@pytest.mark.parametrize(
    "name",
    [
        "runs/modle",
        "./a",
        "../a",
        "/a/b",
        "~/a",
        "a/b/c",
        "rows.jsonl",
        "a/rows.parquet",
        "here",
        "a b",
        "",
        "x/.y",
        "ä/b",
    ],
)
def test_local_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "here").mkdir()
    assert not may_be_on_hub(name)
    if name != "here":
        with pytest.raises(ConfigError, match=r"is not a folder|has neither"):
            local_folder(name) if name else Checkpoint(tmp_path)


def test_a_snapshot_in_the_cache_of_the_hub_is_links(tmp_path: Path) -> None:
    """Its files are links to blobs of the repository; a link to another repository leads out."""
    snapshot, blobs = (tmp_path / "hub" / "models--o--n" / each for each in ("snapshots/abc", "blobs"))
    tiny.save_model(blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    load_config(snapshot, trust_remote_code=False)
    assert Checkpoint(snapshot).headers()
    (tmp_path / "hub" / "models--evil--n").mkdir()
    secret = tmp_path / "hub" / "models--evil--n" / "config.json"
    secret.write_text("{}")
    (snapshot / "added.json").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"outside of .*models--o--n"):
        load_config(snapshot, trust_remote_code=False)


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    load_config(tmp_path / "link", trust_remote_code=False)
    with pytest.raises(ConfigError, match="outside of"):
        require_inside(tmp_path / "link" / ".." / "x", tmp_path / "link")


def test_control_characters_are_shown() -> None:
    assert visible("a\tb\nc é 中 🙂") == "a\tb\nc é 中 🙂"
    assert visible("\x1b[2J\r\x9b\u202e\ud800") == r"\x1b[2J\x0d\x9b\u202e\ud800"
