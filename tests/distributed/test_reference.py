"""The reference of DPO with several ranks: they share its rows, also if each has cached other rows."""

import os
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

import horizon_lm
from horizon_lm.runs.config import DpoConfig
from horizon_lm.runs.data.preprocess import prepare
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.objective import reference
from horizon_lm.runs.objective.reference import ReferenceCache
from horizon_lm.runs.training.rows import preprocess_config
from tests.distributed.pool import Pool
from tests.e2e import tiny

NUM_ROWS, BATCH = 11, 2


def read_rows(file: str) -> TokenTable:
    config = DpoConfig(model_name_or_path="-", datasets=file)
    return prepare(config.datasets, tiny.build_tokenizer(), preprocess_config(config)).rows


def compute(rank: int, file: str, caches: str, losing: int) -> tuple[list[list[float]], int, int]:
    """Return the reference of a rank, its passes, and those of a second time.

    Between the two, the cache of one rank loses some rows, as if the run had been interrupted there.
    """
    os.environ["XDG_CACHE_HOME"] = f"{caches}/{rank}"
    calls: list[int] = []
    original = reference.answer_logprobs
    reference.answer_logprobs = lambda *args: calls.append(1) or original(*args)  # type: ignore[func-returns-value]
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        model = horizon_lm.stream(tiny.build_model(402), device="cpu", precision="float32", device_mesh=mesh)
        rows = read_rows(file)
        found = ReferenceCache(model).logprobs(rows, BATCH)
        first = len(calls)
        if rank == losing:
            (cached,) = Path(caches, str(rank), "horizon-lm", "reference").iterdir()
            cached.write_bytes(cached.read_bytes()[:-40])
        assert np.array_equal(ReferenceCache(model).logprobs(rows, BATCH), found)
        return found.tolist(), first, len(calls) - first
    finally:
        reference.answer_logprobs = original
        del os.environ["XDG_CACHE_HOME"]


@pytest.mark.parametrize("losing", [0, 1])
def test_ranks_share_the_rows(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losing: int) -> None:
    pairs = [{"prompt": f"Night {n}? ", "chosen": "Stars. " * (n + 1), "rejected": "Rain."} for n in range(NUM_ROWS)]
    file = str(tiny.write_jsonl(tmp_path / "pairs.jsonl", pairs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alone"))
    model = horizon_lm.stream(tiny.build_model(402), device="cpu", precision="float32")
    expected = ReferenceCache(model).logprobs(read_rows(file), BATCH)
    for found, first, second in pool.run(2, compute, file, str(tmp_path), losing):
        assert np.array_equal(np.array(found, np.float32), expected)
        assert (first, second) == (3, 1)
