"""Folders of quantized weights, each written once, a pool of ranks, and what starts runs."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.laws.trainings import Folders

if importlib.util.find_spec("pydantic"):  # the engine and its laws run without it
    from tests.support.run_fixtures import base, model, runs

    __all__ = ["base", "model", "runs"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that returns a folder of quantized weights, given the family and the format."""
    known: dict[tuple[str, str], Path] = {}

    def find(family: str, kind: str) -> Path:
        pytest.importorskip("peft", reason="needs the whole installation")
        from tests.support.quantized_folders import save_published

        if (family, kind) not in known:
            known[family, kind] = save_published(family, kind, tmp_path_factory.mktemp(f"{family}-{kind}") / "model")
        return known[family, kind]

    return find


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()
