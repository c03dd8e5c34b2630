"""Known machines and models: hardware profiles (measured or published), and the shapes of published models."""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from horizon_lm.errors import ConfigError

DTYPES = ("bfloat16", "float32")

_OPTIONAL = ("update_seconds", "disk_write", "disk_read", "sources")
_NEEDED = ("cores", "device_bandwidth", "link_in", "link_out", "link_both")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with one device.

    All rates are those that a training step is expected to reach, not peaks; 0 stands for what is not known.

    Attributes:
        name: for people.
        device: ``cuda``, or ``cpu`` for a machine whose cores are the device.
        gpu: the name that the driver gives the device; empty for a CPU.
        device_memory: bytes of the device; 0 for a CPU, whose memory is the host's.
        host_memory: bytes of host memory that such a machine usually has.
        cores: that updates and computation may use.
        matmul: operations per second of large matrix products, by dtype.
        attention: the same of fused attention, where a causal mask halves the work, by dtype.
        device_bandwidth: bytes per second that elementwise operations read and write on the device.
        op_seconds: what an operation takes beyond its work, when nothing hides its launch.
        link_in, link_out: bytes per second from host to device, and back, alone. On a CPU: of copies that convert, in bytes
            of what the host keeps.
        link_both: bytes per second of both directions together. On a CPU, where they never run at once: one after the other.
        host_bandwidth: bytes per second of host memory that an in-place operation reads and writes, by number of threads.
        update_seconds: seconds per parameter of an AdamW update by all cores, by precision; from bandwidth where it is
            not known.
        disk_write, disk_read: bytes per second.
        sources: by field, where its figure comes from.
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
    disk_write: float = 0.0
    disk_read: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """The device's memory is the host's."""
        return self.device == "cpu"

    @property
    def host_rate(self) -> float:
        """Bytes per second of host memory, with the number of threads that gets most of it."""
        return max(self.host_bandwidth.values())

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Hardware:
    """The profile in a file; ConfigError with what is wrong in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; horizon-lm doctor writes a profile") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a hardware profile ({error}); horizon-lm doctor writes one") from error
    return parse_profile(content, str(path))


def parse_profile(content: Any, place: str) -> Hardware:
    """A profile from what its JSON says; ConfigError with what is wrong in it."""
    hints = get_type_hints(Hardware)
    names = [each.name for each in fields(Hardware)]
    if not isinstance(content, dict) or (unknown := content.keys() - set(names)):
        what = f"{sorted(unknown)[0]} is not a field" if isinstance(content, dict) else "not a JSON object"
        raise ConfigError(f"{place}: {what}; a profile has {', '.join(names)}")
    for name in names:
        if name not in content:
            if name not in _OPTIONAL:
                raise ConfigError(f"{place}: {name} is missing")
        elif problem := _problem(name, hints[name], content[name]):
            raise ConfigError(f"{place}: {name} is {content[name]!r}; {problem}")
    return Hardware(**content)


def _problem(name: str, hint: Any, value: Any) -> str:
    """What a field must be and is not; empty if nothing is wrong."""
    if hint is str:
        fits = isinstance(value, str) and (name != "device" or value in ("cuda", "cpu"))
        return "" if fits else "it must be cuda or cpu" if name == "device" else "it must be text"
    if hint in (int, float):
        if not _is_amount(value) or (hint is int and value != int(value)):
            return "it must be a number, 0 where it is not known"
        return "no step can be priced without it" if name in _NEEDED and not value else ""
    if hint == Mapping[str, str]:
        fits = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        return "" if fits else "it must have texts"
    if not isinstance(value, dict) or not all(_is_amount(each) and each > 0 for each in value.values()):
        return "it must have positive numbers"
    if name == "host_bandwidth":
        fits = bool(value) and all(key.isdecimal() and int(key) for key in value)
        return "" if fits else 'it must have numbers of threads, such as {"1": 15e9, "8": 60e9}'
    missing = set(DTYPES) - value.keys() if name in ("matmul", "attention") else set()
    return f"it has no rate for {sorted(missing)[0]}" if missing else ""


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


@cache
def published() -> Mapping[str, Hardware]:
    """Profiles that come with Horizon-LM, by the name under which ``--device`` knows them."""
    folder = resources.files(__package__) / "profiles"
    return {
        file.name.removesuffix(".json"): parse_profile(json.loads(file.read_text(encoding="utf-8")), file.name)
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".json")
    }


def find_profile(name: str) -> Hardware:
    """The published profile of that name, or the one in a file; ConfigError with those there are."""
    if name.lower() in published():
        return published()[name.lower()]
    if name.endswith(".json"):
        return read_profile(Path(name).expanduser())
    raise ConfigError(
        f"device {name!r} is not known; choose one of {', '.join(published())}, or a profile that horizon-lm doctor wrote"
    )


def match_profile(gpu: str) -> Hardware | None:
    """The published profile for a device that the driver calls so.

    The whole name counts: a laptop's chip, a card with less power, or a part of a GPU (MIG) only adds something to it.
    """
    return next((profile for profile in published().values() if profile.gpu.lower() == gpu.strip().lower()), None)


def own_profile_path() -> Path:
    """Where ``horizon-lm doctor`` keeps the profile of this machine."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "horizon-lm" / "profile.json"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: on the hub. One that ends with "(text)" is the language model of one that also sees.
        aliases: releases with the same shapes, such as those tuned on instructions.
        parameters: of the causal language model that transformers loads, a tied table counted once. A module for
            multi-token prediction is left out, so are router biases that no gradient trains.
        config: from its config.json, "model_type" included. A copy: transformers writes into what it is given.
    """

    name: str
    aliases: tuple[str, ...]
    parameters: int
    config: Mapping[str, Any]


@cache
def _read() -> tuple[KnownModel, ...]:
    files = [file for file in (resources.files(__package__) / "models").iterdir() if file.name.endswith(".json")]
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = [
        KnownModel(entry["name"], tuple(entry["aliases"]), entry["parameters"], entry["config"]) for entry in entries
    ]
    return tuple(sorted(models, key=lambda model: (model.parameters, model.name)))


def known_models() -> tuple[KnownModel, ...]:
    """All of them, the smallest first."""
    return deepcopy(_read())


def find_known(name: str) -> KnownModel | None:
    """The model of this name or alias, whatever the case. The organization may be left out where that is unambiguous."""
    wanted = name.casefold()
    full = {known.casefold(): model for model in _read() for known in (model.name, *model.aliases)}
    if wanted in full:
        return deepcopy(full[wanted])
    without_org = {model.name: model for known, model in full.items() if known.rpartition("/")[2] == wanted}
    return deepcopy(next(iter(without_org.values()))) if len(without_org) == 1 else None
