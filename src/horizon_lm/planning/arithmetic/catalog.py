"""Hardware profiles of machines, measured or published. Each number of a published one has a source."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from horizon_lm.common.near_misses import closest_machines
from horizon_lm.errors import ConfigError

KINDS = ("measured on ", "data sheet: ", "published: ", "arithmetic: ", "assumed")
"""How a source begins: a run of this project on that very hardware; the maker's figure; somebody else's figure or measurement; one that
follows from others, with factors that are assumed or measured on other hardware; or an assumption.
"""
_TEXTS = ("name", "device", "gpu", "sources")


def numbers_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the numbers that are known, given the fields of a profile."""
    for name, value in profile.items():
        if name in _TEXTS or not value:
            continue
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def source_problems(profile: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the sources in the fields of a profile: numbers without one, sources of no number, and those that do not
    begin with one of `KINDS`.
    """
    sources: Mapping[str, str] = profile["sources"]
    numbers = list(numbers_of(profile))
    named = {name for number in numbers for name in (number, number.partition(".")[0])}
    missing = [f"{each} has no source" for each in numbers if not _has_source(each, sources)]
    unknown = [f"sources has {each}, which is no number here" for each in sources if each not in named]
    unclear = [
        f"the source of {name} does not begin with {', '.join(kind.strip(': ') for kind in KINDS)}"
        for name, source in sources.items()
        if not source.startswith(KINDS)
    ]
    return [*missing, *unknown, *unclear]


def _has_source(number: str, sources: Mapping[str, str]) -> bool:
    return number in sources or number.partition(".")[0] in sources


DTYPES = ("bfloat16", "float32")

_OPTIONAL = (
    "update_seconds",
    "unit_update_seconds",
    "disk_write",
    "disk_read",
    "watts",
    "capability",
    "float8",
    "server",
    "desktop",
    "sources",
)
_HOST = ("cores", "host_memory", "host_bandwidth")
_SERVER = (*_HOST, "peer", "network")
_MODULES = ("two_modules", "four_modules_bandwidth")
_KEYS = {"watts": ("device", "host"), "server": _SERVER, "desktop": ("display_memory", *_MODULES)}
_NEEDED = ("cores", "device_bandwidth", "link_in", "link_out", "link_both")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with one device.

    Rates are those that a training step is expected to reach, not peak rates; 0 means unknown.

    Attributes:
        name: display name.
        device: ``cuda``, or ``cpu`` if the host's cores are the device.
        gpu: the GPU's name as reported by the driver; empty for a CPU.
        device_memory: bytes of device memory; 0 for a CPU, which uses host memory.
        host_memory: typical host memory of such a machine, in bytes.
        cores: cores available to updates and computation.
        matmul: operations per second of large matrix products, by dtype.
        attention: operations per second of fused attention, by dtype; a causal mask halves the count.
        device_bandwidth: bytes per second read and written by elementwise operations on the device.
        op_seconds: fixed overhead of an operation whose launch is not hidden.
        link_in, link_out: bytes per second from host to device and back, one direction at a time. On a CPU: rates of
            converting copies, in bytes of the host's tensor.
        link_both: bytes per second of both directions together. On a CPU, whose copies never overlap: rate of
            consecutive copies.
        host_bandwidth: bytes per second of host memory read and written in place, by number of threads.
        update_seconds: seconds per parameter of an AdamW update on all cores, by precision; estimated from the bandwidth
            if missing.
        unit_update_seconds: seconds that the update of each unit takes beside those of its parameters, by precision.
        disk_write, disk_read: bytes per second of the disk.
        capability: the GPU's compute capability, such as 8.9.
        float8: operations per second of large matrix products in FP8, with results summed in float32; 0 if there are none.
        watts: power limits: ``device``, of the GPU with its memory, and ``host``, of the processors.
        server: figures of a machine with several such GPUs: ``cores``, ``host_memory`` and ``host_bandwidth`` of all of it;
            ``peer``, bytes per second that each GPU receives from the others while it sends as many, missing if they cannot reach
            each other; ``network``, the same for a machine and other machines.
        desktop: figures of a desktop: ``display_memory``, bytes of the device that its display takes; ``two_modules``, the most bytes
            of host memory that two modules have, with which `host_bandwidth` is reached, and ``four_modules_bandwidth`` with more.
        sources: origin of each number, by field or by FIELD.KEY; see `profile_sources`.
    """

    name: str
    device: str
    gpu: str
    device_memory: int
    host_memory: int
    cores: int
    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    device_bandwidth: float
    op_seconds: float
    link_in: float
    link_out: float
    link_both: float
    host_bandwidth: Mapping[str, float]
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    unit_update_seconds: Mapping[str, float] = field(default_factory=dict)
    disk_write: float = 0.0
    disk_read: float = 0.0
    watts: Mapping[str, float] = field(default_factory=dict)
    capability: float = 0.0
    float8: float = 0.0
    server: Mapping[str, float] = field(default_factory=dict)
    desktop: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_host_memory(self, num_bytes: int) -> "Hardware":
        """Return the machine with this much host memory. A desktop that needs four modules for it has slower memory than with two."""
        if num_bytes <= self.desktop.get("two_modules", math.inf):
            return self
        slower = self.desktop["four_modules_bandwidth"]
        bandwidth = dict.fromkeys(self.host_bandwidth, slower)
        of_server = {"host_bandwidth": slower} if "host_bandwidth" in self.server else {}
        return replace(
            self, host_bandwidth=bandwidth, link_both=min(self.link_both, slower), server={**self.server, **of_server}
        )

    @property
    def on_host(self) -> bool:
        """True if the device computes in host memory."""
        return self.device == "cpu"

    @property
    def host_rate(self) -> float:
        """Host memory bandwidth in bytes per second, with the best number of threads."""
        return max(self.host_bandwidth.values())

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Hardware:
    """Return the profile in a file; raise ConfigError if it is not valid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; horizon-lm doctor writes a profile") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a hardware profile ({error}); horizon-lm doctor writes one") from error
    return parse_profile(content, str(path))


def parse_profile(content: Any, place: str) -> Hardware:
    """Return the profile in a parsed JSON document; raise ConfigError if a field is missing, unknown or invalid.

    Fields that are missing beside ``base``, the name of a published profile, are taken from that profile.
    """
    hints = get_type_hints(Hardware)
    names = [each.name for each in fields(Hardware)]
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: not a JSON object; a profile has {', '.join(names)}")
    if "base" in content:
        content = _extend_base(content, place)
    if unknown := content.keys() - set(names):
        raise ConfigError(f"{place}: {sorted(unknown)[0]} is not a field; a profile has {', '.join(names)}")
    for name in names:
        if name not in content:
            if name not in _OPTIONAL:
                raise ConfigError(f"{place}: {name} is missing")
        elif problem := _problem_of_field(name, hints[name], content[name]):
            raise ConfigError(f"{place}: {name} is {content[name]!r}; {problem}")
    # Profiles of an older doctor lack `unit_update_seconds`: their `update_seconds` were timed on small blocks and contain them. Such
    # `update_seconds` are left out.
    unit_seconds = content.get("unit_update_seconds", {})
    seconds = {name: value for name, value in content.get("update_seconds", {}).items() if name in unit_seconds}
    # Whole numbers, all of which are required: JSON's 128e9 is a float.
    whole: dict[str, Any] = {name: int(content[name]) for name, hint in hints.items() if hint is int}
    return Hardware(**{**content, **whole, "update_seconds": seconds})


def _extend_base(content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the fields of a profile, with missing ones taken from the published profile that its field ``base`` names.

    If the profile describes a host of its own, the base's server gets that host, and the base's modules of a desktop are left out. So are
    the sources of replaced figures.
    """
    own = dict(content)
    base = own.pop("base")
    if not isinstance(base, str) or base not in published():
        raise ConfigError(f"{place}: base is {base!r}{_hint(str(base))}; choose one of {', '.join(published())}")
    inherited = asdict(published()[base])
    sources = {name: source for name, source in inherited.pop("sources").items() if name.partition(".")[0] not in own}
    if "server" not in own and own.keys() & set(_HOST):  # a server with several GPUs has the same host
        inherited["server"] = _server_with_own_host({**inherited, **own})
        sources.pop("server", None)
    if "desktop" not in own and own.keys() & set(_HOST):  # its figures are those of the modules that it has
        inherited["desktop"] = {key: value for key, value in inherited["desktop"].items() if key not in _MODULES}
        sources = {
            name: source for name, source in sources.items() if name not in [f"desktop.{key}" for key in _MODULES]
        }
    return {**inherited, "sources": sources, **own}


def _server_with_own_host(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field ``server`` of a profile, with the cores, memory and bandwidth of the profile's own host."""
    bandwidth = content["host_bandwidth"]
    host = {name: content[name] for name in _HOST if name != "host_bandwidth"}
    if isinstance(bandwidth, dict):  # `parse_profile` rejects any other value
        host["host_bandwidth"] = max(filter(_is_amount, bandwidth.values()), default=0)
    return {**content["server"], **host}


def _problem_of_field(name: str, hint: Any, value: Any) -> str:
    """Return the reason why a field's value is invalid; empty if it is valid."""
    if name == "device":
        return "" if value in ("cuda", "cpu") else "it must be cuda or cpu"
    if hint is str:
        return "" if isinstance(value, str) else "it must be a string"
    if hint in (int, float):
        if not _is_amount(value) or (hint is int and value != int(value)):
            return f"it must be a non-negative {'whole ' if hint is int else ''}number, or 0 if unknown"
        return "a step cannot be simulated without it" if name in _NEEDED and not value else ""
    if hint == Mapping[str, str]:
        fits = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        return "" if fits else "it must be an object of strings"
    return _problem_of_amounts(name, value)


def _problem_of_amounts(name: str, value: Any) -> str:
    """Return the reason why a field that maps names to numbers is invalid; empty if it is valid."""
    if not isinstance(value, dict) or not all(_is_amount(each) and each > 0 for each in value.values()):
        return "it must be an object of positive numbers"
    if name == "host_bandwidth":
        fits = bool(value) and all(key.isdecimal() and int(key) for key in value)
        return "" if fits else 'its keys must be numbers of threads, for example {"1": 15e9, "8": 60e9}'
    if name in _KEYS and (unknown := value.keys() - set(_KEYS[name])):
        return f"{sorted(unknown)[0]} is not one of {', '.join(_KEYS[name])}"
    if name == "server" and value.keys() & set(_HOST) and not value.keys() >= set(_HOST):
        return f"it needs {', '.join(_HOST)} together"
    if name == "desktop" and len(value.keys() & set(_MODULES)) == 1:
        return f"it needs {' and '.join(_MODULES)} together"
    missing = set(DTYPES) - value.keys() if name in ("matmul", "attention") else set()
    return f"it has no rate for {sorted(missing)[0]}" if missing else ""


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


@cache
def published() -> Mapping[str, Hardware]:
    """Return the published hardware profiles by their ``--device`` names.

    Raises:
        ConfigError: a number of one of them has no source.
    """
    folder = resources.files(__package__) / "profiles"
    files = {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}
    return {
        name: parse_published(json.loads(file.read_text(encoding="utf-8")), file.name)
        for name, file in sorted(files.items())
    }


def parse_published(content: Any, place: str) -> Hardware:
    """Return a published profile as `parse_profile` does; raise ConfigError, too, if one of its numbers has no source."""
    profile = parse_profile(content, place)
    if problems := source_problems(asdict(profile)):
        raise ConfigError(f"{place}: {problems[0]}")
    return profile


_MAC = re.compile(r"mps|metal|((i?mac|apple)(book|mini|studio|air|silicon)?|m\d)(m\d)?(pro|max|ultra)?")


def find_profile(name: str) -> Hardware:
    """Return the published profile of that name, or the profile in that file; raise ConfigError if neither exists.

    Spaces, dashes and the maker's name do not matter. A profile is also found by its GPU's name as the driver reports it, with or without
    its memory.
    """
    wanted = _comparable(name)
    for known, profile in published().items():
        if wanted in map(_comparable, (known, profile.gpu, profile.name.partition(",")[0])):
            return profile
    if name.endswith(".json"):
        return read_profile(Path(name).expanduser())
    if _MAC.fullmatch(wanted):
        raise ConfigError(
            f"device {name!r}: on a Mac, the CPU computes. Plan there with --device cpu, or describe the Mac in MACHINE.json, with "
            '"device": "cpu" (docs/planning.md)'
        )
    raise ConfigError(
        f"device {name!r} is not known{_hint(name)}; choose one of {', '.join(published())}, or name a file with a profile, "
        "MACHINE.json (docs/planning.md)"
    )


def _hint(name: str) -> str:
    close = closest_machines(name, published())
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _comparable(name: str) -> str:
    return re.sub(r"nvidia|amd|geforce|rtx|instinct|[^a-z0-9]", "", name.lower())


def match_profile(gpu: str) -> Hardware | None:
    """Return the published profile of a GPU by the name that its driver reports, or None.

    Only the full name matches: the names of laptop chips, cards with less power and MIG instances merely extend it.
    """
    return next((profile for profile in published().values() if profile.gpu.lower() == gpu.strip().lower()), None)


def own_profile_path() -> Path:
    """Return the path of this machine's profile, written by ``horizon-lm doctor``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "horizon-lm" / "profile.json"
