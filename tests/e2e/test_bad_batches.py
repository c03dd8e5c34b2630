"""A step that is not finite names the unit, the micro-batch and the row that cause it, and its batch is saved."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.errors import NonFiniteError
from horizon_lm.model.files import checkpoint_loader
from horizon_lm.runs.training.bad_rows import search_by_halving
from horizon_lm.runs.training.train import train
from tests.e2e import tiny
from tests.support.image_models import picture, save_llava

ESCAPES = "Z\x1b]0;title\x07\x7f"  # a token whose embedding is poisoned, and what a terminal would obey


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose embedding of the token Z is infinite."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(checkpoint_loader, "require_finite", lambda *args: None)
    folder = tiny.save_model(tmp_path / "poisoned")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][tiny.build_tokenizer()("Z")["input_ids"][0]] = float("inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(model: Path, folder: Path, rows: list[dict[str, str]], **settings: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    config = {
        "model_name_or_path": str(model), "datasets": str(tiny.write_jsonl(folder / "rows.jsonl", rows)),
        "output_dir": str(folder / "run"), "device": "cpu", "per_device_train_batch_size": len(rows), "max_steps": 1,
        "device_micro_batch_size": 2, **settings,
    }  # fmt: skip
    return train(config, print_fn=said.append), said


def poisoned_rows(count: int, *bad: int) -> list[dict[str, str]]:
    rows = tiny.alpaca_rows(count)
    for index in bad:
        rows[index]["instruction"] += ESCAPES
    return rows


def saved(folder: Path, step: int = 1) -> dict[str, Any]:
    text = (folder / "run" / "bad-batches" / f"step-{step}.json").read_text(encoding="ascii")
    assert all(char == "\n" or " " <= char <= "~" for char in text), "not safe for a terminal"
    return json.loads(text)


def test_a_loss_names_its_unit_row_and_micro_batch(poisoned: Path, tmp_path: Path) -> None:
    rows = poisoned_rows(7, 4)
    with pytest.raises(NonFiniteError) as raised:
        run(poisoned, tmp_path, rows)
    file = saved(tmp_path)
    culprit = file["rows"][0]
    assert file["unit"] == "embed"
    assert culprit["place"].endswith("rows.jsonl:5")
    assert [row["causes_it"] for row in file["rows"]] == [True] + [False] * 6
    (position,), (micro_batch,) = file["causing_rows"], file["micro_batches"]
    assert micro_batch == position // 2
    assert f"It comes from row {position + 1} ({culprit['place']}) of 7, in micro-batch {micro_batch + 1} of 4." in str(
        raised.value
    )
    assert "embed is the first unit not to be finite" in str(raised.value)
    (sequence,) = culprit["sequences"]
    assert ESCAPES in sequence["text"]
    assert sequence["num_tokens"] == len(sequence["input_ids"]) == len(sequence["labels"])
    trained = [token for token, label in zip(sequence["input_ids"], sequence["labels"], strict=True) if label != -100]
    assert trained == [label for label in sequence["labels"] if label != -100]
    assert sequence["target_text"] in sequence["text"]


def test_a_row_with_an_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of a part of a batch are those of its rows."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(checkpoint_loader, "require_finite", lambda *args: None)
    model = save_llava(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    table[tiny.build_tokenizer()("Z")["input_ids"][0]] = float("inf")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    rows = []
    for number in range(5):
        picture(number).save(tmp_path / f"{number}.png")
        places = "<image>" * (number % 3)
        turns = ("user", f"{places}What is seen?{'Z' * (number == 3)}"), ("assistant", "Stars.")
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"messages": messages, "images": [f"{number}.png"] * (number % 3)})
    with pytest.raises(NonFiniteError, match=r"It comes from row \d \(.*rows.jsonl:4\) of 5"):
        run(model, tmp_path, rows, objective="sft", device_micro_batch_size=None)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_gradient_names_its_row(tmp_path: Path, model: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite: a hook breaks the gradient of the first block for rows with the token Z."""
    token = tiny.build_tokenizer()("Z")["input_ids"][0]
    from horizon_lm.runs.training import setup

    load = setup.load_model

    def load_with_hook(*args: Any, **kwargs: Any) -> Any:
        streamed = load(*args, **kwargs)
        seen: dict[str, torch.Tensor] = {}
        streamed.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.update(ids=args[0]))

        class Break(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
                ctx.bad = (seen["ids"] == token).any(1)
                return hidden.view_as(hidden)

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad.masked_fill(ctx.bad[:, None, None], float("inf"))

        def broken(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            return Break.apply(hidden) if torch.is_grad_enabled() and len(hidden) == len(seen["ids"]) else output

        streamed.model.layers[0].register_forward_hook(broken)
        return streamed

    monkeypatch.setattr("horizon_lm.runs.training.setup.load_model", load_with_hook)
    rows: list[Any] = poisoned_rows(5, 1, 3)
    if objective == "dpo":
        rows = [{"prompt": r["instruction"], "chosen": r["output"], "rejected": "no"} for r in rows]
    settings = {"objective": objective, "non_finite": "skip", "device_micro_batch_size": None}
    result, said = run(model, tmp_path, rows, **settings)
    assert result.num_skipped == 1
    file = saved(tmp_path)
    assert sorted(row["place"].rpartition(":")[2] for row in file["rows"] if row["causes_it"]) == ["2", "4"]
    assert {len(row["sequences"]) for row in file["rows"]} == {2 if objective == "dpo" else 1}
    (line,) = [line for line in said if line.startswith("step 1: skipped, because the gradient of ")]
    assert "It comes from row " in line
    assert "is not finite" in line


def test_a_search_leaves_nothing_behind(poisoned: Path, tmp_path: Path) -> None:
    """Steps after a skipped one are those of a run in which nothing is searched."""
    rows = poisoned_rows(8, 3)
    settings = {"non_finite": "skip", "max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 1}
    results = []
    for name, most in (("searched", 10), ("not", 0)):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("horizon_lm.runs.training.non_finite._MOST_SEARCHES", most)
            result, _ = run(poisoned, tmp_path / name, rows, **settings)
        assert result.num_skipped
        results.append((result.model_dir / "model.safetensors").read_bytes())
        lines = [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        results.append([(line["loss"], line["grad_norm"]) for line in lines])
    assert results[:2] == results[2:]


def test_a_file_is_bounded(poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_lm.runs.training.non_finite._MOST_TOKENS", 40)
    with pytest.raises(NonFiniteError):
        run(poisoned, tmp_path, poisoned_rows(6, 2))
    file = saved(tmp_path)
    assert file["num_rows"] == 6
    assert file["rows"][0]["causes_it"]
    tokens = [len(sequence["input_ids"]) for row in file["rows"] for sequence in row["sequences"]]
    assert sum(tokens) == 40


def test_a_folder_is_bounded(poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_lm.runs.training.non_finite._MOST_FILES", 1)
    settings = {"non_finite": "skip", "max_consecutive_skips": None, "max_steps": 3}
    run(poisoned, tmp_path, poisoned_rows(3, 1), **settings)
    assert len(list((tmp_path / "run" / "bad-batches").iterdir())) == 1


def test_a_batch_that_cannot_be_saved_does_not_hide_the_error(poisoned: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "bad-batches").write_text("in the way")
    with pytest.raises(NonFiniteError, match="could not be saved"):
        run(poisoned, tmp_path, poisoned_rows(3, 1))


def test_a_users_loss_is_not_called_again(model: Path, tmp_path: Path) -> None:
    calls = []

    def objective(model: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return model(**batch.inputs(), labels=batch.labels).loss * float("nan")

    config = {
        "model_name_or_path": str(model), "datasets": str(tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))),
        "output_dir": str(tmp_path / "run"), "device": "cpu", "max_steps": 1,
    }  # fmt: skip
    with warnings.catch_warnings(), pytest.raises(NonFiniteError, match="The batch is in"):
        train(config, objective=objective, print_fn=lambda line: None)
    assert len(calls) == 1
    assert saved(tmp_path)["causing_rows"] is None


@pytest.mark.parametrize("bad", [[], [0], [6], [2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_the_search_finds_every_bad_row(bad: list[int]) -> None:
    tried = []

    def is_bad(rows: Any) -> bool:
        tried.append(rows)
        return any(row in bad for row in rows)

    assert search_by_halving(7, is_bad, 100) == (bad, True)
    assert len(tried) <= 13
    found, is_complete = search_by_halving(7, is_bad, 5)
    assert set(found) <= set(bad)
    assert not is_complete or found == bad
    assert is_complete or len(bad) > 1 or bad == [6]
