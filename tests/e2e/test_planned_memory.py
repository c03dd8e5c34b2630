"""The planned host memory compared with the measured peak of a training process, from start to export."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e import tiny

MIB = 2**20
# Millions of parameters: hidden, intermediate, blocks, vocabulary.
SIZES = {"128M": (768, 2048, 16, 16384), "268M": (1024, 2816, 20, 16384), "500M": (1280, 3456, 23, 32768)}
PRECISIONS = ("fp32_master", "bf16", "float32")
CASES = [
    pytest.param(size, precision, marks=[] if (size, precision) == ("128M", "fp32_master") else pytest.mark.slow)
    for size in SIZES
    for precision in PRECISIONS
]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def make_model(folder: Path, size: str) -> Path:
    hidden, intermediate, blocks, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=vocabulary, max_position_embeddings=512, tie_word_embeddings=True,
        dtype=torch.bfloat16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.02)
    model.save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process without page cache."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss, file = (re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "RssFile"))
    return (int(rss[1]) - int(file[1])) * 1024 if rss and file else 0


@pytest.mark.parametrize(("size", "precision"), CASES)
@pytest.mark.timeout(600)
def test_planned_host_memory_equals_the_measured_peak(
    tmp_path: Path, size: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # compiling takes 30 MiB more than reading what is compiled
    model = make_model(tmp_path / "model", size)
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(12))
    program = [sys.executable, "-m", "horizon_lm.cli"]
    settings = [
        "--model_name_or_path", model, "--datasets", rows, "--output_dir", tmp_path / "run", "--device", "cpu",
        "--precision", precision, "--max_steps", "2", "--per_device_train_batch_size", "1",
    ]  # fmt: skip
    command = [*program, "train", *settings]
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        child = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=stderr)
        peak = 0
        while child.poll() is None:
            try:
                peak = max(peak, anonymous_bytes(child.pid))
            except OSError:  # the process has just ended
                break
            time.sleep(0.005)
        assert child.wait() == 0, errors.read_text()

    content = json.loads((tmp_path / "run/plan.json").read_text())
    planned = content["host"]["bytes"]
    print(f"{size} {precision}: planned {planned / MIB:.0f} MiB, measured {peak / MIB:.0f} MiB, {peak / planned:.3f}")
    assert peak == pytest.approx(planned, rel=0.03)
    planned_again = subprocess.run(
        [*map(str, program), "plan", *map(str, settings), "--json"], capture_output=True, check=True
    )
    process = [
        item["bytes"]
        for each in (content, json.loads(planned_again.stdout))
        for item in each["host"]["items"]
        if item["name"] == "process"
    ]
    assert process[1] == pytest.approx(process[0], abs=0.03 * planned)  # planned after and before rows are read
