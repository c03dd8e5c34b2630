"""Limits on a run's host memory, and the cost of transfers if it cannot be page-locked."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from horizon_lm.common import resources
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.common.resources import MemoryLimit
from horizon_lm.planning.arithmetic.plan import make_plan
from horizon_lm.planning.arithmetic.remedies import _fewer_bytes_per_parameter
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.arithmetic.step_time import Simulation, staged
from horizon_lm.runs.admission.this_machine import _ADDRESS_BYTES, _host_limits
from tests.support.handmade_outlines import dense, machine

GIB = 2**30
FREE = MemoryLimit("MemAvailable", 20 * GIB, is_estimate=True)
GROUP = MemoryLimit("cgroup v2 /job (memory.max 40.00 GiB)", 40 * GIB)
ADDRESSES = MemoryLimit("RLIMIT_AS", 30 * GIB)


@pytest.mark.parametrize(
    ("found", "host_memory", "room", "names", "warned"),
    [
        ([FREE], None, 20 * GIB, ["MemAvailable"], False),
        ([FREE], 8 * GIB, 8 * GIB, ["host_memory", "MemAvailable"], False),
        ([FREE], 64 * GIB, 64 * GIB, ["host_memory"], True),
        ([FREE, GROUP], 64 * GIB, 40 * GIB, [GROUP.name, "host_memory"], True),
        ([FREE, GROUP], 32 * GIB, 32 * GIB, ["host_memory", GROUP.name], True),
        ([FREE, ADDRESSES], 64 * GIB, 30 * GIB - _ADDRESS_BYTES, ["RLIMIT_AS", "host_memory"], True),
        ([ADDRESSES, GROUP], 64 * GIB, 30 * GIB - _ADDRESS_BYTES, ["RLIMIT_AS", GROUP.name, "host_memory"], False),
        ([], 64 * GIB, 64 * GIB, ["host_memory"], False),
        ([], None, None, [], False),
    ],
)
def test_host_memory_overrides_estimates_only(
    monkeypatch: pytest.MonkeyPatch, found: list[MemoryLimit], host_memory: int | None, room: int | None,
    names: list[str], warned: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(resources, "memory_limits", lambda: found)
    limits, notes = _host_limits(host_memory)
    assert [limit.name for limit in limits] == names
    assert min((limit.bytes for limit in limits), default=None) == room
    assert [("20.00 GiB" in note, "MemAvailable" in note) for note in notes] == [(True, True)] * warned


def test_staged_transfers() -> None:
    """The host copies at half its bandwidth, during transfers to the device and after transfers from the device."""
    fast = machine(link_in=50e9, link_out=50e9, link_both=90e9, host_bandwidth={"1": 10e9, "16": 80e9})
    slow = staged(fast)
    assert (slow.link_in, slow.link_both) == (40e9, 40e9)
    assert slow.link_out == pytest.approx(1 / (1 / 50e9 + 1 / 40e9))
    behind_the_link = staged(machine(link_in=5e9, host_bandwidth={"16": 80e9}))
    assert behind_the_link.link_in == 5e9


HARDWARE = machine(host_bandwidth={"16": 40e9})


def _plan(**changes: Any) -> Any:
    where = Machine("here", False, HARDWARE, **changes)
    return make_plan(dense(), Request(per_device_train_batch_size=4, activation_checkpoints="host"), where)


def test_plan_without_page_locking_is_slower_and_says_why() -> None:
    locked, unlocked = _plan(), _plan(page_lock_error="out of memory; RLIMIT_MEMLOCK is 8.00 MiB")
    assert not [reason for reason in locked.reasons if "page-locked" in reason]
    (said,) = (reason for reason in unlocked.reasons if "page-locked" in reason)
    assert "out of memory; RLIMIT_MEMLOCK is 8.00 MiB" in said
    assert unlocked.time.seconds == Simulation(unlocked.step, staged(HARDWARE)).step_time().seconds
    assert unlocked.time.seconds > locked.time.seconds
    assert unlocked.host.bytes == locked.host.bytes


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"moments": "bfloat16"},
        {"precision": "float32", "grad_bytes": 4},
        {"precision": "float32", "grad_bytes": 4, "grad_dtype": torch.float32, "optimizer": OPTIMIZERS["lion"]},
    ],
    ids=str,
)
def test_changes_save_the_bytes_that_they_state(settings: dict[str, Any]) -> None:
    request = Request(per_device_train_batch_size=4, activation_checkpoints="host", **settings)
    outline, where = dense(), Machine("here", False, HARDWARE)
    num_params = outline.layout.num_parameters
    before = make_plan(outline, request, where).host.bytes
    for change in _fewer_bytes_per_parameter(request):
        stated = re.search(r"(\d+) bytes less per parameter", change.cost)
        assert stated is not None
        fields = {name: value for name, value in change.settings.items() if name in Request.names()} | change.of_request
        saved = before - make_plan(outline, replace(request, **fields), where).host.bytes
        # 8-bit moments have scales, and updates in the backward pass need the gradients of a few units.
        assert saved / num_params == pytest.approx(int(stated[1]), rel=0.15)
