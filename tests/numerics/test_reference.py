"""Reference log-probabilities: whose they are, and what is kept of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets", reason="needs the whole installation")

import horizon_lm
from horizon_lm.config import DpoConfig
from horizon_lm.data.prepare import prepare
from horizon_lm.data.table import TokenTable
from horizon_lm.errors import NonFiniteError
from horizon_lm.objective import reference
from horizon_lm.objective.reference import ReferenceCache, model_key
from horizon_lm.training.rows import recipe_of
from tests.e2e import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "horizon-lm" / "reference"


@pytest.fixture
def rows(tmp_path: Path) -> TokenTable:
    pairs = [{"prompt": f"Night {n}? ", "chosen": "Stars. " * (n + 1), "rejected": "Rain."} for n in range(5)]
    file = tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    config = DpoConfig(model_name_or_path="-", datasets=str(file))
    return prepare(config.datasets, tiny.build_tokenizer(), recipe_of(config)).rows


def build(precision: str = "fp32_master") -> Any:
    return horizon_lm.stream(tiny.build_model(402), device="cpu", precision=precision)


def test_one_bit_of_a_weight_makes_another_key() -> None:
    model = build()
    before = model_key(model)
    assert model_key(build()) == before
    assert model_key(build("bf16")) != before
    store = model._horizon.engine.store
    store.units["block1"].low[3] ^= 1
    assert model_key(model) != before


class InterruptionError(Exception):
    pass


def test_goes_on_where_it_was_interrupted(cache: Path, rows: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build(), []
    expected = ReferenceCache(model).logprobs(rows, 2)
    for file in cache.iterdir():
        file.unlink()

    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        ReferenceCache(model).logprobs(rows, 2, interrupt)
    compute = reference.answer_logprobs
    monkeypatch.setattr(reference, "answer_logprobs", lambda *args: calls.append(1) or compute(*args))
    assert np.array_equal(ReferenceCache(model).logprobs(rows, 2), expected)
    assert len(calls) == 1
    assert np.array_equal(ReferenceCache(model).logprobs(rows, 2), expected)
    assert len(calls) == 1
    (kept,) = cache.iterdir()
    assert np.array_equal(np.load(kept), expected)


def test_what_never_reached_the_disk_is_computed(cache: Path, rows: TokenTable) -> None:
    """A crash of the machine leaves zeros, or half a file; another run may have been faster."""
    model = build()
    expected = ReferenceCache(model).logprobs(rows, 2)
    (file,) = cache.iterdir()
    part = file.with_suffix(".part")
    broken = expected.copy()
    broken[2:4] = 0
    for left in (broken.tobytes(), broken.tobytes()[:13], b""):
        file.unlink()
        part.write_bytes(left)
        assert np.array_equal(ReferenceCache(model).logprobs(rows, 2), expected)
    file.write_bytes(file.read_bytes()[:40])
    assert np.array_equal(ReferenceCache(model).logprobs(rows, 2), expected)
    file.unlink()

    def be_overtaken(done: int, total: int) -> None:
        if done == 2:
            ReferenceCache(model).logprobs(rows, 2)

    assert np.array_equal(ReferenceCache(model).logprobs(rows, 2, be_overtaken), expected)
    assert [each.name for each in cache.iterdir()] == [file.name]


def test_works_where_nothing_can_be_kept(cache: Path, rows: TokenTable) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in the place of a folder")
    found = ReferenceCache(build())
    assert "cannot be kept" in found.problem
    assert np.isfinite(found.logprobs(rows, 2)).all()


def test_broken_weights_are_told(cache: Path, rows: TokenTable) -> None:
    plain = tiny.build_model(402)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model = horizon_lm.stream(plain, device="cpu", precision="float32")
    with pytest.raises(NonFiniteError, match=r"pairs\.jsonl:1"):
        ReferenceCache(model).logprobs(rows, 2)
    assert not list(cache.iterdir())
