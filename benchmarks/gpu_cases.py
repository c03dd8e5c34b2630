"""The cases of gpu.py: systems, models and batches, in suites that are chosen by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_models import MODELS, toy, wider

K = 1024
LENGTH = 4 * K
NO_OPTIMIZER = "resident, recomputed, no optimizer"
PEERS = ("FSDP2 CPU offload", "ZeRO-3 offload")


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        system: a key of `SYSTEMS`.
        model: settings of the model's config.
        rows, length: shape of a step's batch.
        rows_at_once: rows of a micro-batch, over which gradients accumulate. Ours takes what the plan of such a run takes.
        warmup: steps before the timed ones.
        options: further arguments of `horizon_lm.from_config`.
        optimizer: further arguments of `horizon_lm.AdamW`.
        compares_tails: time our steps again, in turns with steps whose recomputes compute what nobody reads.
        device_bytes: a hard limit on all that torch allocates on the device, which the plan gets, too; None for none.
        fills_first: fill and lock the planned bytes of host memory before, and leave the case out if that fails.
        if_failed: run only if the case before failed.
    """

    system: str
    name: str
    model: dict[str, Any]
    rows: int
    length: int
    rows_at_once: int
    device: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    warmup: int = 2
    compares_tails: bool = False
    device_bytes: int | None = None
    fills_first: bool = False
    if_failed: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def is_ours(self) -> bool:
        return self.system.startswith("horizon")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


Cases = list[dict[str, Any]]


def _cases(systems: list[str], name: str, tokens: int = 64 * K, **changes: Any) -> Cases:
    """Return cases of the same step for several systems; ``changes`` replace fields of the case."""
    case = {"name": name, "model": MODELS.get(name), "rows": max(1, tokens // LENGTH), "length": min(tokens, LENGTH)}
    return [{"system": system, "rows_at_once": min(8, case["rows"])} | case | changes for system in systems]


def _3b() -> Cases:
    return _cases(["horizon", "horizon, SFT"], "qwen2.5-3b")


def _resident_3b() -> Cases:
    masters = _cases(["resident, nothing recomputed, fused AdamW on fp32 masters"], "qwen2.5-3b", rows_at_once=2)
    return masters + _cases(["resident, recomputed, pure bf16 AdamW", NO_OPTIMIZER], "qwen2.5-3b")


def _7b() -> Cases:
    return _cases(["horizon"], "qwen2.5-7b", compares_tails=True)


def _resident_7b() -> Cases:
    return _cases(["resident, recomputed, pure bf16 AdamW"], "qwen2.5-7b", rows_at_once=2)


def _peers() -> Cases:
    return _cases(list(PEERS), "qwen2.5-3b", warmup=1, steps=1)  # a step takes them half a minute


def _14b() -> Cases:
    common: dict[str, Any] = {"options": {"precision": "bf16"}, "fills_first": True, "steps": 2}
    small = _cases(["horizon"], "qwen2.5-14b", optimizer={"moments": "bfloat16"}, **common)
    return small + _cases(["horizon"], "qwen2.5-14b", optimizer={"moments": "8bit"}, if_failed=True, **common)


def _8b_24gb() -> Cases:
    return _cases(["horizon"], "llama-3.1-8b", 32 * K, device_bytes=24 * 10**9)


def _depth() -> Cases:
    cases = []
    for layers in (28, 60, 120, 180):  # without resident blocks, or a shallow model would be resident as a whole
        options = {"precision": "bf16", "resident_blocks": 0}
        cases += _cases(["horizon"], f"1.5b wide, {layers} blocks", model=wider(1, layers), options=options)
    return cases


def _width() -> Cases:
    cases = []
    for times, layers in ((1, 28), (2, 20), (3, 10), (4, 5)):  # depths at which every peer has room
        name = f"1.5b, {times} times as wide, {layers} blocks"
        cases += _cases(["horizon", *PEERS], name, 32 * K, model=wider(times, layers))
    return cases


def _tokens() -> Cases:
    return [case for tokens in (4, 8, 16, 32, 64, 128) for case in _cases(["horizon"], "qwen2.5-7b", tokens * K)]


def _long() -> Cases:
    return _cases(["horizon"], "llama-3.1-8b", 128 * K, rows=1, length=128 * K, options={"mlp_chunk_tokens": 16 * K})


def _moe() -> Cases:
    return _cases(["horizon", NO_OPTIMIZER], "qwen3-30b-a3b, 8 blocks")


SUITES: dict[str, Callable[[], Cases]] = {
    "3b": _3b,  # ours, and ours with the steps of a run
    "resident-3b": _resident_3b,  # what somebody with room for it trains with, and a bound on systems that recompute
    "7b": _7b,  # ours, with and without what a recompute leaves out
    "resident-7b": _resident_7b,
    "peers": _peers,  # 3B, by other offloaders
    "14b": _14b,  # a model that no GPU of 80 GB can train otherwise
    "8b-24gb": _8b_24gb,  # as on a smaller card
    "depth": _depth,
    "width": _width,
    "tokens": _tokens,
    "long": _long,  # one row of 128k tokens
    "moe": _moe,
}


def make_case(settings: dict[str, Any], device: str, steps: int) -> Case:
    """Return a case for a device; on a CPU, a toy of it."""
    if torch.device(device).type == "cpu":
        options = settings.get("options", {})
        options = options | {name: 16 for name in ("mlp_chunk_tokens",) if name in options}
        tiny = {"model": toy(settings["model"]), "rows": min(4, settings["rows"]), "length": 32, "options": options}
        settings = (
            settings | tiny | {"rows_at_once": min(settings["rows_at_once"], 2, tiny["rows"]), "steps": 1, "warmup": 1}
        )
    return Case(**{"steps": steps} | settings, device=device)


def label(case: Case) -> str:
    """Return the name of the system, with the options that are not its defaults."""
    changes = (
        case.options | case.optimizer | ({"limit": f"{case.device_bytes / 1e9:g} GB"} if case.device_bytes else {})
    )
    return ", ".join([case.system, *(f"{name}={value}" for name, value in changes.items())])
