"""The benchmark of drawn pictures, with few steps and a tiny tokenizer."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from picture_rows import COMBINATIONS, KNOWN, NEW, draw
from picture_task import relative_differences, report, run_seed

from tests.e2e.tiny import build_tokenizer


def test_combinations_are_kept_out_of_the_training_rows() -> None:
    assert sorted([*KNOWN, *NEW]) == sorted(COMBINATIONS)
    assert len(NEW) == 24
    for place in range(3):  # each colour, shape and digit is trained on
        assert {each[place] for each in KNOWN} == {each[place] for each in COMBINATIONS}


def test_no_two_pictures_are_alike() -> None:
    random = np.random.default_rng(0)
    pictures = {draw(KNOWN[0], random).tobytes() for _ in range(8)}
    assert len(pictures) == 8


def test_both_train_alike(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    sizes = {"steps": 3, "plain_steps": 3, "batch": 4, "rows": 8, "held_out": 2}
    arguments = argparse.Namespace(runs=tmp_path, tokenizer=tmp_path / "tokenizer", output=None, figure=None, **sizes)
    found = run_seed(arguments, 1)
    rows = [json.loads(line) for line in (tmp_path / "seed1" / "train" / "rows.jsonl").read_text().splitlines()]
    captions = {" ".join(map(str, each)) for each in NEW}
    assert not captions & {row["messages"][-1]["content"] for row in rows}
    assert len(found["horizon"]) == 3
    assert found["horizon"][0] != pytest.approx(found["horizon"][2], rel=1e-3)
    assert max(relative_differences(found)) < 1e-5
    assert len(found["plain"]) == 3
    assert [len(captions) for captions in found["captions"].values()] == [2, 2]
    assert "| 3 | " in report(arguments, {1: found})
