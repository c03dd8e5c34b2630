"""Reference log-probabilities: the key of their cache, and the values in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets", reason="needs the whole installation")

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.errors import NonFiniteError
from horizon_lm.runs.config import DpoConfig
from horizon_lm.runs.data.preprocess import prepare
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.objective import reference
from horizon_lm.runs.objective.reference import ReferenceCache, model_key
from horizon_lm.runs.training.rows import preprocess_config
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
    return prepare(config.datasets, tiny.build_tokenizer(), preprocess_config(config)).rows


def build(precision: str = "fp32_master") -> Any:
    return horizon_lm.stream(tiny.build_model(402), device="cpu", precision=precision)


def test_one_changed_weight_bit_changes_the_key() -> None:
    model = build()
    before = model_key(model)
    assert model_key(build()) == before
    assert model_key(build("bf16")) != before
    store = model._horizon.engine.store
    store.units[block(1)].plain.low[3] ^= 1
    assert model_key(model) != before


class InterruptionError(Exception):
    pass


def test_an_interrupted_computation_is_continued(
    cache: Path, rows: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert len(list(cache.iterdir())) == 1


def test_missing_values_are_computed(cache: Path, rows: TokenTable) -> None:
    """A crash of the machine leaves zeros, which another run may have filled."""
    model, said = build(), []
    expected = ReferenceCache(model).logprobs(rows, 2)
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[-48:-16] = bytes(32)
    file.write_bytes(content)
    assert np.array_equal(ReferenceCache(model, said.append).logprobs(rows, 2), expected)
    assert said == []
    file.unlink()

    def be_overtaken(done: int, total: int) -> None:
        if done == 2:
            ReferenceCache(model).logprobs(rows, 2)

    assert np.array_equal(ReferenceCache(model, said.append).logprobs(rows, 2, be_overtaken), expected)
    assert [each.name for each in cache.iterdir()] == [file.name]
    assert file.read_bytes()[-16:] == bytes(content[-16:])


def _flip(content: bytearray, at: int) -> None:
    content[at] ^= 0x40


ALTERATIONS: dict[str, Callable[[bytearray], None]] = {
    "the last byte": lambda content: _flip(content, -1),
    "a value": lambda content: _flip(content, len(content) - len(content) // 6 * 2 + 1),
    "every byte": lambda content: content.__setitem__(slice(None), bytes(255 - byte for byte in content)),
    "the first byte": lambda content: _flip(content, 0),
    "cut off": lambda content: content.__delitem__(slice(len(content) - 5, None)),
    "two rows swapped": lambda content: content.__setitem__(
        slice(-32, None), bytes(content[-16:]) + bytes(content[-32:-16])
    ),
    "empty": lambda content: content.clear(),
}


@pytest.mark.parametrize("state", ["whole", "interrupted"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_altered_values_are_computed_again(name: str, state: str, cache: Path, rows: TokenTable) -> None:
    model = build()
    expected = ReferenceCache(model).logprobs(rows, 2)
    (file,) = cache.iterdir()
    if state == "interrupted":
        file.unlink()
        with pytest.raises(InterruptionError):
            ReferenceCache(model).logprobs(rows, 2, lambda done, total: done == 4 and _interrupt())
        (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    ALTERATIONS[name](content)
    file.write_bytes(content)
    said: list[str] = []
    assert np.array_equal(ReferenceCache(model, said.append).logprobs(rows, 2), expected)
    if name != "empty":
        (line,) = said
        assert str(file) in line
        assert "computed again" in line
    said.clear()
    assert np.array_equal(ReferenceCache(model, said.append).logprobs(rows, 2), expected)
    assert said == []


def test_values_of_other_rows_are_not_used(cache: Path, rows: TokenTable) -> None:
    """The cache file of some rows has the name of the file of other rows."""
    ReferenceCache(build("bf16")).logprobs(rows, 2)
    (other,) = cache.iterdir()
    expected = ReferenceCache(build()).logprobs(rows, 2)
    (file,) = [each for each in cache.iterdir() if each != other]
    file.write_bytes(other.read_bytes())
    said: list[str] = []
    assert np.array_equal(ReferenceCache(build(), said.append).logprobs(rows, 2), expected)
    assert len(said) == 1


def _interrupt() -> None:
    raise InterruptionError


def test_works_without_a_writable_cache(cache: Path, rows: TokenTable) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in the place of a folder")
    found = ReferenceCache(build())
    assert "cannot be cached" in found.problem
    assert np.isfinite(found.logprobs(rows, 2)).all()


def test_broken_weights_are_reported(cache: Path, rows: TokenTable) -> None:
    plain = tiny.build_model(402)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model = horizon_lm.stream(plain, device="cpu", precision="float32")
    with pytest.raises(NonFiniteError, match=r"pairs\.jsonl:1"):
        ReferenceCache(model).logprobs(rows, 2)
    assert not list(cache.iterdir())
