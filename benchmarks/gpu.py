"""Benchmark training on an accelerator: tokens and operations per second, memory, kernels, and the causes of waiting.

Every case runs in a process of its own, with random weights that are drawn on the device. Peers train on the same batches,
some rows at a time, or as many as fit. The result has what the plan predicts beside what was measured, and a profile of one
step's kernels.

    python3 benchmarks/gpu.py [SUITE ...] [--device cuda] [--minutes 9] [--output FILE.md] [--trace-dir DIR]

Suites: see `SUITES` in gpu_cases.py. With ``--device cpu`` every model is a toy of its family: everything runs, but no figure
means anything. DeepSpeed is optional. Exits with 1 after an unexpected failure; a peer may run out of device memory.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_cases import PEERS, SUITES, Case, K, label, make_case
from gpu_energy import watts_at_rest
from gpu_memory import available_bytes
from gpu_models import toy
from gpu_report import report
from gpu_worker import Worker

from horizon_lm.planning.arithmetic.catalog import Hardware, match_profile, read_profile

OUT_OF_MEMORY = 3  # exit code of a worker
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # wastes less memory, for all systems
LEFT_FOR_OTHERS = 45  # seconds that a case leaves to each later one, if there are so many
CHECK_SECONDS = 90
FILL_SECONDS = 120
GIB = 2**30


def measure(case: Case, timeout: float, trace_dir: Path | None, profile: Path | None = None) -> dict[str, Any]:
    """Measure a case in a process. Retry a peer that runs out of device memory with half as many rows at once."""
    began, trace_file = time.monotonic(), None
    if trace_dir is not None and case.is_ours:
        trace_dir.mkdir(parents=True, exist_ok=True)
        name = f"{case.name} {case.tokens / K:g}k {label(case)}"
        trace_file = str(trace_dir / f"{re.sub('[^a-zA-Z0-9.]+', '-', name)}.json")
    settings = [dataclasses.asdict(case), trace_file, None if profile is None else str(profile)]
    command = [sys.executable, __file__, "--worker", json.dumps(settings)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | ALLOCATOR)
    except subprocess.TimeoutExpired as stopped:
        known = _last_result((stopped.stdout or b"").decode(), case)  # it prints what it knows so far
        return (
            known | {"stopped": f"stopped after {timeout:.0f} s"}
            if known
            else {"error": f"not done in {timeout:.0f} s"}
        )
    if known := _last_result(done.stdout, case):
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
        return known | ({} if done.returncode == 0 else {"incomplete": _reason(done)})
    if done.returncode == OUT_OF_MEMORY:
        if case.is_ours or case.rows_at_once == 1:
            return {"error": "out of device memory", "expected": not case.is_ours}
        left = timeout - (time.monotonic() - began)
        return measure(dataclasses.replace(case, rows_at_once=case.rows_at_once // 2), left, trace_dir, profile)
    print(done.stderr[-4000:], file=sys.stderr)
    return {"error": _reason(done)}


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]


def _last_result(output: str, case: Case) -> dict[str, Any]:
    """Return the last result that a worker has printed as a whole line; empty if there is none."""
    whole = [line for line in output.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
    return json.loads(whole[-1]) | {"rows_at_once": case.rows_at_once} if whole else {}


def obstacle(case: Case, seconds: float) -> dict[str, Any]:
    """Return why a case is not started, as its result; empty if nothing is in its way."""
    if case.system.startswith("ZeRO-3") and importlib.util.find_spec("deepspeed") is None:
        return {"error": "deepspeed is not installed", "expected": True}
    if case.system in PEERS and case.torch_device.type == "cuda":
        tiny = dataclasses.replace(case, model=toy(case.model), rows=2, length=64, rows_at_once=1, steps=1, warmup=1)
        checked = measure(tiny, min(CHECK_SECONDS, seconds), None)
        if "error" in checked or "incomplete" in checked:
            return {"error": f"a step of a toy does not run: {checked.get('error') or checked['incomplete']}"}
    if case.is_ours and case.torch_device.type == "cuda":
        return _lacking_memory(case)
    return {}


def _lacking_memory(case: Case) -> dict[str, Any]:
    """Return as the result of a case that the machine lacks the planned host memory; empty if it has it."""
    from gpu_plan import CONTEXT_BYTES, plan_case

    # Without a context of this process, which would take device memory from the case.
    free = torch.cuda.get_device_properties(case.torch_device).total_memory - CONTEXT_BYTES
    needed = plan_case(case, free=free).host.bytes
    if needed > available_bytes():  # a machine without memory kills processes, perhaps this one
        return {
            "error": f"not started: {needed / GIB:.1f} GiB planned in host memory, {available_bytes() / GIB:.1f} available"
        }
    if not case.fills_first:
        return {}
    command = [
        sys.executable,
        str(Path(__file__).with_name("gpu_memory.py")),
        case.device,
        "--gib",
        f"{needed / GIB:.1f}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FILL_SECONDS)
    except subprocess.TimeoutExpired:  # it is slow, which is no reason not to try
        print(f"{case.name}: {needed / GIB:.1f} GiB were not filled and locked in {FILL_SECONDS} s", flush=True)
        return {}
    print(f"{case.name}: {done.stdout.strip()}", flush=True)
    return (
        {"error": f"not started: {done.stdout.strip().splitlines()[0] if done.stdout else _reason(done)}"}
        if done.returncode
        else {}
    )


def _ceilings(device: str, given: Path | None) -> dict[str, Any]:
    """Return the rates of the machine: those in a file if it is there, or measured now."""
    if given is not None and given.is_file():
        found: dict[str, Any] = json.loads(given.read_text())
        return found
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ceilings.json"
        command = [sys.executable, str(Path(__file__).with_name("gpu_ceilings.py")), device, "--output", str(output)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return json.loads(output.read_text())


def _work(worker: str) -> None:
    """Run a case in this process, and print its result whenever more is known."""
    settings, trace_file, profile = json.loads(worker)
    hardware = _hardware(settings["device"], profile)
    try:
        for result in Worker(Case(**settings), hardware, trace_file).run():
            print(json.dumps(result), flush=True)
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)


def _hardware(device: str, profile: str | None) -> Hardware | None:
    """Return the rates of the machine: those of a profile, or published ones of its GPU; None if there are none."""
    if profile is not None:
        return read_profile(Path(profile))
    return match_profile(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each case")
    parser.add_argument("--systems", help="run only these, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of all cases")
    parser.add_argument(
        "--ceilings", type=Path, help="rates that gpu_ceilings.py has written; measured if it is missing"
    )
    parser.add_argument(
        "--profile", type=Path, help="profile of the machine, for planned times; a published one if it is missing"
    )
    parser.add_argument("--output", type=Path, help="Markdown file, rewritten after each case")
    parser.add_argument("--trace-dir", type=Path, help="folder for the traces of each case")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.suites = arguments.suites or ["3b"]
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    if arguments.worker:
        _work(arguments.worker)
        return
    sys.exit(0 if run(arguments) else 1)


def run(arguments: argparse.Namespace) -> bool:
    """Measure all cases of a command, write the result after each, and return whether nothing failed unexpectedly."""
    end = time.monotonic() + 60 * arguments.minutes
    rest = watts_at_rest(torch.device(arguments.device), seconds=3)
    ceilings = _ceilings(arguments.device, arguments.ceilings)
    profile = arguments.profile if arguments.profile is not None and arguments.profile.is_file() else None
    cases = [
        make_case(settings, arguments.device, arguments.steps)
        for each in arguments.suites
        for settings in SUITES[each]()
    ]
    cases = [case for case in cases if not arguments.systems or case.system in arguments.systems.split(";")]
    results: list[tuple[Case, dict[str, Any]]] = []
    for number, case in enumerate(cases):
        if case.if_failed and results and "error" not in results[-1][1]:
            continue
        left = end - time.monotonic()
        own = max(left / (len(cases) - number), left - LEFT_FOR_OTHERS * (len(cases) - number - 1))
        if left <= 0:
            result: dict[str, Any] = {"error": "not started: out of time"}
        else:
            result = obstacle(case, own) or measure(
                case, max(1.0, min(own, end - time.monotonic())), arguments.trace_dir, profile
            )
        if case.if_failed and "error" not in result:
            results[-1][1]["expected"] = True  # which this one stands in for
        results.append((case, result))
        brief = result.get("error") or f"{statistics.median(result['seconds']):.3f} s/step"
        print(f"{case.name}, {case.tokens / K:g}k tokens, {label(case)}: {brief}{_incomplete(result)}", flush=True)
        text = report(results, ceilings, rest, arguments)
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(text)
    print(text)
    return not any(
        "incomplete" in result or ("error" in result and not result.get("expected")) for _, result in results
    )


def _incomplete(result: dict[str, Any]) -> str:
    """Return what ended a case that had been measured before, as text."""
    return "".join(f"; then {result[how]}" for how in ("incomplete", "stopped") if how in result)


if __name__ == "__main__":
    main()
