"""Two machines, each in a control group that limits its memory, train a model that is too large for either of them."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.runs import lines_of
from tests.e2e import resuming, tiny

GIB = 2**30
ROOTS = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
PARAMETERS = 200 * 10**6
STORE = 14 * PARAMETERS
LIMIT = (
    int(0.5 * STORE) + 3 * GIB // 2
)  # half of the store; libraries, buffers and the page cache that the kernel must keep

pytestmark = pytest.mark.slow


class Group:
    """A control group with a limit on memory."""

    def __init__(self, name: str, limit: int) -> None:
        for root, file in ROOTS.items():
            self.path = root / f"horizon-lm-test-{os.getpid()}-{name}"
            with suppress(OSError):
                self.path.mkdir()
                (self.path / file).write_text(str(limit))
                return
        pytest.skip("control groups cannot be made here")

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        def enter() -> None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.Popen(
            command,
            preexec_fn=enter,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
        )

    def remove(self) -> None:
        with suppress(OSError):
            self.path.rmdir()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = [Group(name, LIMIT) for name in ("a", "b")]
    yield made
    for group in made:
        group.remove()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    folder = Path(tiny.save_model(tmp_path / "tokenizer"))
    config = AutoConfig.from_pretrained(
        folder, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, head_dim=64
    )
    config.num_attention_heads, config.num_key_value_heads = 16, 16
    model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() > PARAMETERS
    model.save_pretrained(tmp_path / "model")
    for file in folder.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, tmp_path / "model")
    made = resuming.settings(tmp_path, tmp_path / "model")
    made = {name: value for name, value in made.items() if not name.startswith(("sample_", "test_", "eval_"))}
    made |= {
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 1,
        "warmup_steps": 0,
    }
    return made | {"output_dir": str(tmp_path / "run"), "precision": "fp32_master"}


def test_two_machines_train_what_none_of_them_can(
    settings: dict[str, Any], groups: list[Group], tmp_path: Path
) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path / "one")}))
    train = ["-m", "horizon_lm", "train"]
    alone = groups[0].start([sys.executable, *train, str(tmp_path / "one.yaml")])
    _, errors = alone.communicate(timeout=300)
    assert alone.returncode == 3
    assert "host: " in errors
    assert "cgroup" in errors

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | {"dp_shard_size": 2}))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
    ]
    agents = [
        group.start(
            [*torchrun, f"--rdzv-endpoint=localhost:{port}", *train, str(tmp_path / "run.yaml")], OMP_NUM_THREADS="1"
        )
        for group in groups
    ]
    try:
        for agent in agents:
            _, errors = agent.communicate(timeout=500)
            assert agent.returncode == 0, errors[-3000:]
    finally:
        for agent in agents:
            agent.kill()
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 2 * PARAMETERS
