"""Published hardware profiles, and errors about invalid profile files."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import (
    DTYPES,
    KINDS,
    Hardware,
    find_profile,
    match_profile,
    own_profile_path,
    parse_published,
    published,
    read_profile,
)
from horizon_lm.runs.admission.this_machine import other_machine

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "profile_h100_2026-11-26.json"
NAMES = (
    "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb", "b200", "gb10", "gh200", "h100", "h100-pcie", "h200", "l4", "l40s", "mi300x",
    "rtx-3060", "rtx-3090", "rtx-3090-server", "rtx-4060-laptop", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4080", "rtx-4080-laptop", "rtx-4090",
    "rtx-4090-laptop", "rtx-4090-server", "rtx-5070-ti", "rtx-5080", "rtx-5090", "rtx-5090-server", "rtx-a6000", "rtx-pro-6000", "t4",
)  # fmt: skip
NOT_A_FIGURE = ("name", "device", "gpu", "sources")
# Names as reported by the CUDA driver.
DRIVER_NAMES = {
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA GB10": "gb10",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 3060": "rtx-3060",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4060 Ti": "rtx-4060-ti-16gb",
    "NVIDIA GeForce RTX 4070": "rtx-4070",
    "NVIDIA GeForce RTX 4080": "rtx-4080",
    "NVIDIA GeForce RTX 5070 Ti": "rtx-5070-ti",
    "NVIDIA GeForce RTX 5080": "rtx-5080",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4060 Laptop GPU": "rtx-4060-laptop",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx-4090-laptop",
    "AMD Instinct MI300X": "mi300x",
    "Tesla T4": "t4",
}
OTHER_GPUS = (
    "", "Tesla T40", "NVIDIA H200 NVL", "NVIDIA GH200 120GB", "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 4070 SUPER", "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
    "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5090 D", "NVIDIA L40", "NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
)  # fmt: skip


def numbers(value: Any) -> list[float]:
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.fixture
def content() -> dict[str, Any]:
    return asdict(published()["h100"])


def test_published_names() -> None:
    assert tuple(sorted(published())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    profile = published()[name]
    figures = {each.name: getattr(profile, each.name) for each in fields(Hardware) if each.name not in NOT_A_FIGURE}
    for field, value in figures.items():
        keys = [f"{field}.{key}" for key in value] if isinstance(value, dict) else [field] if value else []
        assert all(key in profile.sources or field in profile.sources for key in keys)
    assert all(len(source) > 15 and source.startswith(KINDS) for source in profile.sources.values())
    known = [value for value in figures.values() if value]
    assert all(math.isfinite(number) and number > 0 for value in known for number in numbers(value))


SOURCES: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], str]] = {
    "none of a number": (lambda has: without_key(has, "link_in"), "link_in has no source"),
    "none of one of two": (lambda has: without_key(has, "attention.float32"), "attention.float32 has no source"),
    "of no number": (lambda has: has | {"speed": "assumed"}, "sources has speed, which is no number here"),
    "of no number of a field": (
        lambda has: has | {"watts.fan": "assumed"},
        "sources has watts.fan, which is no number here",
    ),
    "without its kind": (
        lambda has: has | {"cores": "56"},
        "the source of cores does not begin with measured on, data sheet",
    ),
}


def without_key(values: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize("kind", SOURCES)
def test_published_numbers_without_a_source_are_rejected(content: dict[str, Any], kind: str) -> None:
    change, message = SOURCES[kind]
    parse_published(content, "h100.json")
    with pytest.raises(ConfigError, match=f"^h100.json: {message}"):
        parse_published(content | {"sources": change(content["sources"])}, "h100.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_measurement_is_that_of_the_card_itself(name: str) -> None:
    """What was measured on an H100 is said to be derived everywhere else."""
    measured = [text for text in published()[name].sources.values() if text.startswith("measured on ")]
    assert bool(measured) == (name == "h100")
    assert all(text.startswith("measured on an H100 SXM") for text in measured)


def test_measured_numbers_are_those_of_the_result() -> None:
    """Those of the profile that the first run on an H100 left, rounded."""
    result, profile = read_profile(RESULT), published()["h100"]
    measured = [name for name, text in profile.sources.items() if text.startswith("measured on ")]
    assert {"attention.bfloat16", "link_both", "op_seconds", "matmul.bfloat16"} <= set(measured)
    for name in measured:
        field, _, key = name.partition(".")
        own, theirs = getattr(profile, field), getattr(result, field)
        assert (own[key] if key else own) == pytest.approx(theirs[key] if key else theirs, rel=2e-3)
    assert "virtual machine" in profile.sources["op_seconds"]


@pytest.mark.parametrize("name", NAMES)
def test_figures_agree_with_each_other(name: str) -> None:
    """Figures are physically possible and consistent."""
    profile = published()[name]
    assert profile.device == "cuda"
    if name == "t4":  # no units for bf16, which is emulated
        assert profile.matmul["bfloat16"] < profile.matmul["float32"]
    else:
        assert profile.attention["bfloat16"] > profile.matmul["float32"]
    assert profile.matmul["bfloat16"] > profile.attention["bfloat16"]
    assert profile.matmul["float32"] > profile.attention["float32"]
    assert min(profile.link_in, profile.link_out) <= profile.link_both <= profile.link_in + profile.link_out
    assert profile.link_both <= profile.host_rate < profile.device_bandwidth
    assert str(profile.cores) in profile.host_bandwidth
    assert profile.device_memory < profile.host_memory
    assert profile.update_seconds == {}


@pytest.mark.parametrize("name", NAMES)
def test_profile_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    profile = replace(published()[name], update_seconds={"bf16": 5e-10}, unit_update_seconds={"bf16": 1e-4})
    profile.save(path)
    assert read_profile(path) == profile == find_profile(str(path))


def test_match_by_driver_name() -> None:
    for gpu, name in DRIVER_NAMES.items():
        assert match_profile(gpu) is published()[name]
        assert match_profile(f" {gpu.upper()} ") is published()[name]
    assert [match_profile(gpu) for gpu in OTHER_GPUS] == [None] * len(OTHER_GPUS)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H200", "h200"), ("rtx4090", "rtx-4090"), ("RTX 3090", "rtx-3090"), ("rtx_5090_server", "rtx-5090-server"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("A100-PCIe-80GB", "a100-pcie-80gb"),
        ("RTX 3060 12 GB", "rtx-3060"), ("3060 12GB", "rtx-3060"), ("RTX 4060 Ti 16 GB", "rtx-4060-ti-16gb"), ("4070", "rtx-4070"),
        ("GeForce RTX 4080", "rtx-4080"), ("5070 Ti", "rtx-5070-ti"), ("rtx5080", "rtx-5080"), ("4090", "rtx-4090"), ("RTX 4090 24GB", "rtx-4090"),
    ],
)  # fmt: skip
def test_find_by_name(typed: str, name: str) -> None:
    assert find_profile(typed) is published()[name]


def test_unknown_names() -> None:
    with pytest.raises(
        ConfigError, match="'b300' is not known; choose one of a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb, b200, gb10"
    ):
        find_profile("b300")
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file"):
        find_profile("nowhere.json")


@pytest.mark.parametrize("typed", ["mac", "mps", "MacBook Pro", "M3 Max", "Apple M4", "mac studio"])
def test_a_mac_computes_on_its_cpu(typed: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^device '{typed}': on a Mac, the CPU computes\. Plan there with --device cpu"
    ):
        find_profile(typed)


@pytest.mark.parametrize("typed", ["mi30", "m", "max", "macro 9000x"])
def test_other_unknown_names_are_no_macs(typed: str) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        find_profile(typed)


def test_profile_extends_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"base": "h200", "name": "mine", "host_memory": 1e12, "host_bandwidth": {"64": 400e9}}')
    mine, base = find_profile(str(path)), published()["h200"]
    stated = ("host_memory", "host_bandwidth", "server")
    assert mine == replace(
        base, name="mine", host_memory=10**12, host_bandwidth={"64": 400e9},
        server={**base.server, "cores": base.cores, "host_memory": 1e12, "host_bandwidth": 400e9},
        sources={name: text for name, text in base.sources.items() if name not in stated},
    )  # fmt: skip
    assert type(mine.host_memory) is int


@pytest.mark.parametrize(
    ("base", "stated", "expected"),
    [
        ("rtx-3090", {"cores": 12, "host_bandwidth": {"12": 35e9}}, {"cores": 12, "host_bandwidth": 35e9}),
        ("h100", {"host_memory": 5e11}, {"cores": 56, "host_memory": 5e11, "peer": 340e9}),
        ("gb10", {"cores": 10}, {"cores": 10, "host_bandwidth": 190e9, "network": 21e9}),
        ("h100", {"name": "mine"}, {"cores": 112, "host_bandwidth": 400e9}),
        ("h100", {"cores": 8, "server": {"network": 1e9}}, {"network": 1e9}),
    ],
)
def test_stated_host_is_that_of_several_gpus(
    tmp_path: Path, base: str, stated: dict[str, Any], expected: dict[str, float]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": base, **stated}))
    mine = find_profile(str(path))
    assert {name: mine.server[name] for name in expected} == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("rtx-") and "laptop" not in name])
def test_several_cards_have_the_host_of_their_profile(name: str) -> None:
    profile = published()[name]
    assert (profile.server["cores"], profile.server["host_memory"]) == (profile.cores, profile.host_memory)
    assert profile.server["host_bandwidth"] == profile.host_rate


def test_own_profile_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    assert own_profile_path() == tmp_path / "elsewhere/horizon-lm/profile.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_profile_path() == tmp_path / ".config/horizon-lm/profile.json"


# Desktops: their display, and their memory modules

DESKTOPS = [name for name in NAMES if published()[name].desktop]


def test_desktops_reserve_what_their_display_takes() -> None:
    assert {"rtx-3060", "rtx-4090", "rtx-5090"} <= set(DESKTOPS)
    assert not [name for name in DESKTOPS if "server" in name or "laptop" in name]
    for name in DESKTOPS:
        assert "desktop" in published()[name].name
        assert 0.5e9 <= other_machine(published()[name], None).display_bytes <= 1e9
    assert other_machine(published()["rtx-4090-server"], None).display_bytes == 0


@pytest.mark.parametrize(
    ("device", "host_memory", "bandwidth", "note", "remark"),
    [
        ("rtx-4090", None, 70e9, False, False),
        ("rtx-4090", 2**37, 70e9, False, True),
        ("rtx-4090", 2**37 + 1, 50e9, True, False),
        ("rtx-3090", 2**38, 40e9, False, False),  # DDR4, of which four modules are assumed to be as fast
        ("rtx-4090-server", 2**41, 300e9, False, False),
    ],
)
def test_four_modules_are_slower_than_two(
    device: str, host_memory: int | None, bandwidth: float, note: bool, remark: bool
) -> None:
    profile = published()[device]
    for gpus in (1, 2):
        made = other_machine(profile, host_memory, gpus)
        assert made.hardware is not None
        assert made.hardware.host_rate * gpus == pytest.approx(bandwidth)
        assert made.hardware.link_both <= bandwidth
        assert ["50 GB/s instead of 70" in each for each in made.notes] == [True] * note
        assert ["with four, which run slower" in each for each in made.remarks] == [True] * remark


@pytest.mark.parametrize("stated", [{"host_memory": 256e9}, {"host_bandwidth": {"24": 90e9}}], ids=str)
def test_a_stated_host_has_its_own_modules(tmp_path: Path, stated: dict[str, Any]) -> None:
    """Whoever states the memory of a machine, or its rate, knows its modules. The display stays."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "rtx-4090", **stated}))
    mine = find_profile(str(path))
    assert mine.desktop.keys() == {"display_memory"}
    assert mine.with_host_memory(2**40) == mine


# Invalid profiles: each raises a ConfigError that names the file and the field


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


def with_(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | changes


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown base": (with_(base="h300"), "base is 'h300'; choose one of a100-pcie-80gb"),
    "a base that is no name": (with_(base=["h200"]), "base is ['h200']; choose one of"),
    "a wrong figure beside a base": (with_(base="h200", cores=1.5), "cores is 1.5"),
    "a list": (lambda content: [content], "not a JSON object"),
    "another field": (with_(matmuls={}), "matmuls is not a field"),
    "a field is missing": (without("link_in"), "link_in is missing"),
    "no rates": (without("matmul"), "matmul is missing"),
    "text for a number": (with_(link_out="fast"), "link_out is 'fast'; it must be a non-negative number"),
    "null for a number": (with_(cores=None), "cores is None; it must be a non-negative whole number, or 0"),
    "true for a number": (with_(op_seconds=True), "op_seconds is True"),
    "a negative number": (with_(device_bandwidth=-1), "device_bandwidth is -1"),
    "infinity": (with_(link_both=math.inf), "link_both is inf"),
    "not a number": (with_(disk_read=math.nan), "disk_read is nan"),
    "half a core": (with_(cores=1.5), "cores is 1.5; it must be a non-negative whole number, or 0 if unknown"),
    "a needed rate is 0": (with_(link_in=0), "link_in is 0; a step cannot be simulated without it"),
    "a number for text": (with_(name=3), "name is 3; it must be a string"),
    "null for text": (with_(gpu=None), "gpu is None; it must be a string"),
    "another device": (with_(device="tpu"), "device is 'tpu'; it must be cuda or cpu"),
    "a number for rates": (with_(matmul=1e12), "matmul is 1000000000000.0; it must be an object of positive numbers"),
    "null for rates": (with_(update_seconds=None), "update_seconds is None; it must be an object of positive numbers"),
    "a rate of 0": (with_(attention={"bfloat16": 1e12, "float32": 0}), "attention is"),
    "a dtype is missing": (with_(matmul={"bfloat16": 1e12}), "it has no rate for float32"),
    "no bandwidth": (with_(host_bandwidth={}), "host_bandwidth is {}; its keys must be numbers of threads"),
    "threads that are none": (with_(host_bandwidth={"many": 1e9}), "its keys must be numbers of threads"),
    "no threads": (with_(host_bandwidth={"0": 1e9}), "its keys must be numbers of threads"),
    "another key of a desktop": (with_(desktop={"modules": 2}), "modules is not one of display_memory, two_modules"),
    "half of what modules need": (with_(desktop={"two_modules": 1e11}), "it needs two_modules and four_modules_bandwidth together"),
    "another key of watts": (with_(watts={"fan": 2}), "fan is not one of device, host"),
    "sources that are none": (with_(sources={"matmul": 3}), "sources is {'matmul': 3}; it must be an object of strings"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_profiles(tmp_path: Path, content: dict[str, Any], kind: str) -> None:
    change, message = BAD[kind]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(change(content)))
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"profile", b"\xff\xfe"])
def test_not_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^{path}: not a hardware profile .*horizon-lm doctor writes one"):
        read_profile(path)


def test_folder_is_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}: Is a directory"):
        read_profile(tmp_path)


def test_optional_fields(tmp_path: Path, content: dict[str, Any]) -> None:
    optional = {
        name: content.pop(name)
        for name in ("update_seconds", "unit_update_seconds", "disk_write", "disk_read", "sources")
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    profile = read_profile(path)
    assert (profile.update_seconds, profile.disk_write, profile.disk_read, profile.sources) == ({}, 0, 0, {})
    assert replace(profile, **optional) == published()["h100"]
    assert profile.matmul.keys() == set(DTYPES)
