"""Hostile and damaged model folders: nothing in them runs, nothing outside of them is read, each is one clear error."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from horizon_lm.errors import HorizonError
from horizon_lm.runs.admission.inputs import fetch_source
from horizon_lm.runs.config import RunConfig, SftConfig
from horizon_lm.runs.training.setup import check_weights, load_tokenizer
from tests.e2e import tiny
from tests.e2e.command import run
from tests.security.folder_edits import Edit, changed, link, text
from tests.support.prepared_rows import write_late_fault

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


def header(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Edit that changes the header of the weights, and nothing else."""

    def edit(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        new = change(entries) or json.dumps(entries)
        encoded = new.encode() if isinstance(new, str) else json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])

    return edit


def offsets(name: str, start: int, stop: int) -> Edit:
    def change(entries: dict[str, Any]) -> None:
        old = entries[name]["data_offsets"]
        entries[name]["data_offsets"] = [old[0] + start, old[1] + stop]

    return header(change)


def indexed(file_of: Callable[[Path], str]) -> Edit:
    """Edit that moves the weights outside of the folder, and names them there in an index."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        secret = folder.parent / "secret" / "stolen.safetensors"
        secret.parent.mkdir()
        save_file(tensors, secret, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file_of(folder))}))

    return edit


def index(content: str) -> Edit:
    """Edit that replaces the weights by the text of an index."""

    def edit(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(content)

    return edit


def pipe(file: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return edit


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")


def remote_code(folder: Path) -> None:
    (folder / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass C: pass\n")
    changed("config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"})(
        folder
    )


def remote_tokenizer(folder: Path) -> None:
    (folder / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass C: pass\n")
    changed("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.C", "evil.C"]})(folder)


def far_token(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<far>"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(content))


MANY = '{"a": [' + "{}," * 300_000 + "1]}"
BOMB = struct.pack("<Q", 60_000_000) + b"{" + b" " * 60_000_000
CASES: dict[str, tuple[Edit, str]] = {
    # code
    "pickle": (pickled, "pytorch_model.bin, which may run code.*convert the weights to safetensors"),
    "pickle in the index": (indexed(lambda f: "pytorch_model.bin"), "'pytorch_model.bin', but only safetensors"),
    "auto_map": (remote_code, "custom code|trust_remote_code"),
    "auto_map of the tokenizer": (remote_tokenizer, "no tokenizer that can be read"),
    "kernel of the hub": (changed("config.json", attn_implementation="evil/kernel"), "names a kernel on the hub"),
    # other folders
    "index with ../": (indexed(lambda f: "../secret/stolen.safetensors"), "outside of"),
    "index with an absolute path": (indexed(lambda f: f"{f.parent}/secret/stolen.safetensors"), "outside of"),
    "link to other weights": (link(WEIGHTS, "../elsewhere"), "elsewhere, outside of"),
    "link to a tokenizer": (link("tokenizer.json", "/etc/passwd"), "tokenizer.json leads to /etc/passwd, outside of"),
    "link to a config": (link("config.json", "/etc/passwd"), "config.json leads to /etc/passwd"),
    # no files
    "pipe as weights": (pipe(WEIGHTS), f"{WEIGHTS} is a pipe"),
    "pipe as tokenizer": (pipe("tokenizer.json"), "tokenizer.json is a pipe"),
    "pipe as config": (pipe("config.json"), "config.json is a pipe"),
    "device as weights": (link(WEIGHTS, "/dev/zero"), "zero, outside of"),
    # headers
    "header bomb": (text(WEIGHTS, BOMB), "no safetensors header"),
    "nested header": (header(lambda entries: "[" * 100_000), "cannot be read"),
    "header that is a list": (header(lambda entries: "[]"), "cannot be read"),
    "overlap": (offsets(UP, -64, -64), f"{UP} overlaps"),
    "gap": (offsets(UP, 64, 64), f"{UP} does not follow"),
    "oversized": (offsets(UP, 0, 64), f"{UP} has 6,208 bytes, but its shape .* needs 6,144"),
    "huge shape": (header(lambda e: e[UP].update(shape=[2**62, 2**62])), UP),
    "negative shape": (header(lambda e: e[UP].update(shape=[-48, -32])), UP),
    "unknown dtype": (header(lambda e: e[UP].update(dtype="Q4")), f"{UP} has the unknown dtype"),
    "tensor twice": (
        header(lambda e: json.dumps(e)[:-1] + f', "{UP}": {json.dumps(e[UP])}}}'),
        f"{UP} is there twice",
    ),
    # damaged JSON
    "index that is text": (index("{"), f"{INDEX} is not an index of weights"),
    "index without files": (index('{"weight_map": []}'), f"{INDEX} is not an index of weights"),
    "index of numbers": (index('{"weight_map": {"a": 1}}'), f"{INDEX} is not an index of weights"),
    "nested index": (index("[" * 100_000), f"{INDEX} is not an index of weights"),
    "tokenizer that is text": (text("tokenizer.json", "{"), "no tokenizer that can be read"),
    "empty tokenizer": (text("tokenizer.json", "{}"), "no tokenizer that can be read"),
    "tokenizer of numbers": (text("tokenizer.json", "[1, 2]"), "no tokenizer that can be read"),
    "nested tokenizer": (text("tokenizer.json", "[" * 100_000), "no tokenizer that can be read"),
    "tokenizer settings that are a list": (text("tokenizer_config.json", "[]"), "no tokenizer that can be read"),
    "token beyond 32 bits": (far_token, "token"),
    "generation settings that are text": (text("generation_config.json", "{"), "generation_config.json cannot be read"),
    "generation settings that are a list": (text("generation_config.json", "[]"), "generation_config.json cannot be read"),
    "config that is a list": (text("config.json", "[]"), "config.json is no JSON object"),
    "nested config": (text("config.json", "[" * 100_000), "config.json cannot be read"),
    "config that is not UTF-8": (text("config.json", b"\xff\xfe"), "config.json cannot be read"),
    "unknown model type": (changed("config.json", model_type="nonsense"), "no usable config.json"),
    # absurd sizes
    "ten million layers": (changed("config.json", num_hidden_layers=10**7), "num_hidden_layers is 10,000,000"),
    "ten million experts": (
        changed("config.json", model_type="mixtral", num_local_experts=10**7), "num_local_experts is 10,000,000",
    ),
    "huge width": (changed("config.json", hidden_size=10**15), "hidden_size is 1,000,000,000,000,000"),
    "huge vocabulary": (changed("config.json", vocab_size=2**62), "vocab_size"),
    "a hundred million labels": (changed("config.json", num_labels=10**8), "num_labels is 100,000,000"),
    "names of many labels": (changed("config.json", id2label=dict.fromkeys(range(300_000), "x")), "has 300,.* values"),
    "many tokens": (text("added_tokens.json", json.dumps({f"t{n}": n for n in range(300_000)})), "has 299,999 values"),
    "many tokenizer settings": (text("tokenizer_config.json", MANY), "has 300,000 values"),
    "many special tokens": (text("special_tokens_map.json", MANY), "has 300,000 values"),
    "many generation settings": (text("generation_config.json", MANY), "has 300,000 values"),
    "many weights": (index('{"weight_map": {' + "," * 1_100_000), "has 1,100,000 values"),
}  # fmt: skip

UNBUILDABLE: dict[str, Edit] = {  # sizes of no model, each with an error of the code that it is first used in
    "negative layers": changed("config.json", num_hidden_layers=-1),
    "no heads": changed("config.json", num_attention_heads=0),
    "negative width": changed("config.json", hidden_size=-32),
    "text for a width": changed("config.json", hidden_size="32"),
    "null for a width": changed("config.json", intermediate_size=[1]),
    "infinite": changed("config.json", rms_norm_eps=float("inf"), hidden_size=float("nan")),
    "fraction": changed("config.json", num_hidden_layers=1.5),
    "huge table of positions": changed(
        "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"], n_positions=10**6
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked on standard input"))
    return tiny.save_model(tmp_path / "model")


def read_model(config: RunConfig) -> None:
    """Read what a run reads of a model before it reads the rows, without its plan, which takes longer."""
    model = fetch_source(config).model
    load_tokenizer(config, model)
    check_weights(config, model)


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_rejected(name: str, folder: Path) -> None:
    edit, message = CASES[name]
    Path("elsewhere").write_bytes((folder / WEIGHTS).read_bytes())
    edit(folder)
    Path("rows.jsonl").touch()
    config = SftConfig(model_name_or_path=str(folder), datasets="rows.jsonl")
    with pytest.raises(HorizonError, match=message) as caught:
        read_model(config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


COMMANDS = ("auto_map", "index with ../", "ten million layers", "pipe as weights", "nested header")


@pytest.mark.parametrize("name", [*COMMANDS, "pickle", "auto_map of the tokenizer", *UNBUILDABLE])
def test_train_rejects(name: str, folder: Path) -> None:
    edit, message = CASES.get(name) or (UNBUILDABLE[name], "")
    Path("elsewhere").write_bytes((folder / WEIGHTS).read_bytes())
    edit(folder)
    rows = write_late_fault(Path("rows.jsonl"))  # reading the rows would raise another error
    result = run("train", "--model_name_or_path", folder, "--datasets", rows, "--device", "cpu", "--max_steps", 1)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert "\n" not in result.stderr.strip()
    assert re.search(message, result.stderr), result.stderr
    assert not Path("ran").exists()


TRIES = "(x+x+)+y"  # with a number of tries for a text of x that doubles with each of them


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pattern_that_tries_too_much(folder: Path, workers: int) -> None:
    """The library panics after a second; this is one error of the tokenizer, also from a process that tokenizes rows."""
    split = {"type": "Split", "pattern": {"Regex": TRIES}, "behavior": "Isolated", "invert": False}
    changed("tokenizer.json", pre_tokenizer=split)(folder)
    Path("rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n' * 20 + f'{{"prompt": "a", "completion": "{"x" * 60}"}}\n'
    )
    rows = ("--datasets", "rows.jsonl", "--device", "cpu", "--dataset_num_proc", workers)
    commands = [("inspect", "--model_name_or_path", folder, *rows), ("generate", folder, "x" * 60, "--device", "cpu")]
    for command in commands[: 3 - workers]:
        result = run(*command)
        assert result.exit_code == 2, (result.stdout, result.stderr)
        assert "\n" not in result.stderr.strip()
        assert f"{folder}: its tokenizer fails for a text (Onig: Regex search error" in result.stderr


@pytest.mark.parametrize("name", COMMANDS[:3])
def test_plan_rejects(name: str, folder: Path) -> None:
    Path("elsewhere").write_bytes((folder / WEIGHTS).read_bytes())
    CASES[name][0](folder)
    result = run("plan", "--model", folder, "--device", "cpu")
    assert result.exit_code == 2
    assert not Path("ran").exists()
