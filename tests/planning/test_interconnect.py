"""Rates of collectives compared with the messages that ranks exchange, and the share that a rank has of a machine."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import published
from horizon_lm.planning.arithmetic.interconnect import Interconnect, connect

PEER, NETWORK = 300.0, 40.0
SHAPES = [  # GPUs of a machine, machines, ranks of a copy
    (gpus, machines, ranks)
    for gpus, machines, ranks in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16, 32))
    if gpus * machines > 1 and gpus * machines % ranks == 0 and (ranks % gpus == 0 or gpus % ranks == 0)
]


def slowest(messages: Counter[tuple[int, int]], gpus: int) -> float:
    """Return the seconds until every rank has received its messages from its machine, and every machine from the others."""
    within: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for (sender, receiver), num_bytes in messages.items():
        if sender // gpus == receiver // gpus:
            within[receiver] += num_bytes
        else:
            into[receiver // gpus] += num_bytes
    return max(max(within.values(), default=0) / PEER, max(into.values(), default=0) / NETWORK)


def received(messages: Counter[tuple[int, int]], rank: int) -> int:
    return sum(num_bytes for (_, receiver), num_bytes in messages.items() if receiver == rank)


@pytest.mark.parametrize(("gpus", "machines", "ranks"), SHAPES)
def test_gather_takes_as_long_as_its_ring(gpus: int, machines: int, ranks: int) -> None:
    """In a ring each rank passes every range on to its neighbour, except the one that the neighbour owns."""
    messages: Counter[tuple[int, int]] = Counter()
    for first in range(0, gpus * machines, ranks):
        for place in range(ranks if ranks > 1 else 0):
            messages[first + place, first + (place + 1) % ranks] += ranks - 1
    rate = Interconnect(gpus, machines, PEER, NETWORK).gather_rate(ranks)
    if messages:
        assert received(messages, 0) / rate == pytest.approx(slowest(messages, gpus))
    else:
        assert rate == float("inf")


def messages_of_sum(gpus: int, ranks: int, whole: int, itemsize: int) -> Counter[tuple[int, int]]:
    """Return the bytes that ranks of a copy send each other to sum gradients of ``whole`` bytes."""
    messages: Counter[tuple[int, int]] = Counter()
    if gpus == 1 or ranks <= gpus:
        for owner, sender in product(range(ranks), range(ranks)):
            messages[sender, owner] += whole // ranks if owner != sender else 0
        return messages
    spanned = ranks // gpus
    for machine, place, sender in product(range(spanned), range(gpus), range(gpus)):
        if sender != place:
            messages[machine * gpus + sender, machine * gpus + place] += whole // gpus
    for machine, place in product(range(spanned - 1), range(gpus)):
        messages[machine * gpus + place, (machine + 1) * gpus + place] += whole // itemsize * 4 // gpus
        messages[ranks - gpus + place, machine * gpus + place] += whole // ranks
    return messages


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("gpus", "machines", "ranks"), SHAPES)
def test_sums_take_as_long_as_their_messages(gpus: int, machines: int, ranks: int, itemsize: int) -> None:
    """Ranges are summed within a copy. The owners of a range then reduce theirs in a ring, twice around."""
    copies = gpus * machines // ranks
    whole = 32 * 32 * ranks
    messages: Counter[tuple[int, int]] = Counter()
    for copy in range(copies):
        for (sender, receiver), num_bytes in messages_of_sum(gpus, ranks, whole, itemsize).items():
            messages[copy * ranks + sender, copy * ranks + receiver] += num_bytes
    for copy, owner in product(range(copies if copies > 1 else 0), range(ranks)):
        neighbour = (copy + 1) % copies * ranks + owner
        messages[copy * ranks + owner, neighbour] += 2 * (copies - 1) * whole // copies // ranks
    rate = Interconnect(gpus, machines, PEER, NETWORK).reduce_rate(ranks, copies, itemsize)
    seconds = slowest(messages, gpus)
    mixed = (
        copies > 1 and machines > 1 and ranks < gpus
    )  # neighbours of the second ring are in both places: counted as the slower
    direct = whole * (ranks - 1) // ranks + 2 * (copies - 1) * whole // copies // ranks
    expected = direct / rate
    assert expected >= seconds * (1 - 1e-9) if mixed else expected == pytest.approx(seconds)


def test_a_rank_has_its_share_of_a_machine() -> None:
    server = published()["h100"].server
    share, links = connect(published()["h100"], 8, 4)
    assert share.cores == server["cores"] // 8
    assert share.host_rate == server["host_bandwidth"] / 8
    assert share.host_memory == server["host_memory"]  # memory is divided where limits are
    assert share.disk_read == published()["h100"].disk_read / 8
    assert share.link_in == published()["h100"].link_in  # each GPU has a link of its own
    assert links == Interconnect(8, 4, server["peer"], server["network"])
    assert not links.through_host


def test_one_gpu_of_each_machine_has_all_of_it() -> None:
    share, links = connect(published()["gh200"], 1, 4)
    assert share.host_bandwidth == {"72": published()["gh200"].host_rate}
    assert links.peer == 0
    assert not links.through_host


def test_gpus_without_peer_access_go_through_host_memory() -> None:
    _, links = connect(published()["rtx-4090"], 8, 1)
    assert links.through_host
    assert links.gather_rate(8) == links.reduce_rate(8, 1) == float("inf")  # the links to the host limit them instead


@pytest.mark.parametrize(
    ("changes", "gpus", "machines", "message"),
    [
        ({"server": {}}, 2, 1, "describes a machine with one GPU"),
        ({"server": {"network": 1e9}}, 2, 1, "describes a machine with one GPU"),
        ({"server": {}}, 1, 2, "has no network"),
        ({"device": "cpu", "gpu": "", "device_memory": 0}, 2, 1, "choose a profile of a GPU"),
    ],
)
def test_missing_figures_are_named(changes: dict[str, object], gpus: int, machines: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(replace(published()["h100"], **changes), gpus, machines)
