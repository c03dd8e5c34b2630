"""Rows that are longer than the positions of a model are reported before it is loaded."""

from pathlib import Path
from typing import Any

import pytest

import horizon_lm
from horizon_lm.errors import DataError
from horizon_lm.model.positions import Positions, positions_of
from horizon_lm.runs.data.checks import check_lengths
from horizon_lm.runs.data.packing import pack_rows
from horizon_lm.runs.training import setup
from tests.e2e import tiny
from tests.support import tiny_models
from tests.support.prepared_rows import prepared, write


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_positions_of_a_model(family: str) -> None:
    model = tiny_models.build(family)
    number = model.config.max_position_embeddings
    assert positions_of(model) == Positions(number, is_table=family != "llama")


def test_packed_rows_begin_anew(tmp_path: Path) -> None:
    table, _ = prepared(write(tmp_path, [{"text": "The dome opens."}] * 6 + [{"text": "The dome opens at dusk. " * 3}]))
    packed = pack_rows(table, "bfd", int(table.lengths.max()))[0]
    shortest, longest = int(table.lengths.min()), int(table.lengths.max())
    assert check_lengths(packed, Positions(longest, True)) == check_lengths(packed, None) == []
    (found,) = check_lengths(packed, Positions(shortest, True))
    assert found.rows.count == 1


@pytest.mark.parametrize("rows", ["datasets", "eval_datasets"])
@pytest.mark.parametrize("is_table", [False, True])
def test_long_rows_are_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, is_table: bool
) -> None:
    class LoadedError(Exception):
        pass

    def load(*_: Any) -> Any:
        raise LoadedError

    folder = tiny.save_model(tmp_path / "model")
    if is_table:
        tiny_models.build("gpt2").save_pretrained(folder)
    short = tiny.write_jsonl(tmp_path / "short.jsonl", tiny.alpaca_rows(2))
    row = {"instruction": "Which stars?", "output": "Stars. " * 150}
    long = tiny.write_jsonl(tmp_path / "long.jsonl", [*tiny.alpaca_rows(1), row])
    settings = {"model_name_or_path": str(folder), "datasets": [str(short)], "max_length": 700, "device": "cpu"}
    settings |= {"output_dir": str(tmp_path / "run"), rows: [str(long)]}
    number = 64 if is_table else 256
    lines: list[str] = []
    monkeypatch.setattr(setup, "load_model", load)
    with pytest.raises(DataError if is_table else LoadedError) as caught:
        horizon_lm.train(settings, print_fn=lines.append)
    said = str(caught.value) if is_table else "\n".join(lines)
    assert f"rows that are longer than the model's {number} positions: 1 ({long}:2); it " in said
    assert f"set max_length: {number}" in said
