"""Law: the number of ranks changes no bit, whatever optimizer, precision and kind of moments."""

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

from horizon_lm.common.optimizers import MOMENT_BYTES, OPTIMIZERS, OptimizerEntry
from horizon_lm.memory.precision import PRECISIONS
from tests.distributed.pool import Pool
from tests.distributed.training import Training, alone, assert_same, run
from tests.support.thinned_cases import covering

MODES = list(zip(PRECISIONS, MOMENT_BYTES, strict=True))


def _id(value: object) -> str:
    return value.name if isinstance(value, OptimizerEntry) else str(value)


def training_of(entry: OptimizerEntry, precision: str, moments: str, **settings: bool) -> Training:
    clip = {} if settings.get("tied") else {"max_grad_norm": 0.1}
    return Training(
        optim=entry.name,
        settings={"precision": precision, "grad_dtype": torch.float32},
        optimizer={"lr": 1e-3, "moments": moments, **clip},
        overrides={"tie_word_embeddings": settings.get("tied", False)},
        together=settings.get("tied", False),
    )


@pytest.mark.parametrize(("mode", "entry", "tied"), covering(MODES, OPTIMIZERS.values(), [False, True]), ids=_id)
def test_bits_of_one_process(pool: Pool, entry: OptimizerEntry, mode: tuple[str, str], tied: bool) -> None:
    training = training_of(entry, *mode, tied=tied)
    outcomes, expected = pool.run(training.world, run, training), alone(training)
    assert_same(outcomes, expected, training)
    losses = [sum(each.losses[step] for each in outcomes) for step in range(training.steps)]
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert outcomes[0].norms == outcomes[1].norms == pytest.approx(expected.norms, rel=1e-6)


def test_a_rank_alone_is_noticed(pool: Pool) -> None:
    """Control: one rank with the rows of its own has other weights."""
    training = training_of(OPTIMIZERS["adamw"], "float32", "float32")
    outcomes = pool.run(2, run, training)
    one = alone(Training(**{**vars(training), "shard": 1}))
    with pytest.raises(AssertionError):
        assert_same(outcomes, one, training)
