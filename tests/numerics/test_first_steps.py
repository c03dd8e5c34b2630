"""What the first steps of a training would do once is done before them."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

import horizon_lm
from horizon_lm.memory.kernels import gradients, updates
from tests.support import tiny_models


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("AdamW", "bf16"), ("AdamW", "fp32_master"), ("AdamW", "float32"), ("Muon", "bf16")]
)
def test_no_kernel_is_compiled_in_a_step(optimizer: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (gradients.landing_kernel, gradients.rows_kernel, updates.update_kernel, updates.rows_kernel):
        each.cache_clear()
    model = horizon_lm.stream(tiny_models.build("llama"), device="cpu", precision=precision)
    trained = getattr(horizon_lm, optimizer)(model)
    monkeypatch.setattr(
        Dispatcher, "compile", lambda kernel, signature: pytest.fail(f"{kernel.py_func.__qualname__} {signature}")
    )
    for _ in range(2):
        model(**tiny_models.batch(), use_cache=False).loss.backward()
        trained.step()
        trained.zero_grad()
    horizon_lm.synchronize(model)


def resident_pages(tensor: torch.Tensor) -> int:
    """Return how many of the pages of a tensor the system has allocated."""
    start, stop = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    found = np.zeros(stop - start, np.uint8)
    library, address = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(start * mmap.PAGESIZE)
    assert not library.mincore(
        address, ctypes.c_size_t(len(found) * mmap.PAGESIZE), found.ctypes.data_as(ctypes.c_void_p)
    )
    return int((found & 1).sum())


@pytest.mark.parametrize("kind", ["float32", "8bit"])
def test_moments_are_allocated(kind: str) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), device="cpu", precision="bf16")
    optimizer = horizon_lm.AdamW(model, moments=kind)
    slabs = [each for unit in optimizer._moments.slabs.values() for each in unit.values() if each.values.numel()]
    before = [resident_pages(each.values) for each in slabs]
    optimizer.allocate_moments()
    after = [resident_pages(each.values) for each in slabs]
    assert sum(before) < sum(after)
    assert after == [-(-each.values.nbytes // mmap.PAGESIZE) for each in slabs]
    assert not any(each.values.any() or each.scales.any() for each in slabs)
