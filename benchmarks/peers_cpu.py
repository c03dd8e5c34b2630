"""Benchmark a step on a CPU, in seconds and peak memory: Horizon-LM, plain Hugging Face, DeepSpeed ZeRO-3 offload.

Every system trains the same model on the same rows in a process of its own. The processes take turns, so that a noisy
machine disturbs them all alike.

    python benchmarks/peers_cpu.py --model FOLDER [--rounds 3] [--steps 5] [--output FILE.md]

FOLDER is a Hugging Face folder (`make demo` leaves one in .cache/smollm2-135m-instruct). DeepSpeed is optional:
``DS_BUILD_OPS=0 pip install deepspeed ninja``.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROWS, LENGTH = 4, 256
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0

Step = Callable[[dict[str, Any]], float]


def hugging_face(folder: str) -> Step:
    """Create plain Hugging Face with gradient checkpointing and fused AdamW, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(batch: dict[str, Any]) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def horizon(folder: str, precision: str) -> Step:
    """Create Horizon-LM on its CPU device."""
    import horizon_lm

    model = horizon_lm.from_pretrained(folder, precision=precision)
    model.train()
    optimizer = horizon_lm.AdamW(model, lr=LEARNING_RATE, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)

    def step(batch: dict[str, Any]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def zero3(folder: str) -> Step:
    """Create DeepSpeed ZeRO-3 on its CPU accelerator, with parameters and optimizer offloaded to the CPU, float32."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": MAX_GRAD_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: dict[str, Any]) -> float:
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


SYSTEMS: dict[str, Callable[[str], Step]] = {
    "Hugging Face, checkpointing, fused AdamW (float32)": hugging_face,
    "Horizon-LM fp32_master": lambda folder: horizon(folder, "fp32_master"),
    "Horizon-LM float32": lambda folder: horizon(folder, "float32"),
    "DeepSpeed ZeRO-3, CPU offload (float32)": zero3,
}


def work(name: str, folder: str, steps: int) -> None:
    """Train in this process, and print the measurement as the last line."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = SYSTEMS[name](folder)
    ids = torch.randint(0, 40_000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    seconds, losses = [], []
    for _ in range(steps + 1):
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds[1:], "losses": losses, "peak": peak, "imports": imports}))


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a system in a process of its own."""
    command = [sys.executable, __file__, "--worker", name, "--model", arguments.model, "--steps", str(arguments.steps)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def report(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    """Return the text of the result file."""
    medians = {name: statistics.median(s for run in rs for s in run["seconds"]) for name, rs in runs.items()}
    base = next(iter(medians.values()))
    lines = [
        "# Peers on a CPU",
        "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores. {versions('torch', 'transformers', 'deepspeed')}.",
        f"Model: {Path(arguments.model).name}; {ROWS} x {LENGTH} tokens a step, clipping at {MAX_GRAD_NORM}, "
        f"{arguments.rounds} processes of {arguments.steps} timed steps each, taking turns; the first step is not timed.",
        "Peak memory is the largest resident set of the process, including interpreter and libraries.",
        "",
        f"Command: `python benchmarks/peers_cpu.py --model {Path(arguments.model).name} "
        f"--rounds {arguments.rounds} --steps {arguments.steps}`",
        "",
        "| system | s/step, median (min to max) | relative to Hugging Face | peak memory, GiB | loss of the first and last step |",
        "|---|---|---|---|---|",
    ]
    for name, rs in runs.items():
        seconds = [s for run in rs for s in run["seconds"]]
        peak = max(run["peak"] for run in rs) / 2**30
        losses = rs[0]["losses"]
        lines.append(
            f"| {name} | {medians[name]:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {medians[name] / base:.2f} "
            f"| {peak:.2f} | {losses[0]:.4f}, {losses[-1]:.4f} |"
        )
    lines += [
        "",
        "fp32_master computes with the bf16 half of its weights, like all mixed precision: updates this small change the loss "
        "only once they add up to half a bf16 step. float32 shows that the updates equal the peers'.",
    ]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """Return the name of this machine's processor."""
    if Path("/proc/cpuinfo").is_file():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions(*packages: str) -> str:
    """Return the versions of Python and of the given packages that are installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.model, arguments.steps)
        return
    systems = list(SYSTEMS)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed; leaving ZeRO-3 out", file=sys.stderr)
        systems = systems[:-1]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(arguments.rounds):
        for name in systems:
            runs[name].append(measure(name, arguments))
            print(f"round {number + 1}, {name}: {statistics.median(runs[name][-1]['seconds']):.2f} s/step", flush=True)
    text = report(runs, arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
