"""A dropped streamed model frees its memory, regardless of how it was used."""

import gc
import itertools
import weakref

import pytest

import horizon_lm
from horizon_lm.common.units import block
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

USES = ("forward only", "evaluated", "trained", "failed")


def test_store_is_freed_without_the_garbage_collector() -> None:
    """Hundreds of gigabytes do not wait for a collection."""
    gc.disable()
    try:
        model = horizon_lm.stream(tiny_models.build("llama"), device_micro_batch_size=1)
        optimizer = horizon_lm.AdamW(model)
        model(**tiny_models.batch()).loss.backward()
        optimizer.step()
        horizon_lm.synchronize(model)
        store = weakref.ref(model._horizon.engine.store)
        del model, optimizer
        assert store() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("family", "head", "micro_batch_size", "used"),
    thinned(itertools.product(("llama", "mixtral", "gpt2"), ("chunked", "whole"), (None, 1), USES)),
)
def test_store_is_freed(family: str, head: str, micro_batch_size: int | None, used: str) -> None:
    model = horizon_lm.stream(tiny_models.build(family), head=head, device_micro_batch_size=micro_batch_size)
    optimizer = None
    if used == "evaluated":
        model.eval()
        model.generate(tiny_models.batch()["input_ids"], max_new_tokens=2, do_sample=False, pad_token_id=0)
    else:
        output = model(**tiny_models.batch())
        if used == "trained":
            optimizer = horizon_lm.AdamW(model)
            output.loss.backward()
            optimizer.step()
            horizon_lm.synchronize(model)
        if used == "failed":
            with pytest.raises(RuntimeError):
                output.loss.backward(output.loss.new_zeros(3))
        del output
    store = weakref.ref(model._horizon.engine.store)
    weights = weakref.ref(store().units[block(0)].plain.weights)
    del model, optimizer
    gc.collect()
    assert store() is None
    assert weights() is None
