"""The division of the cores of a machine between its ranks."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from horizon_lm.common.resources import limit_cores, usable_cores
from horizon_lm.distributed.cores import cores_near, keep_near, share_of

ALL, LOW, HIGH = set(range(16)), set(range(8)), set(range(8, 16))


def shares(allowed: list[set[int]], near: list[set[int]], quota: int | None = None) -> list[tuple[set[int], int]]:
    places = keep_near(allowed, near)
    return [(own, share_of(own, places, quota)) for own in places]


@pytest.mark.parametrize(
    ("allowed", "near", "quota", "expected"),
    [
        ([ALL] * 4, [LOW, LOW, HIGH, HIGH], None, [(LOW, 4), (LOW, 4), (HIGH, 4), (HIGH, 4)]),
        ([ALL] * 3, [LOW, LOW, HIGH], None, [(LOW, 4), (LOW, 4), (HIGH, 8)]),
        # Half of the cores, and of the memory's bandwidth, would be left unused.
        ([ALL] * 2, [LOW, LOW], None, [(ALL, 8), (ALL, 8)]),
        ([ALL] * 2, [set(), set()], None, [(ALL, 8), (ALL, 8)]),
        # A launcher has given each process cores of its own.
        ([LOW, HIGH], [ALL, ALL], None, [(LOW, 8), (HIGH, 8)]),
        ([LOW, HIGH], [HIGH, LOW], None, [(LOW, 8), (HIGH, 8)]),
        ([LOW] * 2, [LOW] * 2, None, [(LOW, 4), (LOW, 4)]),
        ([{0, 1}] * 4, [set()] * 4, None, [({0, 1}, 1)] * 4),
        ([ALL] * 2, [LOW, HIGH], 6, [(LOW, 3), (HIGH, 3)]),
    ],
    ids=str,
)
def test_shares(
    allowed: list[set[int]], near: list[set[int]], quota: int | None, expected: list[tuple[set[int], int]]
) -> None:
    assert shares(allowed, near, quota) == expected


def test_cores_near_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    gpu = torch.device("cuda", 1)
    assert cores_near(gpu, tmp_path) == set()
    (tmp_path / "0000:dc:00.0").mkdir()
    (tmp_path / "0000:dc:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cores_near(gpu, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert cores_near(torch.device("cpu"), tmp_path) == set()


def test_a_share_limits_all_threads() -> None:
    alone = usable_cores()
    try:
        limit_cores(1)
        assert usable_cores() == 1
        limit_cores(10**6)
        assert usable_cores() == alone
    finally:
        limit_cores(None)
    assert usable_cores() == alone
