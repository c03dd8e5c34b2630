"""How a process of torchrun starts: its device, and what torch may do when NCCL fails."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horizon_lm.errors import ConfigError
from horizon_lm.runs.training import ranks
from horizon_lm.runs.training.setup import choose_device

VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


@pytest.mark.parametrize(
    ("name", "chosen"), [("auto", "cuda:2"), ("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_each_process_has_its_own_device(monkeypatch: pytest.MonkeyPatch, name: str, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device(name) == chosen
    monkeypatch.setenv("LOCAL_RANK", "3")
    if name in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="'cuda:3', but torch finds only 3 CUDA devices"):
            choose_device(name)


@pytest.mark.parametrize("given", [None, "1"])
def test_torch_does_not_end_a_process_before_the_monitor_names_the_rank(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Its watchdog would abort at once when a rank dies, and after 8 minutes when one is slow. A user's own choice is kept."""
    seen: dict[str, str | None] = {}

    def init(backend: str) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        seen.update({name: os.environ.get(name) for name in VARIABLES})
        raise ConfigError("seen")

    for name in VARIABLES:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "wait_for_others", lambda: None)
    monkeypatch.setattr(ranks, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config: Any = SimpleNamespace(device="cuda:0")
    with pytest.raises(ConfigError, match="seen"):
        ranks.Ranks.start(config)
    assert seen == dict.fromkeys(VARIABLES, given or "0")
