"""A dropped streamed model frees its memory, regardless of how it was used."""

import gc
import weakref

import pytest

import horizon_lm
from tests import families


@pytest.mark.parametrize("used", ["forward only", "evaluated", "trained", "failed"])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("head", ["chunked", "whole"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_store_is_freed(family: str, head: str, micro_batch_size: int | None, used: str) -> None:
    model = horizon_lm.stream(families.build(family), head=head, device_micro_batch_size=micro_batch_size)
    optimizer = None
    if used == "evaluated":
        model.eval()
        model.generate(families.batch()["input_ids"], max_new_tokens=2, do_sample=False, pad_token_id=0)
    else:
        output = model(**families.batch())
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
    weights = weakref.ref(store().units["block0"].weights)
    del model, optimizer
    gc.collect()
    assert store() is None
    assert weights() is None
