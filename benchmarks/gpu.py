"""Benchmark training on an accelerator: tokens and operations per second, memory, and the causes of waiting.

Every case runs in a process of its own, with random weights that are drawn on the device. Peers train on the same batches,
eight rows at a time, or as many as fit. The ceilings of the machine are measured in the same run.

    python3 benchmarks/gpu.py [SUITE ...] [--device cuda] [--minutes 9] [--output FILE.md] [--trace-dir DIR]

Suites: 3b, 7b, resident, peers, depth, width, tokens, long, moe, toys (see `SUITES`). With ``--device cpu`` every model is a toy of
its family: everything runs, but no figure means anything. DeepSpeed is optional, as in peers_cpu.py. Exits with 1 after an
unexpected failure; a peer may run out of device memory.
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
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_energy import joules_per_token, open_meter, watts_at_rest
from gpu_models import MODELS, count_parameters, make_config, model_flops, toy, wider
from gpu_systems import SYSTEMS, Case, System
from peers_cpu import processor, versions

from horizon_lm.device.cuda import CudaDevice
from horizon_lm.energy import Energy
from horizon_lm.schedule.ops import Stream
from horizon_lm.schedule.trace import Trace, exposed_seconds

K = 1024
LENGTH = 4 * K
WARMUP, TRACED = 2, 2
GIB = 2**30
OUT_OF_MEMORY = 3  # exit code of a worker
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # wastes less memory, for all systems

Cases = list[dict[str, Any]]


def _cases(systems: list[str], name: str, tokens: int, **changes: Any) -> Cases:
    """Return cases of the same step for several systems; ``changes`` replace fields of the case."""
    case = {"name": name, "model": MODELS.get(name), "rows": max(1, tokens // LENGTH), "length": min(tokens, LENGTH)}
    return [{"system": system, "rows_at_once": min(8, case["rows"])} | case | changes for system in systems]


def _3b() -> Cases:
    return _cases(["horizon", "horizon, SFT", "resident, compiled"], "qwen2.5-3b", 64 * K)


def _7b() -> Cases:
    streamed = _cases(["horizon"], "qwen2.5-7b", 64 * K, host_threads=[8, 12, 16])
    none_resident = _cases(["horizon"], "qwen2.5-7b", 64 * K, options={"resident_blocks": 0})
    return streamed + none_resident + _cases(["horizon"], "qwen2.5-7b", 64 * K, optimizer={"moments": "bfloat16"})


def _resident() -> Cases:
    return _cases([name for name in SYSTEMS if "resident" in name], "qwen2.5-7b", 64 * K)


def _peers() -> Cases:
    systems = ["horizon", "resident, compiled", "FSDP2 CPU offload, compiled", "ZeRO-3 offload"]
    return _cases(systems, "qwen2.5-3b", 64 * K)


def _depth() -> Cases:
    cases = []
    for layers in (28, 60, 120, 180):  # without resident blocks, or a shallow model would be resident as a whole
        options = {"precision": "bf16", "resident_blocks": 0}
        cases += _cases(["horizon"], f"1.5b wide, {layers} blocks", 64 * K, model=wider(1, layers), options=options)
    return cases


def _width() -> Cases:
    cases = []
    for times, layers in ((1, 28), (2, 20), (3, 10), (4, 5)):  # depths at which every peer has room
        name = f"1.5b, {times} times as wide, {layers} blocks"
        systems = ["horizon", "FSDP2 CPU offload, compiled", "ZeRO-3 offload"]
        cases += _cases(systems, name, 32 * K, model=wider(times, layers))
    return cases


def _tokens() -> Cases:
    return [case for tokens in (4, 8, 16, 32, 64, 128) for case in _cases(["horizon"], "qwen2.5-7b", tokens * K)]


def _long() -> Cases:
    return _cases(["horizon"], "llama-3.1-8b", 128 * K, rows=1, length=128 * K, options={"mlp_chunk_tokens": 16 * K})


def _moe() -> Cases:
    return _cases(["horizon", "resident"], "qwen3-30b-a3b, 8 blocks", 64 * K)


def _toys() -> Cases:
    """Return one case of each system, and our other kinds of cases, to try this benchmark."""
    others = ["resident", "FSDP2 CPU offload, compiled", "ZeRO-3 offload"]
    return _7b()[:1] + _cases(others, "qwen2.5-3b", 64 * K) + _long() + _moe()[:1]


SUITES: dict[str, Callable[[], Cases]] = {
    "3b": _3b,  # ours, the steps of a run, and a model that is resident on the device
    "7b": _7b,  # ours with several numbers of host threads, without resident blocks, and with smaller moments
    "resident": _resident,  # 7B, resident on the device
    "peers": _peers,  # 3B against other offloaders
    "depth": _depth,
    "width": _width,
    "tokens": _tokens,
    "long": _long,  # one row of 128k tokens
    "moe": _moe,
    "toys": _toys,
}


def make_case(settings: dict[str, Any], device: str, steps: int) -> Case:
    """Return a case for a device; on a CPU, a toy of it."""
    if torch.device(device).type == "cpu":
        options = settings.get("options", {})
        options = options | {name: 16 for name in ("mlp_chunk_tokens",) if name in options}
        tiny = {"model": toy(settings["model"]), "rows": min(4, settings["rows"]), "length": 32, "options": options}
        settings = settings | tiny | {"rows_at_once": min(2, tiny["rows"])}
    return Case(device=device, steps=steps, **settings)


def label(case: Case) -> str:
    """Return the name of the system, with the options that are not its defaults."""
    changes = case.options | case.optimizer
    return ", ".join([case.system, *(f"{name}={value}" for name, value in changes.items())])


# One case, in a process of its own


def work(case: Case, trace_file: str | None) -> Iterator[dict[str, Any]]:
    """Train a few steps and measure them. Yield the result, and again whenever more is known."""
    device = case.torch_device
    on_gpu = device.type == "cuda"
    vocabulary = case.model["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    with HostMemory() as memory:
        system = SYSTEMS[case.system](case)
        losses = []

        def timed(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                ids = torch.randint(0, vocabulary, (case.rows, case.length), generator=generator)
                start = time.perf_counter()
                losses.append(system.step(ids))
                if on_gpu:
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - start)
            return seconds

        first = timed(1)
        if on_gpu:  # leave out memory of compilation and tuning
            torch.cuda.reset_peak_memory_stats(device)
        timed(WARMUP - 1)
        meter, began = open_meter(device), time.perf_counter()
        result: dict[str, Any] = {"seconds": timed(case.steps), "first": first[0]}
        energy = meter.read()
        result |= {"joules": (energy.host, energy.device), "joules_seconds": time.perf_counter() - began}
        result["device_peak"] = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        result |= {"losses": [loss.item() for loss in losses], "host_peak": memory.peak}
        yield result
        if case.is_ours:
            result |= _of_horizon(system, torch.randint(0, vocabulary, (case.rows, case.length)), trace_file)
            yield result
            result["by_threads"] = {}
            for number in case.host_threads:
                _use_host_threads(system, number)
                timed(1)
                result["by_threads"][number] = statistics.median(timed(case.steps))
                yield result
        system.finish()


def _use_host_threads(system: System, number: int) -> None:
    """Let other threads do the updates from now on; the present ones end when their pool is collected."""
    system.finish()
    device = system.model._horizon.engine.device
    device._host_threads = number
    device._pools.pop(Stream.HOST, None)


def _of_horizon(system: System, ids: torch.Tensor, trace_file: str | None) -> dict[str, Any]:
    """Return figures that only our engine has: its planned peak, its choices, and the causes of waiting."""
    streaming = system.model._horizon
    engine, plan = streaming.engine, streaming.planner.plan
    system.finish()
    engine.device.trace = Trace()
    for _ in range(TRACED):
        system.step(ids)
    system.finish()
    trace, engine.device.trace = engine.device.trace, None
    if trace_file:
        trace.write(Path(trace_file))
    waited = {cause: seconds / TRACED for cause, seconds in exposed_seconds(trace.spans).items()}
    residency = engine.residency
    chosen = {
        "resident graphs": residency.graphs, "resident blocks": residency.weights, "activation checkpoints on the device": residency.boundaries,
        "tokens of logits at once": engine.options.head_chunk_tokens, "compiled": engine.options.compile,
    }  # fmt: skip
    return {
        "unregistered": engine.device.registration_error if isinstance(engine.device, CudaDevice) else None,
        "waited": waited,
        "chosen": chosen,
        "planned": plan.peak if plan is not None else None,
    }


class HostMemory:
    """A context manager that measures the peak of host memory beyond what was in use before.

    It counts the whole machine, because page-locked memory is not always attributed to its process.
    """

    def __enter__(self) -> "HostMemory":
        self._over, self.peak = threading.Event(), 0
        self._before = _used_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.peak = max(self.peak, _used_bytes() - self._before)


def _used_bytes() -> int:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total - memory.available  # both read now: the memory of a virtual machine may grow


# All cases


def measure(case: Case, timeout: float, trace_dir: Path | None) -> dict[str, Any]:
    """Measure a case in a process. Retry a peer that runs out of device memory with half as many rows at once."""
    trace_file = None
    if trace_dir is not None and case.is_ours:
        trace_dir.mkdir(parents=True, exist_ok=True)
        name = f"{case.name} {case.tokens / K:g}k {label(case)}"
        trace_file = str(trace_dir / f"{re.sub('[^a-zA-Z0-9.]+', '-', name)}.json")
    command = [sys.executable, __file__, "--worker", json.dumps([dataclasses.asdict(case), trace_file])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=os.environ | ALLOCATOR)
    except subprocess.TimeoutExpired as stopped:
        known = _last_result((stopped.stdout or b"").decode(), case)  # it prints what it knows so far
        return known or {"error": f"not done in {timeout:.0f} s"}
    if done.returncode == OUT_OF_MEMORY:
        if case.is_ours or case.rows_at_once == 1:
            return {"error": "out of device memory", "expected": not case.is_ours}
        return measure(dataclasses.replace(case, rows_at_once=case.rows_at_once // 2), timeout, trace_dir)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    return _last_result(done.stdout, case)


def _last_result(output: str, case: Case) -> dict[str, Any]:
    """Return the last result that a worker has printed as a whole line; empty if there is none."""
    whole = [line for line in output.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
    return json.loads(whole[-1]) | {"rows_at_once": case.rows_at_once} if whole else {}


def report(
    results: list[tuple[Case, dict[str, Any]]], ceilings: dict[str, float], rest: Energy, arguments: argparse.Namespace
) -> str:
    """Return the text of the result file."""
    device, suites = torch.device(arguments.device), " ".join(arguments.suites)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (toys: no figure means anything)"
    rates = ", ".join(
        f"{name.replace('_', ' ')} {rate / 1e9:.3g}" for name, rate in ceilings.items() if "matmul" not in name
    )
    products = ", ".join(f"{rate / 1e12:.3g}" for name, rate in ceilings.items() if "matmul" in name)
    lines = [
        f"# Training on an accelerator: {suites}",
        "",
        f"{date.today().isoformat()}, {where}; host {processor()}, {os.cpu_count()} cores. "
        f"{versions('torch', 'transformers', 'numba', 'deepspeed')}{_driver(device)}.",
        "",
        f"Command: `python3 benchmarks/gpu.py {suites} --device {arguments.device} --steps {arguments.steps}`",
        "",
        f"Measured in this run. A large bf16 product, alone and with concurrent copies: {products} TFLOP/s. GB/s: {rates} "
        "(copies of page-locked memory that CUDA allocated or, like ours, registered; both directions together; host: read and written in place by all cores).",
        "",
        f"Each row is a process: {WARMUP} steps to warm up, then the median of {arguments.steps}. Operations are the model's: "
        "6·N·T without the embedding lookup, with the experts of each token, and causal attention. Peak: the "
        "measured product. Token ids are uniformly random, so our embedding moves the most rows. Ours compiles blocks. J/token: energy beyond "
        f"that of the machine at rest ({_watts(rest)}), of processors / GPU, where counters can be read.",
        "",
        "| model | tokens a step | system | s/step (min to max) | tokens/s | of resident | model TFLOP/s | of peak | device GiB, planned | device GiB, peak "
        "| host GiB | J/token | device waited for copy in / update / copy out / host |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ceiling = _ceilings_by_step(results)
    for case, result in results:
        lines.append(_row(case, result, ceilings["matmul"], ceiling.get((case.name, case.tokens)), rest))
    lines += ["", *_choices(results)]
    return "\n".join(lines) + "\n"


def _watts(rest: Energy) -> str:
    known = {"processors": rest.host, "GPU": rest.device}
    return ", ".join(f"{name} {watts:.0f} W" for name, watts in known.items() if watts is not None) or "unknown"


def _row(case: Case, result: dict[str, Any], peak: float, ceiling: float | None, rest: Energy) -> str:
    batch = f"{case.tokens / K:g}k ({case.rows} x {case.length})"
    if "error" in result:
        return f"| {case.name} | {batch} | {label(case)} | {result['error'].replace('|', '/')} " + "| " * 9 + "|"
    seconds = statistics.median(result["seconds"])
    rate = case.tokens / seconds
    flops = model_flops(make_config(case.model, case.length), case.tokens, case.length) / seconds
    system = label(case) if case.is_ours else f"{case.system}, {result['rows_at_once']} rows at once"
    waited = result.get("waited")
    waits = (
        " / ".join(f"{waited[c] / seconds:.1%}" for c in ("copy_in", "update", "copy_out", "host")) if waited else ""
    )
    used = Energy(*result["joules"])
    joules = joules_per_token(used, result["joules_seconds"], rest, case.tokens * len(result["seconds"]))
    planned, device_peak = (
        f"{num_bytes / GIB:.3g}" if num_bytes else "" for num_bytes in (result.get("planned"), result["device_peak"])
    )
    return (
        f"| {case.name} | {batch} | {system} | {seconds:.3f} ({min(result['seconds']):.3f} to {max(result['seconds']):.3f}) "
        f"| {rate:,.0f} | {f'{rate / ceiling:.2f}' if ceiling else ''} | {flops / 1e12:.3g} | {flops / peak:.2g} | {planned} "
        f"| {device_peak} | {result['host_peak'] / GIB:.3g} | {joules} | {waits} |"
    )


def _ceilings_by_step(results: list[tuple[Case, dict[str, Any]]]) -> dict[tuple[str, int], float]:
    """Return the tokens per second of the fastest recomputing resident model, by model and tokens per step."""
    found: dict[tuple[str, int], float] = {}
    for case, result in results:
        if case.system in ("resident", "resident, compiled") and "error" not in result:
            key = (case.name, case.tokens)
            found[key] = max(found.get(key, 0.0), case.tokens / statistics.median(result["seconds"]))
    return found


def _choices(results: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    """Return a line per case: its parameters, the choices of our engine, and the losses, which show that it trains."""
    lines = []
    for case, result in results:
        if "error" in result:
            continue
        total, active = count_parameters(make_config(case.model, case.length))
        chosen = "; ".join(f"{name}: {value}" for name, value in result.get("chosen", {}).items())
        losses = result["losses"]
        lines.append(
            f"- {case.name}, {case.tokens / K:g}k, {label(case)}: {total / 1e9:.2f}B parameters, {active / 1e9:.2f}B a token; first step "
            f"{result['first']:.1f} s; loss {losses[0]:.3f} to {losses[-1]:.3f}{'; ' + chosen if chosen else ''}{_by_threads(result)}"
            f"{'; not page-locked: ' + result['unregistered'] if result.get('unregistered') else ''}"
        )
    return lines


def _by_threads(result: dict[str, Any]) -> str:
    found = ", ".join(f"{seconds:.3f} with {number}" for number, seconds in result.get("by_threads", {}).items())
    return f"; s/step by number of host threads: {found}" if found else ""


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True)
    return f", CUDA {torch.version.cuda}, driver {found.stdout.split()[0]}" if found.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each case")
    parser.add_argument("--systems", help="run only these, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of all cases")
    parser.add_argument("--output", type=Path, help="Markdown file, rewritten after each case")
    parser.add_argument("--trace-dir", type=Path, help="folder for the traces of each case")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.suites = arguments.suites or ["3b"]
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    if arguments.worker:
        settings, trace_file = json.loads(arguments.worker)
        try:
            for result in work(Case(**settings), trace_file):
                print(json.dumps(result), flush=True)
        except torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
            sys.exit(OUT_OF_MEMORY)
        return

    began = time.monotonic()
    rest = watts_at_rest(torch.device(arguments.device), seconds=5)
    command = [sys.executable, str(Path(__file__).with_name("gpu_ceilings.py")), arguments.device]
    ceilings = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    results: list[tuple[Case, dict[str, Any]]] = []
    for settings in (settings for suite in arguments.suites for settings in SUITES[suite]()):
        case = make_case(settings, arguments.device, arguments.steps)
        if arguments.systems and case.system not in arguments.systems.split(";"):
            continue
        left = 60 * arguments.minutes - (time.monotonic() - began)
        if case.system.startswith("ZeRO-3") and importlib.util.find_spec("deepspeed") is None:
            result = {"error": "deepspeed is not installed", "expected": True}
        elif left <= 0:
            result = {"error": "not started: out of time"}
        else:
            result = measure(case, left, arguments.trace_dir)
        results.append((case, result))
        brief = result.get("error") or f"{statistics.median(result['seconds']):.3f} s/step"
        print(f"{case.name}, {case.tokens / K:g}k tokens, {label(case)}: {brief}", flush=True)
        text = report(results, ceilings, rest, arguments)
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(text)
    print(text)
    if any("error" in result and not result.get("expected") for _, result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
