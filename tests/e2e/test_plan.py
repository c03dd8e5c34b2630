"""Planning before a run: the output of ``plan``, and runs that ``train`` rejects."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.cli import app, planned_run
from horizon_lm.common import resources
from horizon_lm.common.quantities import format_bytes
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.model.known_models import known_models
from horizon_lm.planning.arithmetic.catalog import own_profile_path
from horizon_lm.runs.admission.inputs import Source
from horizon_lm.runs.run_files import load_run, read_plan
from horizon_lm.tools.report.summary import summarise
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support import tiny_models
from tests.support.handmade_outlines import machine
from tests.support.thinned_cases import thinned

GIB = 2**30


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    rows = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.alpaca_rows(12))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model_name_or_path: {model}\ndatasets: {rows}\noutput_dir: {tmp_path / 'run'}\ndevice: cpu\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\nmax_length: 128\n"
    )
    return path


def test_updates_of_small_adapters_are_overlapped_with_any_number_of_tokens() -> None:
    """Their time is below that of one token's computation, which is no zero tokens in a step."""
    planned = run("plan", "--model", "Qwen2.5-0.5B", "--device", "h200", "--use_peft", "--details")
    assert "optimizer fully overlapped with any number of tokens\n" in planned.stdout


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search only small models and a mixture of experts, because a model's outline takes seconds."""
    small = [each for each in known_models() if each.parameters < 2e9 or each.name == "openai/gpt-oss-20b"]
    monkeypatch.setattr("horizon_lm.cli.largest_models.known_models", lambda: small)


def plan(*arguments: Any) -> dict[str, Any]:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# Output of a plan


def test_plan_lists_all_bytes_and_choices(run_file: Path) -> None:
    content = plan(run_file)
    assert content["fits"]
    for place in ("host", "disk"):
        items = content[place]["items"]
        assert content[place]["bytes"] == sum(item["bytes"] for item in items)
        assert content[place]["available"] == min(limit["bytes"] for limit in content[place]["limits"])
    names = [item["name"] for item in content["host"]["items"]]
    assert {"weights", "low halves", "gradients", "moments", "process"} <= set(names)
    assert content["device"]["items"] == []  # device memory is host memory
    assert content["run"]["reasons"][0] == "batch: 6 examples/step (2 × accumulation 3), 3 micro-batches of 2"
    assert content["run"]["settings"]["activation_checkpoints"] == content["model"]["num_blocks"]
    assert content["run"]["num_steps"] == 3 * 2  # epochs of 12 rows in steps of 6


def test_plan_counts_checkpoints(run_file: Path) -> None:
    """A run of 6 steps that saves every second step writes two checkpoints, because the last one is the model itself."""
    saving = ["--save_steps", "2"]
    each_step = ["--save_steps", "1"]
    cases: list[tuple[list[str], int]] = [
        (saving, 2),  # two are kept
        ([*each_step, "--save_total_limit", "1"], 2),  # one is kept, one is being written
        (each_step, 3),
        ([*each_step, "--save_total_limit", "null"], 5),
        (["--save_strategy", "epoch"], 2),
    ]
    for settings, count in cases:
        content = plan(run_file, *settings)
        items = {item["name"]: item["bytes"] for item in content["disk"]["items"]}
        host = {item["name"]: item["bytes"] for item in content["host"]["items"]}
        slabs = host["weights"] + host["low halves"] + host["moments"]
        assert count * slabs < items["checkpoints"] < count * (slabs + 200_000)  # and the files beside them
    items = {item["name"]: item["bytes"] for item in plan(run_file, *saving, "--save_only_model")["disk"]["items"]}
    assert items["checkpoints"] == 2 * items["exported model"]


def test_run_uses_planned_settings(run_file: Path, tmp_path: Path) -> None:
    result = run("train", run_file, "--max_steps", 1)
    assert result.exit_code == 0, result.stderr
    assert "batch: 6 examples/step (2 × accumulation 3), 3 micro-batches of 2" in result.stdout
    saved = json.loads((tmp_path / "run/plan.json").read_text())
    config = (tmp_path / "run/config.yaml").read_text()
    assert "device_micro_batch_size: 2\n" in config
    assert "activation_checkpoints: 2\n" in config
    assert saved["run"]["length"] < 128  # the longest actual example
    assert saved["run"]["settings"]["device_micro_batch_size"] == 2


def test_engine_expects_largest_batch(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are allocated once, with the planned size."""
    expected: list[Any] = []
    monkeypatch.setattr(Engine, "expect_batch", lambda engine, batch: expected.append(batch))
    assert run("train", run_file, "--max_steps", 1).exit_code == 0
    planned = json.loads((tmp_path / "run/plan.json").read_text())["run"]
    (batch,) = expected
    assert batch.tokens == planned["tokens"] == planned["rows"] * planned["length"]
    assert batch.distinct_tokens > 1


def test_a_plan_answers_in_five_lines(run_file: Path) -> None:
    wanted = ("plan", "--model", "Qwen2.5-7B", "--device", "rtx-4090", "--host-memory")
    for amount, lines in (
        (
            "128GiB",
            ("fits: Qwen2.5-7B, on RTX 4090 24 GB, desktop with DDR5", "host memory    101.67 GiB of 128.00 GiB"),
        ),
        (
            "64GiB",
            ("does not fit: Qwen2.5-7B, on", "host memory    101.67 GiB of 64.00 GiB (host_memory), 37.67 GiB short"),
        ),
    ):
        shown = run(*wanted, amount).stdout.splitlines()
        others = ("device memory  ", "disk           ", "time           ", "--details lists every byte")
        assert len(shown) == 6
        assert all(line.startswith(beginning) for line, beginning in zip(shown, (*lines, *others), strict=True))
        time = re.fullmatch(r"time +([\d,]+) tokens/s, [\d.]+ s/step; a million tokens: (\d+) min (\d\d) s", shown[4])
        assert time is not None
        rate = int(time[1].replace(",", ""))
        assert 60 * int(time[2]) + int(time[3]) == pytest.approx(1e6 / rate, abs=1)
    here = run("plan", run_file).stdout.splitlines()
    assert here[2] == "device memory  part of host memory"
    assert here[4] == "time           unknown, as this machine was not measured; run horizon-lm doctor"
    steps = run("plan", run_file, "--device", "h200").stdout.splitlines()[4]
    assert re.search(r"; 6 steps: \d+ s$", steps)
    priced = run(*wanted, "128GiB", "--price-per-hour", "2").stdout
    (price,) = re.findall(r"a million tokens: ([\d.]+) at 2 per hour", priced)
    assert float(price) == pytest.approx(1e6 / rate / 3600 * 2, rel=2e-3)


@pytest.mark.parametrize(
    ("columns", "is_terminal", "details"),
    [(60, True, ["--details"]), (80, True, []), (200, True, ["--details"]), (80, False, [])],
)
def test_no_line_is_wider_than_a_terminal(
    columns: int, is_terminal: bool, details: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither of a plan that does not fit, nor of its error with the remedies. A file gets each line as a whole."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    with pytest.raises(SystemExit):
        app(["plan", "--model", "Qwen2.5-7B", "--device", "rtx-4090", "--host-memory", "64GiB", *details])
    shown = capsys.readouterr()
    assert "It would fit with any of" in shown.err
    widest = max(map(len, (shown.out + shown.err).splitlines()))
    assert widest <= min(80, columns) if is_terminal else widest > 80
    if columns == 200:
        lines = shown.out.splitlines()
        (at,) = (n for n, line in enumerate(lines) if line.startswith("  activations and"))
        assert lines[at + 1].startswith(" " * lines[at].index("peak"))  # below its column


def test_details_of_a_plan(run_file: Path) -> None:
    result = run("plan", run_file, "--device", "h200", "--host-memory", "512GiB", "--details")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for heading in ("host memory", "device memory", "disk", "settings"):
        assert heading in lines
    assert any(line.startswith("time, simulated with the rates of H200") for line in lines)
    assert "of 512.00 GiB (host_memory): fits" in result.stdout
    assert any("bottleneck: " in line for line in lines)


def test_times_need_a_profile(run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert plan(run_file)["step"] is None
    assert "time: unknown, as this machine was not measured" in run("plan", run_file, "--details").stdout


@pytest.mark.parametrize(("model", "fits"), [("Qwen2.5-0.5B", True), ("Qwen2.5-7B", False)])
def test_model_that_fits_the_gpu_anyway_is_said_to_fit(model: str, fits: bool) -> None:
    content = plan("--model", model, "--device", "h100")
    found = [
        reason for reason in content["run"]["reasons"] if reason.startswith("this model also fits the GPU as a whole")
    ]
    assert len(found) == fits
    for reason in found:
        match = re.search(r"takes about ([\d.]+) GiB of 79.20 GiB there, and a step about (\d+)% shorter", reason)
        assert match is not None
        assert 12 * content["model"]["parameters"] / GIB < float(match[1]) < 79.2
        assert 0 < int(match[2]) < 80


def test_quantized_base_that_transformers_decodes_is_not_said_to_fit() -> None:
    """Plain training of MXFP4 needs all weights decoded, which is not what is planned."""
    arguments = ("--model", "openai/gpt-oss-120b", "--use_peft", "true", "--device", "h100", "--host-memory", "256GiB")
    reasons = plan(*arguments)["run"]["reasons"]
    assert not any("fits the GPU as a whole" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("ranks", "is_said"),
    [
        ([], True),
        (["--gpus", "2"], False),
        (["--gpus", "2", "--dp_shard_size", "1", "--dp_replicate_size", "2"], False),
    ],
)
def test_up_to_how_many_tokens_routed_experts_are_streamed(tmp_path: Path, ranks: list[str], is_said: bool) -> None:
    """Several ranks always stream all experts."""
    tiny_models.build("qwen3_moe", num_experts=16).save_pretrained(tmp_path)
    result = run("plan", "--model", tmp_path, "--device", "rtx-4090-server", "--max_length", "64", "--details", *ranks)
    assert result.exit_code == 0, result.stderr
    said = "of at most 4 tokens, as in generation, stream those of the 16 experts that their tokens are routed to; larger ones stream all"
    assert (said in result.stdout) == is_said


def test_names_are_listed() -> None:
    text = run("plan", "--list").stdout
    assert "rtx-4090-server          RTX 4090 24 GB, two EPYC 7763" in text
    assert re.search(r"Qwen/Qwen3-4B +4.02B\n    Qwen/Qwen3-4B-Base\n    Qwen/Qwen3-4B-Instruct-2507\n", text)


def test_language_model_of_a_multimodal_one_is_named() -> None:
    reasons = plan("--model", "gemma-3-4b-it", "--device", "h100")["run"]["reasons"]
    assert "model: only the language model of gemma-3-4b-it is planned, not its vision tower" in reasons


@pytest.mark.parametrize(("name", "needed"), [("Kimi-K2-Thinking", True), ("DeepSeek-V3", False)])
def test_needs_of_a_published_folder_are_said(monkeypatch: pytest.MonkeyPatch, name: str, needed: bool) -> None:
    """The folder of Kimi-K2 is not opened as it is published. A small model is planned in its place, as its own plan takes long."""
    own = planned_run.find_known(name)
    assert own is not None
    small = replace(known_models()[0], needs=own.needs)
    monkeypatch.setattr(planned_run, "find_known", lambda _name: small)
    said = " ".join(run("plan", "--model", small.name, "--device", "h100").stdout.split())
    assert ("set model_type: deepseek_v3 in its config.json and remove auto_map there" in said) == needed
    assert ("trust_remote_code: true" in said) == needed


def test_a_tokenizer_whose_code_may_not_run_is_named(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    assert not [reason for reason in plan("--model", folder)["run"]["reasons"] if reason.startswith("tokenizer:")]
    path = folder / "tokenizer_config.json"
    code = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    (reason,) = [each for each in plan("--model", folder)["run"]["reasons"] if each.startswith("tokenizer:")]
    assert "allow it with trust_remote_code: true" in reason


def test_known_model_is_planned_without_download() -> None:
    content = plan("--model", "Qwen/Qwen2.5-7B-Instruct", "--device", "h200", "--host-memory", "256GiB")
    assert content["model"]["parameters"] == 7_615_616_512
    assert [item["name"] for item in content["disk"]["items"]] == ["exported model", "records", "download"]
    assert content["step"]["tokens_per_second"] > 0
    assert set(content["step"]["exposed_seconds"]) == {"copy_in", "update", "copy_out", "host"}
    named = "attention: packed and padded rows use FlashAttention-2 of torch "
    assert any(reason.startswith(named) for reason in content["run"]["reasons"])
    peak = max(content["memory"]["device"])
    assert 0.9 * peak < sum(i["bytes"] for i in content["device"]["items"] if i["name"] not in ("margin", "context"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_large_moe_is_planned_without_its_weights() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom horizon_lm.cli import app\n"
        "try:\n    app(['plan', '--model', 'deepseek-ai/DeepSeek-V3', '--dequantize', 'true', '--device', 'h200', '--host-memory', '10TB', '--json'])\n"
        "except SystemExit as end:\n    print(end.code, Path('/proc/self/status').read_text(), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.startswith("0 ")
    peak = re.search(r"VmHWM:\s+(\d+) kB", result.stderr)
    assert peak is not None
    assert int(peak[1]) * 1024 < 1.5 * 10**9  # the libraries take most of it, and more with each version
    assert json.loads(result.stdout)["model"]["parameters"] == 671_026_404_352


# Runs that do not fit


HUGE = ("--model", "meta-llama/Llama-3.1-70B", "--host-memory", "2GiB", "--device", "cpu")


def rejected(*arguments: Any) -> str:
    """Run a command that must exit with 'does not fit', and return its message."""
    result = run(*arguments)
    assert result.exit_code == 3, result.output
    assert result.stderr.startswith("error: this run does not fit")
    return result.stderr


def test_70b_model_is_rejected_here_and_fits_h200(run_file: Path) -> None:
    assert "2.00 GiB available (host_memory)" in rejected("plan", *HUGE, "--json")
    result = run("plan", *HUGE)
    first, host, *_ = result.stdout.splitlines()
    assert first == "does not fit: meta-llama/Llama-3.1-70B, on this machine"
    assert re.fullmatch(r"host memory    \S+ \S+ of 2\.00 GiB \(host_memory\), \S+ \S+ short", host)
    message = result.stderr
    assert message.startswith("error: this run does not fit\n")
    assert "No settings make it fit" in message
    assert " short" not in message  # which the plan has said
    assert "does not fit" not in run("plan", "--model", "Qwen2.5-0.5B", "--device", "h200").stdout
    assert re.search(r"--max_grad_norm 0 it would take [\d.]+ \w+ of host memory", message)
    message = rejected("train", run_file, "--model_name_or_path", "meta-llama/Llama-3.1-70B", "--host_memory", "2GiB")
    assert "bytes)" in message
    assert plan("--model", "meta-llama/Llama-3.1-70B", "--device", "h200", "--host-memory", "1.5TB")["fits"]


@pytest.mark.parametrize(
    ("model", "host_memory", "names"),
    [
        pytest.param("Qwen2.5-14B", "40GiB", {"use_peft"}, marks=pytest.mark.slow),
        pytest.param("Qwen2.5-32B", "40GiB", {"use_peft", "load_in_4bit"}, marks=pytest.mark.slow),
        ("openai/gpt-oss-20b", "24GiB", {"use_peft", "dequantize"}),
    ],
)
def test_adapters_are_tried_where_no_other_setting_helps(model: str, host_memory: str, names: set[str]) -> None:
    wanted = ["--model", model, "--device", "h200", "--host-memory", host_memory]
    decoded = ["--dequantize", "true"] if "dequantize" in names else []
    result = run("plan", *wanted, *decoded, "--json")
    (remedy,) = json.loads(result.stdout)["remedies"]
    assert remedy["settings"].keys() == names
    assert "only adapters are trained" in result.stderr
    least = re.search(
        r"^Even with --precision bf16 .* it would take ([\d.]+) GiB of host memory\.$", result.stderr, re.M
    )
    assert least is not None  # to train all weights
    assert float(least[1]) > float(host_memory.removesuffix("GiB"))
    settings = [text for name, value in remedy["settings"].items() for text in (f"--{name}", str(value).lower())]
    changed = plan(*wanted, *settings)
    assert changed["host"]["bytes"] == remedy["bytes"]["host"]


def test_remedies_state_cost_and_make_the_run_fit(run_file: Path) -> None:
    wanted = ["--model", "meta-llama/Llama-3.1-70B", "--device", "h200"]
    result = run("plan", *wanted, "--host-memory", "850GiB", "--json")
    assert result.exit_code == 3
    content = json.loads(result.stdout)
    assert not content["fits"]
    assert 2 <= len(content["remedies"]) <= 3
    for remedy in content["remedies"]:
        assert remedy["cost"]
        assert remedy["bytes"]["host"] <= 850 * GIB
        settings = [text for name, value in remedy["settings"].items() for text in (f"--{name}", str(value).lower())]
        changed = plan(*wanted, "--host-memory", "850GiB", *settings)
        assert changed["host"]["bytes"] == remedy["bytes"]["host"]
    assert "It would fit with any of" in result.stderr


@pytest.mark.parametrize(("boundaries", "rows"), [("auto", 64), ("host", 1)])
def test_remedy_with_more_than_three_changes(run_file: Path, boundaries: str, rows: int) -> None:
    wanted = ["--model", "Qwen3-0.6B", "--device", "rtx-4090", "--host-memory", "4.9GiB", "--max_length", "4096"]
    wanted += ["--activation_checkpoints", boundaries]
    result = run("plan", *wanted, "--per_device_train_batch_size", "256", "--json")
    (remedy,) = json.loads(result.stdout)["remedies"]
    assert remedy["settings"]["per_device_train_batch_size"] == rows
    assert len(remedy["settings"]) >= 4
    settings = [text for name, value in remedy["settings"].items() for text in (f"--{name}", str(value).lower())]
    assert plan(*wanted, *settings)["fits"]


@pytest.mark.parametrize(
    ("host_memory", "others"),
    [
        pytest.param("64GiB", set(), marks=pytest.mark.slow),
        ("4.9GiB", {"max_length", "moments", "precision", "update_in_backward"}),
    ],
)
def test_rows_that_are_far_too_long(host_memory: str, others: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is the remedy: the longest that fits, beside changes that short rows need, too. A row of many chunks would take minutes."""
    traced: list[dict[str, Any]] = []

    def outline(source: Source, run: Any, **options: Any) -> Any:
        traced.append(options)
        return outlined(source, run, **options)

    outlined = Source.outline
    monkeypatch.setattr(Source, "outline", outline)
    wanted = ["--model", "Qwen3-0.6B", "--device", "rtx-4090", "--host-memory", host_memory]
    result = run("plan", *wanted, "--max_length", 10_000_000, "--json")
    (remedy,) = json.loads(result.stdout)["remedies"]
    assert "longer examples are truncated" in remedy["cost"]
    assert others <= set(remedy["settings"]) <= others | {"max_length", "max_grad_norm", "moments"}
    assert all(each["length"] / (each.get("mlp_chunk_tokens") or each["length"]) < 257 for each in traced)
    length = remedy["settings"]["max_length"]
    for tokens, fits in ((length, True), (2 * length, False)):
        changed = remedy["settings"] | {"max_length": tokens}
        settings = [text for name, value in changed.items() for text in (f"--{name}", str(value).lower())]
        assert run("plan", *wanted, *settings).exit_code == (0 if fits else 3)


def test_shorter_rows_do_not_help_a_large_model() -> None:
    message = rejected(
        "plan",
        "--model",
        "Qwen2.5-72B",
        "--device",
        "rtx-3090",
        "--max_length",
        8192,
        "--use_peft",
        "true",
        "--lora_target_modules",
        "all-linear",
    )
    assert "No settings make it fit" in message


def test_small_device_is_rejected_with_remedy(run_file: Path) -> None:
    message = rejected(
        "plan", "--model", "Qwen2.5-72B", "--device", "rtx-3090", "--host-memory", "2TB", "--max_length", 4096,
        "--device_micro_batch_size", 8,
    )  # fmt: skip
    assert "error: this run does not fit\nIt would fit with" in message
    assert "--device_micro_batch_size 2" in message


def test_device_memory_bounds_the_buffers(run_file: Path) -> None:
    message = rejected("train", run_file, "--device_memory", "64KiB")
    assert "(device_memory)" in message
    needed = message.partition("--device_memory ")[2].split()[0]
    assert run("train", run_file, "--device_memory", needed, "--max_steps", 1).exit_code == 0


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def fake_group(root: Path, version: int, limit: int, use: int, cache: int) -> tuple[Path, Path]:
    """Create /proc and /sys/fs/cgroup of a process in a group with a limit; the rest of /proc is real."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    for name in ("meminfo", "self/status"):
        (proc / name).write_text(Path("/proc", name).read_text())
    (proc / "self/cgroup").write_text("0::/job\n" if version == 2 else "4:memory:/job\n")
    if version == 2:
        group(cgroups, cgroup__controllers="memory")
        group(
            cgroups / "job",
            memory__max=limit,
            memory__current=use,
            memory__stat=f"inactive_file {cache}\nactive_file 0",
        )
    else:
        group(
            cgroups / "memory/job", memory__limit_in_bytes=limit, memory__usage_in_bytes=use,
            memory__stat=f"total_inactive_file {cache}\ntotal_active_file 0",
        )  # fmt: skip
    return proc, cgroups


@pytest.mark.parametrize("version", [1, 2])
def test_small_control_group_is_rejected_before_allocation(
    tmp_path: Path, run_file: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = resources.memory_limits

    def limits(left: int, cache: int) -> None:
        root = tmp_path / f"group-{left}-{cache}"
        folders = fake_group(root, version, limit=64 * GIB, use=64 * GIB - left, cache=cache)
        monkeypatch.setattr(resources, "memory_limits", lambda: real(*folders))

    def untouched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read")

    limits(left=10 * 2**20, cache=0)
    with monkeypatch.context() as patch:
        patch.setattr("horizon_lm.from_pretrained", untouched)
        message = rejected("train", run_file)
    assert f"cgroup v{version} /job" in message
    assert "short (" in message
    assert not (tmp_path / "run/plan.json").exists()
    # Page cache is dropped when memory is needed.
    limits(left=10 * 2**20, cache=8 * GIB)
    assert run("train", run_file, "--max_steps", 1).exit_code == 0


@pytest.mark.parametrize("group_left", [None, 10 * 2**20], ids=["", "in a control group"])
def test_host_memory_overrides_free_memory(
    tmp_path: Path, run_file: Path, group_left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be added on demand, but the limit of a control group is enforced."""
    proc, cgroups = fake_group(tmp_path, 2, limit=64 * GIB, use=64 * GIB - (group_left or 32 * GIB), cache=0)
    (proc / "meminfo").write_text("MemAvailable: 10240 kB\n")
    real = resources.memory_limits
    monkeypatch.setattr(resources, "memory_limits", lambda: real(proc, cgroups))
    if group_left is None:
        assert "(MemAvailable)" in rejected("train", run_file)
        result = run("train", run_file, "--host_memory", "16GiB", "--max_steps", 1)
        assert result.exit_code == 0, result.stderr
        assert "host_memory: 16.00 GiB exceeds the" in result.stdout
    else:
        assert "cgroup v2 /job" in rejected("train", run_file, "--host_memory", "16GiB")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a file system of Linux")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_folder_that_no_file_can_be_written_to(command: str, run_file: Path) -> None:
    """It has no free space either, but room cannot be made there."""
    result = run(command, run_file, "--output_dir", "/proc/run")
    assert result.exit_code == 2
    assert re.fullmatch(r"error: output_dir: /proc(/run)? cannot be written to; choose another folder\n", result.stderr)


def test_full_disk_is_rejected(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "disk_free", lambda path: 12_345)
    message = rejected("train", run_file)
    assert "disk: " in message
    assert "12.06 KiB available" in message
    assert "Make room on the disk" in message
    assert not (tmp_path / "run/model").exists()


def test_actual_lengths_decide(run_file: Path, tmp_path: Path) -> None:
    """A run with short examples is not rejected because of a large max_length."""
    at_most = plan(run_file, "--max_length", 8_000)["host"]["bytes"]
    as_it_is = plan(run_file)["host"]["bytes"]
    between = f"{(at_most + 3 * as_it_is) // 4 // 2**20}MiB"
    rejected("plan", run_file, "--max_length", 8_000, "--host-memory", between)
    result = run("train", run_file, "--max_length", 8_000, "--host_memory", between, "--max_steps", 1)
    assert result.exit_code == 0, result.stderr


def test_large_mask_is_rejected_before_the_run(run_file: Path) -> None:
    message = rejected("plan", run_file, "--max_length", 20_000)
    assert "makes a mask of 2.24 GiB" in message
    assert plan(run_file, "--max_length", 20_000, "--attn_implementation", "varlen")["fits"]


def test_table_rows_are_counted_by_distinct_tokens(run_file: Path, tmp_path: Path) -> None:
    """A repeated token is a single row of the table."""
    (tmp_path / "train.jsonl").write_text(2 * (json.dumps(tiny.alpaca_rows(1)[0]) + "\n"))
    assert run("train", run_file, "--max_steps", 1).exit_code == 0
    saved = json.loads((tmp_path / "run/plan.json").read_text())
    (rows,) = (item["bytes"] for item in saved["host"]["items"] if item["name"] == "device: embedding rows")
    at_most = plan(run_file)
    (more,) = (item["bytes"] for item in at_most["host"]["items"] if item["name"] == "device: embedding rows")
    assert rows < more / 4


def test_model_without_meta_support_runs_anyway(
    run_file: Path, tmp_path: Path, outlines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("nothing for the meta device")

    monkeypatch.setattr("horizon_lm.planning.measure.model_outline.find_calls", fails)
    monkeypatch.setattr("horizon_lm.planning.measure.model_outline.outline_model", outlines)
    content = plan(run_file)
    assert "nothing for the meta device" in content["run"]["reasons"][-1]
    assert content["step"] is None
    assert run("train", run_file, "--max_steps", 1).exit_code == 0
    assert "activation_checkpoints: auto\n" in (tmp_path / "run/config.yaml").read_text()


def test_machine_of_the_documentation(tmp_path: Path) -> None:
    """The example of docs/planning.md is a machine that a model can be planned for."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shop.json").write_text(example)
    content = plan("--model", "Qwen/Qwen2.5-7B", "--device", tmp_path / "shop.json")
    assert content["hardware"]["name"] == "RTX 5090, 16 cores, 128 GB of DDR5"
    assert content["host"]["available"] == 128 * 10**9
    assert content["step"]["tokens_per_second"] > 0


def test_several_gpus_and_machines() -> None:
    """One copy of a 70B model for each machine, in eight parts. Host memory is that of each machine."""
    run_of = (
        "--model",
        "Llama-3.1-70B",
        "--device",
        "h100",
        "--per_device_train_batch_size",
        "4",
        "--max_length",
        "2048",
    )
    one = plan(*run_of, "--host-memory", "2TB")
    many = plan(*run_of, "--host-memory", "2TB", "--gpus", "8", "--nodes", "4")
    assert (many["run"]["num_ranks"], many["run"]["dp_shard_size"]) == (32, 8)
    assert many["interconnect"] == {"gpus": 8, "machines": 4, "peer": 340e9, "network": 340e9}
    weights = [
        next(item["bytes"] for item in each["host"]["items"] if item["name"] == "weights") for each in (one, many)
    ]
    assert weights[1] == pytest.approx(weights[0] / 8, rel=1e-3)
    assert many["host"]["available"] == 2 * 10**12 // 8
    taken = [
        sum(item["bytes"] for item in each["device"]["items"] if item["name"] == "collectives") for each in (one, many)
    ]
    assert taken[0] == 0
    assert taken[1] > 3e9  # what NCCL takes for the links to 7 other GPUs
    assert "collective" in many["step"]["busy"]
    assert one["step"]["tokens_per_second"] < many["step"]["tokens_per_second"]
    text = run("plan", *run_of, "--host-memory", "2TB", "--gpus", "8", "--nodes", "4", "--details").stdout
    assert re.search(r"^host memory +\S+ GiB of 232\.83 GiB for each of 8 processes$", text, re.MULTILINE)
    assert "4 copies of the model, shared by 8 processes each" in text
    assert "4 machines with 8 GPUs each" in text
    assert "340 GB/s between its GPUs, 340 GB/s between machines" in text
    assert "all 8 processes of a machine" in text


def test_several_gpus_have_the_host_that_is_stated(tmp_path: Path) -> None:
    """A profile's host is that of any number of its GPUs, and what the user's file says of it wins."""
    run_of = ("--model", "Qwen3-0.6B", "--gpus", "2")
    desktop = plan(*run_of, "--device", "rtx-3090")
    (tmp_path / "mine.json").write_text('{"base": "rtx-3090", "cores": 8, "host_bandwidth": {"8": 20e9}}')
    mine = plan(*run_of, "--device", tmp_path / "mine.json")
    server = plan(*run_of, "--device", "rtx-3090-server")
    assert [each["hardware"]["host_bandwidth"] for each in (desktop, mine, server)] == [
        {"8": 20e9},
        {"4": 10e9},
        {"32": 150e9},
    ]
    assert mine["step"]["seconds"] > desktop["step"]["seconds"] > server["step"]["seconds"]
    text = run("plan", *run_of, "--device", "rtx-3090-server").stdout.replace("\n", " ")
    assert "RTX 3090 24 GB, two EPYC 7543; the host of all: 64 cores, 300 GB/s of host memory" in text


def test_gpus_without_peer_access_are_slower() -> None:
    run_of = ("--model", "Qwen3-8B", "--device", "rtx-4090-server", "--gpus", "8", "--max_length", "1024")
    content = plan(*run_of)
    assert content["step"]["limited_by"] != "compute"
    assert "GPUs reach each other through host memory" in run("plan", *run_of, "--details").stdout


def test_machines_share_a_model_that_none_of_them_can_hold() -> None:
    """The remedy is the mesh that spans all machines, and with it the run fits."""
    run_of = (
        "plan",
        "--model",
        "Llama-3.1-405B",
        "--device",
        "h100",
        "--gpus",
        "8",
        "--nodes",
        "4",
        "--max_length",
        "2048",
    )
    message = rejected(*run_of, "--per_device_train_batch_size", "4")
    assert "--dp_shard_size 32\n" in message
    content = plan(*run_of[1:], "--per_device_train_batch_size", "4", "--dp_shard_size", "32")
    assert content["fits"]
    assert content["host"]["bytes"] * 32 > 14 * content["model"]["parameters"]


def test_processes_of_this_machine_are_planned_without_times(run_file: Path) -> None:
    alone, four = plan(run_file), plan(run_file, "--gpus", "4")
    assert four["run"]["num_ranks"] == 4
    assert four["run"]["num_steps"] == 3  # 12 rows in steps of 24, for three epochs
    assert four["step"] is None
    assert four["host"]["available"] == pytest.approx(alone["host"]["available"] / 4, rel=0.05)
    assert "links between the GPUs are unknown" in run("plan", run_file, "--gpus", "4").stdout


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("device", thinned(["rtx-3090", "cpu"], every=2))
def test_largest_models_without_an_amount_are_those_of_a_stated_limit(device: str) -> None:
    (row,) = plan("--largest", "--device", device)["rows"]
    assert re.fullmatch(r"\d+\.\d\d [GT]iB \([^()]+\)", row["host_memory"])


@pytest.mark.usefixtures("small_models")
def test_largest_models_of_several_gpus() -> None:
    largest = ("plan", "--largest", "--device", "rtx-3090", "--host-memory", "32GB", "--gpus", "2", "--json")
    result = run(*largest)
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert row["largest"]["adapters, 4-bit base"]
    assert row["largest"]["fp32_master"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a run file, or a model"),
        (("--model", "Qwen2.5-7B", "--gpus", "0"), "greater than or equal to 1"),
        (("--model", "Qwen2.5-7B", "--device", "gb10", "--gpus", "2"), "describes a machine with one GPU"),
        (
            (
                "--model",
                "Qwen2.5-7B",
                "--device",
                "h100",
                "--gpus",
                "2",
                "--use_peft",
                "true",
                "--use_dora",
                "true",
            ),
            "is not supported with 2 processes",
        ),
        (
            ("--model", "Qwen2.5-7B", "--device", "h100", "--gpus", "2", "--dp_shard_size", "3"),
            "dp_shard_size 3 does not divide the number of all processes, 2",
        ),
        (("--model", "Qwen2.5-7B", "--device", "h300"), "choose one of a100-pcie-80gb"),
        (("--model", "Qwen2.5-7B", "--host-memory", "many"), "is not a size"),
        (("--model", "./nowhere"), "no such folder"),
        (("--model", "Qwen/Qwen2.5-7B-Instrut"), "did you mean Qwen/Qwen2.5-7B-Instruct?"),
        (("--model", "Qwen2.5-7B", "--max_length", "null"), "max_length is null"),
        (("--model", "Qwen2.5-7B", "--precison", "bf16"), "did you mean precision?"),
        (("--model", "Qwen2.5-7B", "--device", "nowhere.json"), "nowhere.json"),
        pytest.param(
            ("--model", "Qwen2.5-7B", "--device", "cuda:0"),
            "--device h200 (horizon-lm plan --list names them)",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (("--largest", "--model", "Qwen2.5-7B"), "remove --model"),
        (("--largest", "--moments", "8bit"), "remove --moments"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_moe_that_does_not_fit_is_reported() -> None:
    """A mixture of experts has no feed-forward layer to chunk, which is one of the changes tried."""
    message = rejected(
        "plan",
        "--model",
        "openai/gpt-oss-20b",
        "--dequantize",
        "true",
        "--device",
        "cpu",
        "--host-memory",
        "2GiB",
        "--json",
    )
    assert "host: " in message


def test_eval_set_is_planned_for(run_file: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "held_out.jsonl", tiny.alpaca_rows(3))
    few, many = (
        plan(run_file, "--eval_datasets", rows, "--per_device_eval_batch_size", n, "--max_length", 512)["host"]["bytes"]
        for n in (1, 64)
    )
    hidden = 64 * 512 * 32 * 4  # hidden states of the whole batch, between blocks
    assert few + 2 * hidden < many
    message = rejected(
        "plan", run_file, "--eval_datasets", rows, "--per_device_eval_batch_size", 64, "--max_length", 512,
        "--host-memory", f"{(few + many) // 2 // 2**20}MiB",
    )  # fmt: skip
    assert "--per_device_eval_batch_size" in message


def test_export_is_counted_in_checkpoint_dtype(run_file: Path, model: Path) -> None:
    """The tiny model was saved in float32."""
    content = plan(run_file)
    (exported,) = (item["bytes"] for item in content["disk"]["items"] if item["name"] == "exported model")
    beside = exported - 4 * content["model"]["parameters"]
    size = (model / "model.safetensors").stat().st_size
    assert size < exported == 4 * content["model"]["parameters"] + beside < size + 20_000


def test_quantized_weights_are_rejected(run_file: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    result = run("plan", run_file, "--model", folder)
    assert result.exit_code == 2
    assert "quantized" in result.stderr


@pytest.mark.parametrize(("host_memory", "code"), [("64GiB", 0), ("4GiB", 3)])
def test_quantized_weights_are_planned_in_both_ways(host_memory: str, code: int) -> None:
    """With adapters, and decoded. Training rejects such a run, and names the same settings."""
    wanted = ("plan", "--model", "openai/gpt-oss-20b", "--device", "h100", "--host-memory", host_memory)
    result = run(*wanted)
    assert result.exit_code == code
    lines = result.stdout.splitlines()
    fits = "does not fit" if code else "fits"
    assert lines[0].startswith(f"{fits}: openai/gpt-oss-20b, adapters, on H100")
    assert "note: openai/gpt-oss-20b has quantized weights, so adapters on them are planned (--use_peft true)" in lines
    at = lines.index("or all weights, decoded while they are read (--dequantize true):")
    assert lines[at + 1].startswith("does not fit: openai/gpt-oss-20b, on H100")
    adapted, decoded = lines[1], lines[at + 2]
    for settings, line in (("use_peft", adapted), ("dequantize", decoded)):
        assert run(*wanted, f"--{settings}", "true").stdout.splitlines()[1] == line
    content = json.loads(run(*wanted, "--json").stdout)
    (other,) = content["alternatives"]
    assert other["settings"] == {"dequantize": True}
    assert other["fits"] is False
    assert other["bytes"]["host"] > content["host"]["bytes"]


def test_known_quantized_weights_are_planned_decoded() -> None:
    decoded = plan("--model", "openai/gpt-oss-20b", "--device", "h100", "--dequantize", "true")
    (download,) = (item for item in decoded["disk"]["items"] if item["name"] == "download")
    assert 12.5 * GIB < download["bytes"] < 13 * GIB


def test_resident_blocks_leave_checkpoints_to_the_planner() -> None:
    wanted = ("--model", "Qwen2.5-7B", "--device", "h200", "--host-memory", "512GiB")
    settings = plan(*wanted, "--resident_blocks", 4)["run"]["settings"]
    assert (settings["resident_blocks"], settings["activation_checkpoints"]) == (4, 28)


def test_micro_batch_depends_on_host_memory(run_file: Path) -> None:
    """If the device is the host, a smaller micro-batch leaves more host memory."""
    wanted = (run_file, "--max_length", 1024, "--per_device_train_batch_size", 32, "--gradient_accumulation_steps", 1)
    whole = plan(*wanted)
    assert whole["run"]["settings"]["slices"] == [32]
    one = plan(*wanted, "--device_micro_batch_size", 1)
    between = (3 * one["host"]["bytes"] + whole["host"]["bytes"]) // 4
    less = plan(*wanted, "--host-memory", f"{between // 2**20}MiB")
    assert 1 <= less["run"]["settings"]["slices"][0] < 32
    assert less["run"]["reasons"][0].endswith("the largest that fit")


def test_times_are_of_a_typical_step(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    machine(device="cpu", device_bandwidth=1e9, cores=2).save(own_profile_path())
    seconds = {}
    for name, longest in (("short", 1), ("long", 60)):
        rows = tiny.alpaca_rows(96)
        rows[-1]["output"] *= longest
        tiny.write_jsonl(tmp_path / "train.jsonl", rows)
        result = run("train", run_file, "--max_steps", 1, "--overwrite_output_dir", "true", "--max_length", 1024)
        assert result.exit_code == 0, result.stderr
        saved = json.loads((tmp_path / "run/plan.json").read_text())
        seconds[name] = saved["step"]["seconds"]
    assert saved["run"]["length"] > 500  # memory is planned for the longest row
    assert seconds["long"] < 5 * seconds["short"]  # which occurs in only one step of sixteen


def test_profile_of_another_version_is_ignored(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own_profile_path().parent.mkdir(parents=True)
    own_profile_path().write_text('{"name": "old"}')
    assert plan(run_file)["step"] is None


def test_unknown_model_without_network_is_one_line() -> None:
    """Nothing listens at this address; transformers would retry five times, and say so each time."""
    command = [sys.executable, "-m", "horizon_lm", "plan", "--model", "Qwen/Qwen9-4B-Instruct", "--device", "h100"]
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 2
    (line,) = (line for line in result.stderr.splitlines() if "hub" in line or "Retrying" in line or "thrown" in line)
    assert line.startswith("error: Qwen/Qwen9-4B-Instruct is neither a folder nor a model")


# Largest models


@pytest.mark.slow
def test_the_page_has_the_largest_models() -> None:
    result = run("plan", "--largest", "--device", "h200", "--host-memory", "64GB,128GB,256GB,512GB,1.5TB")
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert "\n".join(result.stdout.splitlines()[2:]) in page


@pytest.mark.usefixtures("small_models")
def test_largest_models_are_planned_to_fit() -> None:
    result = run("plan", "--largest", "--device", "h200", "--host-memory", "16GB", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert row["host_memory"] == "16GB"
    for mode, precision in (("fp32_master", "fp32_master"), ("bf16", "bf16")):
        (first, *_) = row["largest"][mode]
        assert plan("--model", first["name"], "--device", "h200", "--host-memory", "16GB", "--precision", precision)[
            "fits"
        ]


def bytes_of(text: str) -> float:
    """Return the bytes of a rounded size in KiB."""
    value, unit = text.split()
    assert unit == "KiB"
    return (float(value) + 0.005) * 2**10


def test_device_buffers_have_one_name_and_one_number(tmp_path: Path) -> None:
    """The plan, the plan that a run saves, its log, its metrics and its report say the same bytes in the same words."""
    model, rows = tiny.save_model(tmp_path / "model"), tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    file = tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": str(model), "datasets": [str(rows)], "output_dir": str(tmp_path / "run"), "device": "cpu",
        "max_steps": 1, "max_length": 64, "device_memory": "50MiB"
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    size = r"[\d.]+ [KM]iB"
    planned = re.search(rf"^device buffers +({size}) of 50.00 MiB$", run("plan", file).stdout, re.MULTILINE)
    logged = re.search(rf"  device buffers ({size})  ", run("train", file).stdout)
    assert planned is not None
    assert logged is not None
    saved = read_plan(tmp_path / "run" / "plan.json").buffers
    (line,) = (
        each
        for each in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if "loss" in each
    )
    assert saved is not None
    # A plan without the rows counts the longest that max_length allows, and as many distinct tokens as there can be.
    assert line["device_bytes_peak"] <= saved.bytes <= bytes_of(planned[1])
    assert format_bytes(line["device_bytes_peak"]) == logged[1]
    (reported,) = (each for each in summarise(load_run(tmp_path / "run")) if each.name == "Device buffers")
    assert (reported.text, f"planned {format_bytes(saved.bytes)}" in reported.note) == (logged[1], True)
    assert line["of_planned_device"] == pytest.approx(line["device_bytes_peak"] / saved.bytes, abs=1e-3)
