"""Checkpoints that do not match their config are rejected using only their headers, before weights are read."""

import json
import os
import struct
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import CheckpointWarning, ConfigError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support import tiny_models
from tests.support.prepared_rows import write_late_fault
from tests.support.thinned_cases import thinned

UP = "model.layers.1.mlp.up_proj.weight"
Edit = Callable[[Path], None]


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    """Return an edit that changes the tensors of the weights file."""

    def edit(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, folder / "model.safetensors", {"format": "pt"})

    return edit


def cast(dtype: torch.dtype) -> Edit:
    return tensors(lambda found: found.update({UP: (found[UP] * 100).to(dtype)}))


def settings(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def shards(change: Callable[[dict[str, str], Path], None]) -> Edit:
    """Return an edit that splits the weights into two files and changes their index."""

    def edit(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        index = {name: f"model-{1 + ('layers.1' in name)}.safetensors" for name in found}
        for file in set(index.values()):
            save_file({n: t for n, t in found.items() if index[n] == file}, folder / file, {"format": "pt"})
        change(index, folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return edit


REJECTED: dict[str, tuple[Edit, str]] = {
    "int64": (cast(torch.int64), f"{UP} is I64 in .*model.safetensors.*bf16 copy of the model"),
    "int8": (cast(torch.int8), f"{UP} is I8 in .*bf16 copy of the model"),
    "bool": (cast(torch.bool), f"{UP} is BOOL in .*bf16 copy of the model"),
    "fp8": (cast(torch.float8_e4m3fn), f"{UP} is F8_E4M3 in .*bf16 copy of the model"),
    "missing": (tensors(lambda found: found.pop(UP)), f"lacks 1 of .*{UP}"),
    "other shape": (tensors(lambda found: found.update({UP: found[UP][:40]})), rf"{UP} has shape \(40, 32\)"),
    "broadcastable shape": (tensors(lambda found: found.update({UP: found[UP][:1]})), rf"{UP} has shape \(1, 32\)"),
    "dropped blocks": (settings(num_hidden_layers=1), r"model\.layers\.1 .*num_hidden_layers"),
    "cut off": (cut_off, "model.safetensors cannot be read"),
    "cut off in the header": (
        lambda folder: os.truncate(folder / "model.safetensors", 90),
        "model.safetensors cannot be read",
    ),
    "empty": (lambda folder: os.truncate(folder / "model.safetensors", 0), "model.safetensors cannot be read"),
    "a pointer of git": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors cannot be read",
    ),
    "no shard": (shards(lambda index, folder: (folder / "model-2.safetensors").unlink()), "model-2.*missing"),
    "wrong index": (
        shards(lambda index, folder: index.update({UP: "model-1.safetensors"})),
        f"names {UP} in model-1.safetensors, which does not have it",
    ),
    "twice": (tensors(lambda found: found.update({UP.removeprefix("model."): found[UP] + 1})), f"both .*{UP}"),
}
WARNED: dict[str, tuple[Edit, str]] = {
    "another head": (
        tensors(lambda found: found.update({"score.weight": torch.ones(2, 32), "score.bias": torch.ones(2)})),
        r"2 tensors \(for example score\.bias\) .* neither trained nor exported",
    ),
    "a bias": (
        tensors(lambda found: found.update({UP.replace("weight", "bias"): torch.ones(48)})),
        r"1 tensor \(for example model\.layers\.1\.mlp\.up_proj\.bias\) .* neither trained nor exported",
    ),
    "old buffers": (
        tensors(lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})),
        r"1 tensor \(for example model\.layers\.0\.self_attn\.rotary_emb\.inv_freq\) .* known not to belong .* will not be exported",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save_model(tmp_path / "model")


def opened(folder: Path) -> None:
    try:
        horizon_lm.from_pretrained(folder)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def run_command(command: str) -> Callable[[Path], None]:
    def use(folder: Path) -> None:
        rows = write_late_fault(folder.parent / "rows.jsonl")  # reading the rows would raise another error
        arguments = ["--model", folder] if command == "plan" else ["--model_name_or_path", folder, "--datasets", rows]
        result = run(command, *arguments, "--device", "cpu", "--output_dir", folder.parent / "run")
        if result.exit_code:
            assert result.exit_code == 2
            raise SystemExit(result.stderr)
        if "known not to belong" in result.stdout or "neither trained" in result.stdout:
            warnings.warn(result.stdout, CheckpointWarning, stacklevel=2)

    return use


ENTRY_POINTS = {"from_pretrained": opened, "train": run_command("train"), "plan": run_command("plan")}


@pytest.mark.parametrize(("name", "entry_point"), thinned(product(REJECTED, ENTRY_POINTS), every=2))
def test_broken_checkpoints_are_rejected(
    name: str, entry_point: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, message = REJECTED[name]
    edit(folder)
    monkeypatch.setattr(Checkpoint, "read", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        ENTRY_POINTS[entry_point](folder)


@pytest.mark.parametrize("entry_point", ["from_pretrained", "plan"])
@pytest.mark.parametrize("name", WARNED)
def test_checkpoints_with_extra_tensors_are_warned_about(name: str, entry_point: str, folder: Path) -> None:
    edit, message = WARNED[name]
    edit(folder)
    with pytest.warns(CheckpointWarning, match=f"(?s){message}"):
        ENTRY_POINTS[entry_point](folder)


def test_run_reports_unused_tensors(folder: Path, tmp_path: Path) -> None:
    WARNED["another head"][0](folder)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    result = run("train", "--model_name_or_path", folder, "--datasets", rows, "--device", "cpu", "--max_steps", 1,
                 "--output_dir", tmp_path / "run")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("neither trained nor exported") == 1


def test_valid_checkpoints_are_not_warned_about(folder: Path) -> None:
    """The names in a valid checkpoint may lack the prefix of the model, and buffers may have any dtype."""
    rename = tensors(lambda found: found.update({n.removeprefix("model."): found.pop(n) for n in list(found)}))
    rename(folder)
    tensors(lambda found: found.update({"model.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)}))(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for use in (opened, run_command("plan")):
            use(folder)
    assert not [each for each in caught if issubclass(each.category, CheckpointWarning)]


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "mixtral",
        *[pytest.param(each, marks=pytest.mark.slow) for each in ("gpt_oss", "qwen3_next", "deepseek_v3", "phi3")],
    ],
)
def test_shapes_of_converted_tensors_are_checked(family: str, tmp_path: Path) -> None:
    """One tensor at a time is one element too short, including tensors that are stacked, split or renamed."""
    tiny_models.build(family).save_pretrained(tmp_path)
    opened(tmp_path)
    for name in list(load_file(tmp_path / "model.safetensors")):
        before = (tmp_path / "model.safetensors").read_bytes()
        tensors(lambda found, name=name: found.update({name: found[name][..., :-1]}))(tmp_path)
        with pytest.raises(SystemExit, match=r"shape|cannot be converted"):
            opened(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(before)


def test_missing_buffer_is_warned_about(tmp_path: Path) -> None:
    tiny_models.build("deepseek_v3").save_pretrained(tmp_path)
    tensors(lambda found: found.pop("model.layers.1.mlp.gate.e_score_correction_bias"))(tmp_path)
    with pytest.warns(
        CheckpointWarning, match=r"e_score_correction_bias\) is missing and will have the values of a new"
    ):
        opened(tmp_path)


# A tied head


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [0, 5, -1])
def test_tied_head_with_other_weights_is_kept(tmp_path: Path, row: int) -> None:
    """As in transformers, which unties it, however few values differ. The plan counts it, and the exported config is true."""
    tiny_models.build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    tied = run("plan", "--model", tmp_path / "model").output

    def head(found: dict[str, torch.Tensor]) -> None:
        table = found["model.embed_tokens.weight"].clone()
        table[row, 3] += 1
        found["lm_head.weight"] = table

    tensors(head)(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.warns(CheckpointWarning, match="a head of its own, which is kept, as in transformers"):
        model = horizon_lm.from_pretrained(tmp_path / "model", "cpu", "float32", head="whole")
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    weights = [{name: param.detach() for name, param in each.named_parameters()} for each in (plain, model)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    own = run("plan", "--model", tmp_path / "model").output
    assert own.partition(" parameters")[0] != tied.partition(" parameters")[0]
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]])
@pytest.mark.parametrize("precision", ["fp32_master", "bf16", "float32"])
def test_tied_head_under_its_other_name(names: list[str], precision: str, tmp_path: Path) -> None:
    reference = tiny_models.build("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)

    def rename(found: dict[str, torch.Tensor]) -> None:
        table = found.pop("model.embed_tokens.weight")
        found.update({name: table.clone() for name in names})

    tensors(rename)(tmp_path)
    model = horizon_lm.from_pretrained(tmp_path, precision=precision)
    expected = reference.get_input_embeddings().weight
    assert torch.equal(
        model.get_input_embeddings().weight.data.float(), expected.to(model.lm_head.weight.dtype).float()
    )


def test_only_headers_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan accepts a file whose weights are a hole."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0] + 8
    with file.open("wb") as stream:
        stream.write(content[:length])
        stream.truncate(len(content))
    monkeypatch.setattr(Checkpoint, "read", lambda *args: pytest.fail("weights were read"))
    run_command("plan")(folder)
