"""Files of rows declare what their columns are, and cards name files: neither decides what is opened or contacted."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.foreign_tables import read_hub
from tests.e2e.command import run
from tests.security.costs import cost_of
from tests.security.fake_hub import NAME, hub_with
from tests.security.watch import Watch, watching
from tests.support.thinned_cases import thinned

TEXTS = ["What does the keeper do?", "The keeper counts the stars.", "The dome opens at dusk."]
KINDS = ("Image", "Audio", "Video", "Pdf")


@pytest.fixture
def watch(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "elsewhere").mkdir()
    with watching(tmp_path / "elsewhere") as watch:
        yield watch


def declared(kind: str, column: str = "seen") -> dict[str, Any]:
    """Return features of a text and a column of this kind, as `datasets` writes them."""
    return {"text": {"dtype": "string", "_type": "Value"}, column: {"_type": kind}}


def table(watch: Watch, kind: str, metadata: bool = True) -> pa.Table:
    """Return texts beside a column whose values are addresses and paths."""
    paths = [watch.url, str(watch.canary), f"file://{watch.canary}"]
    structs = pa.array(
        [{"bytes": None, "path": path} for path in paths], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    rows = pa.table({"text": TEXTS, "seen": structs})
    info = {"info": {"features": declared(kind)}}
    return rows.replace_schema_metadata({"huggingface": json.dumps(info)} if metadata else None)


def write_parquet(watch: Watch, kind: str) -> Any:
    pq.write_table(table(watch, kind), "rows.parquet")
    return "rows.parquet"


def write_nested_parquet(watch: Watch, kind: str) -> Any:
    rows = table(watch, kind, metadata=False)
    nested = pa.array([[each] for each in rows["seen"].to_pylist()], pa.list_(rows["seen"].type))
    features = {"text": declared(kind)["text"], "seen": {"feature": {"_type": kind}, "_type": "List"}}
    rows = pa.table({"text": TEXTS, "seen": nested})
    rows = rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(rows, "rows.parquet")
    return "rows.parquet"


def write_arrow(watch: Watch, kind: str) -> Any:
    rows = table(watch, kind)
    with pa.ipc.new_stream("rows.arrow", rows.schema) as stream:
        stream.write_table(rows)
    return "rows.arrow"


def write_saved(watch: Watch, kind: str) -> Any:
    """Write a folder as `save_to_disk` does, with the declaration in its `dataset_info.json`."""
    rows = table(watch, kind)
    Path("saved").mkdir()
    with pa.ipc.new_stream("saved/data-00000-of-00001.arrow", rows.schema) as stream:
        stream.write_table(rows)
    files = [{"filename": "data-00000-of-00001.arrow"}]
    Path("saved/state.json").write_text(
        json.dumps({"_data_files": files, "_fingerprint": "a", "_format_type": None, "_split": "train"})
    )
    Path("saved/dataset_info.json").write_text(json.dumps({"features": declared(kind)}))
    return "saved"


def write_saved_elsewhere(watch: Watch, kind: str) -> Any:
    saved = write_saved(watch, kind)
    files = [{"filename": f"../elsewhere/{watch.canary.name}"}, {"filename": watch.url}]
    Path("saved/state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "a", "_split": "train"}))
    return saved


def write_folder(watch: Watch, kind: str, file: str) -> Any:
    Path("data").mkdir()
    rows = [
        {"text": text, "seen": path}
        for text, path in zip(TEXTS, (watch.url, str(watch.canary), watch.url), strict=True)
    ]
    if file.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), f"data/{file}")
    elif file.endswith("csv"):
        lines = ["text,seen", *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        Path("data", file).write_text("\n".join(lines) + "\n")
    else:
        Path("data", file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": "data", "split": "train"}]


def card(kind: str, data_files: str | None = None) -> str:
    info = {"features": [{"name": "text", "dtype": "string"}, {"name": "seen", "dtype": kind.lower()}]}
    configs = [{"config_name": "default", "data_files": data_files}] if data_files else []
    return f"---\n{json.dumps({'dataset_info': info, **({'configs': configs} if configs else {})})}\n---\n"


def write_card(file: str) -> Callable[[Watch, str], Any]:
    def write(watch: Watch, kind: str) -> Any:
        entry = write_folder(watch, kind, file)
        Path("data/README.md").write_text(card(kind))
        return entry

    return write


def write_card_of_address(watch: Watch, kind: str) -> Any:
    entry = write_folder(watch, kind, "train.parquet")
    Path("data/README.md").write_text(card(kind, watch.url.replace("png", "parquet")))
    return entry


def write_card_of_path(watch: Watch, kind: str) -> Any:
    entry = write_folder(watch, kind, "train.jsonl")
    Path("data/README.md").write_text(card(kind, str(watch.canary)))
    return entry


def write_yaml(watch: Watch, kind: str) -> Any:
    entry = write_folder(watch, kind, "train.csv")
    Path("data/.huggingface.yaml").write_text(card(kind, watch.url.replace("png", "csv")).strip("-\n"))
    return entry


def write_infos(watch: Watch, kind: str) -> Any:
    """Write the old file of infos, which `push_to_hub` once made."""
    entry = write_folder(watch, kind, "train.parquet")
    Path("data/dataset_infos.json").write_text(json.dumps({"default": {"features": declared(kind)}}))
    return entry


def write_lines(watch: Watch, kind: str) -> Any:
    paths = [{"bytes": None, "path": path, "_type": kind} for path in (watch.url, str(watch.canary), watch.url)]
    rows = [{"text": text, "seen": path} for text, path in zip(TEXTS, paths, strict=True)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


def write_names_file(watch: Watch, kind: str) -> Any:
    """Declare a class label, whose names `datasets` can read from a file."""
    features = declared(kind) | {"seen": {"_type": "ClassLabel", "names_file": str(watch.canary), "names": ["a", "b"]}}
    rows = pa.table({"text": TEXTS, "seen": pa.array([0, 1, 0], pa.int64())})
    pq.write_table(
        rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), "rows.parquet"
    )
    return "rows.parquet"


def write_link(watch: Watch, kind: str) -> Any:
    Path("data").mkdir()
    Path("data/rows.jsonl").symlink_to(watch.canary)
    return "data"


WAYS: dict[str, Callable[[Watch, str], Any]] = {
    "parquet": write_parquet,
    "parquet, nested": write_nested_parquet,
    "parquet, names of labels": write_names_file,
    "arrow": write_arrow,
    "saved to disk": write_saved,
    "saved to disk, files elsewhere": write_saved_elsewhere,
    "card beside parquet": write_card("train.parquet"),
    "card beside csv": write_card("train.csv"),
    "card beside json lines": write_card("train.jsonl"),
    "card that names an address": write_card_of_address,
    "card that names a path": write_card_of_path,
    "yaml that names an address": write_yaml,
    "infos": write_infos,
    "json lines": write_lines,
    "link": write_link,
}


def run_command(command: str, datasets: Any) -> Any:
    arguments = [
        "--model_name_or_path",
        "model",
        "--datasets",
        json.dumps([datasets] if isinstance(datasets, str) else datasets),
    ]
    if command != "inspect":
        arguments += ["--device", "cpu", "--max_steps", "1", "--per_device_train_batch_size", "1"]
    return run(command, *arguments)


def set_offline(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", value)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", value)


SAMPLE = [(way, "inspect", False) for way in WAYS] + [
    ("parquet", "train", True),
    ("card beside json lines", "plan", True),
]


@pytest.mark.parametrize(("way", "command", "offline"), SAMPLE)
def test_nothing_is_contacted_or_opened(
    way: str, command: str, offline: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_offline(offline, monkeypatch)
    result = run_command(command, WAYS[way](watch, "Image"))
    assert watch.touched() == []
    assert result.exit_code in (0, 2, 4), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("command", ["inspect", "train", "plan"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_contacted_or_opened_by_any_command(
    way: str, kind: str, command: str, offline: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_offline(offline, monkeypatch)
    run_command(command, WAYS[way](watch, kind))
    assert watch.touched() == []


def bomb(line: str) -> str:
    """Return a card of two kilobytes of which each line has nine times what the one before has."""
    lines = ["a0: &a0 {k: 1, l: [1, 2]}"]
    lines += [f"a{n}: &a{n} {line.format(each=', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 30)]
    return "\n".join(lines)


CARDS = {
    "merge keys": bomb("{{<<: [{each}]}}"),
    "aliases": bomb("[{each}]"),
    "long": "a: [" + "x," * 2**20 + "]",
    "nested": "a: " + "[" * 100_000,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "file"), [*((kind, "README.md") for kind in CARDS), ("merge keys", ".huggingface.yaml")]
)
def test_a_card_of_the_hub_costs_little(kind: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_offline(False, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    text = f"---\n{CARDS[kind]}\n---\n" if file == "README.md" else CARDS[kind]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    with hub_with({"train.jsonl": rows, file: text.encode()}, monkeypatch):
        cost = cost_of(lambda: read_hub(DatasetConfig(path=NAME)))
    assert not cost.problem
    assert cost.kind == "HorizonError"
    assert "the YAML of its card is rejected" in cost.message


@pytest.mark.parametrize("data_files", thinned([None, "ADDRESS", "PATH", "../elsewhere/*", "train.jsonl"], every=2))
def test_a_card_of_the_hub_names_files_of_its_own(
    data_files: str | None, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_offline(False, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    places = {"ADDRESS": watch.url.replace("png", "jsonl"), "PATH": str(watch.canary)}
    is_own = data_files in (None, "train.jsonl")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    text = f"---\n{json.dumps({'configs': [{'config_name': 'default', 'data_files': places.get(data_files, data_files)}]})}\n---\n"
    with hub_with({"train.jsonl": rows} | ({"README.md": text.encode()} if data_files else {}), monkeypatch) as address:
        result = run_command("inspect", [{"path": NAME}])
    touched = [event for event in watch.touched() if address.rpartition(":")[2] not in event]
    assert touched == []
    assert result.exit_code == (0 if is_own else 4), result.stderr
    assert is_own or "which is no file of this dataset on the hub" in result.stderr
