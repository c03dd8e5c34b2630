"""The result file of gpu.py."""

import argparse
import os
import statistics
import subprocess
from datetime import date
from typing import Any

import torch
from gpu_cases import NO_OPTIMIZER, Case, K, label
from gpu_energy import joules_per_token
from gpu_kernels import table
from gpu_memory import describe as describe_memory
from gpu_models import count_parameters, make_config, model_flops
from gpu_products import describe as describe_product
from gpu_worker import gain
from peers_cpu import processor, versions

from horizon_lm.runs.training.energy import Energy

GIB = 2**30
_COLUMNS = (
    "model", "tokens a step", "system", "s/step (min to max)", "planned s/step", "tokens/s", "of the fastest resident", "model TFLOP/s", "of the product",
    "of the data sheet", "MHz, W", "device GiB, planned", "device GiB, peak", "host GiB", "J/token", "device waited for copy in / update / copy out / host",
)  # fmt: skip
Results = list[tuple[Case, dict[str, Any]]]


def report(results: Results, ceilings: dict[str, Any], rest: Energy, arguments: argparse.Namespace) -> str:
    """Return the text of the result file.

    Args:
        results: the cases that were measured, and what was found.
        ceilings: as `gpu_ceilings.py` writes them.
        rest: watts at rest.
        arguments: of the command.
    """
    device, suites = torch.device(arguments.device), " ".join(arguments.suites)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (toys: no figure means anything)"
    sheet = ceilings["data_sheet"]
    rates = ", ".join(
        f"{name.replace('_', ' ')} {rate / 1e9:.3g}"
        for name, rate in ceilings.items()
        if isinstance(rate, float) and "matmul" not in name and name != "data_sheet"
    )
    products = "; ".join(describe_product(name, found, sheet) for name, found in ceilings["products"].items())
    lines = [
        f"# Training on an accelerator: {suites}", "",
        f"{date.today().isoformat()}, {where}; host {processor()}, {os.cpu_count()} cores. "
        f"{versions('torch', 'transformers', 'numba', 'deepspeed')}{_driver(device)}.", "",
        f"Command: `python3 benchmarks/gpu.py {suites} --device {arguments.device} --steps {arguments.steps}`", "",
        f"Products by events, the faster of which is the basis of all shares: {products}. GB/s: {rates} "
        "(copies of page-locked memory that CUDA allocated or, like ours, registered; both directions together; host: read and written in place by all cores).",
        "",
        f"Each row is a process: some steps to warm up, then the median of {arguments.steps}, or of as many as are named. Operations are the model's: "
        "6·N·T without the embedding lookup, with the experts of each token, and causal attention; none that are recomputed. Token ids are uniformly "
        "random, so our embedding moves the most rows. Ours compiles blocks, and takes the micro-batch of its plan. J/token: energy beyond "
        f"that of the machine at rest ({_watts(rest)}), of processors / GPU, where counters can be read.", "",
        f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|",
    ]  # fmt: skip
    fastest = _fastest_resident(results)
    lines += [_row(case, result, ceilings, fastest.get((case.name, case.tokens)), rest) for case, result in results]
    measured = [(case, result) for case, result in results if "error" not in result]
    lines += ["", *_choices(measured), ""]
    lines += table({f"{case.name}, {label(case)}": found["profile"] for case, found in measured if "profile" in found})
    for case, found in measured:
        lines += [f"Host memory of {case.name}, {label(case)}:", ""]
        lines += [
            *describe_memory(found["memory"], found.get("plan", {}).get("host", {}), found.get("counted", {})),
            "",
        ]
    return "\n".join(lines) + "\n"


def _watts(rest: Energy) -> str:
    known = {"processors": rest.host, "GPU": rest.device}
    return ", ".join(f"{name} {watts:.0f} W" for name, watts in known.items() if watts is not None) or "unknown"


def _row(case: Case, result: dict[str, Any], ceilings: dict[str, Any], fastest: float | None, rest: Energy) -> str:
    batch = f"{case.tokens / K:g}k ({case.rows} x {case.length})"
    if "error" in result:
        cells = [case.name, batch, label(case), result["error"].replace("|", "/")]
        return f"| {' | '.join(cells + [''] * (len(_COLUMNS) - len(cells)))} |"
    times, sheet = result["seconds"], ceilings["data_sheet"]
    seconds = statistics.median(times)
    rate = case.tokens / seconds
    flops = model_flops(make_config(case.model, case.length), case.tokens, case.length) / seconds
    plan, waited, sensors = result.get("plan", {}), result.get("waited"), result.get("sensors", {})
    cells = [
        case.name, batch, label(case) if case.is_ours else f"{label(case)}, {result['rows_at_once']} rows at once",
        f"{seconds:.3f} ({min(times):.3f} to {max(times):.3f})", f"{plan['seconds']:.3f}" if "seconds" in plan else "", f"{rate:,.0f}",
        f"{rate / fastest:.2f}" if fastest else "", f"{flops / 1e12:.3g}", f"{flops / ceilings['matmul']:.2g}", f"{flops / sheet:.2g}" if sheet else "",
        f"{sensors['mhz']:.0f}, {sensors['watts']:.0f}" if {"mhz", "watts"} <= set(sensors) else "",
        *(f"{num_bytes / GIB:.3g}" if num_bytes else "" for num_bytes in (result.get("planned"), result["device_peak"])),
        f"{result['host_peak'] / GIB:.3g}",
        joules_per_token(Energy(*result["joules"]), result["joules_seconds"], rest, case.tokens * len(times)),
        " / ".join(f"{waited[c] / seconds:.1%}" for c in ("copy_in", "update", "copy_out", "host")) if waited else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _fastest_resident(results: Results) -> dict[tuple[str, int], float]:
    """Return the tokens per second of the fastest resident model, by model and tokens per step. One without an optimizer counts only
    where no other one was measured.
    """
    found: dict[tuple[str, int], dict[bool, float]] = {}
    for case, result in results:
        if case.system.startswith("resident") and "error" not in result:
            trains = case.system != NO_OPTIMIZER
            rates = found.setdefault((case.name, case.tokens), {})
            rates[trains] = max(rates.get(trains, 0.0), case.tokens / statistics.median(result["seconds"]))
    return {key: rates.get(True, rates.get(False, 0.0)) for key, rates in found.items()}


def _choices(results: Results) -> list[str]:
    """Return a line per case: its parameters, the choices of our engine beside those planned, and the losses, which show that it trains."""
    lines = []
    for case, result in results:
        total, active = count_parameters(make_config(case.model, case.length))
        losses = result["losses"]
        parts = [
            f"{total / 1e9:.2f}B parameters, {active / 1e9:.2f}B a token", f"first step {result['first']:.1f} s", f"loss {losses[0]:.3f} to {losses[-1]:.3f}",
            *(f"{name}: {_beside(value, result.get('plan', {}).get(name))}" for name, value in result.get("chosen", {}).items()),
        ]  # fmt: skip
        if result["device_reserved"]:
            parts.append(f"torch reserved {result['device_reserved'] / GIB:.1f} GiB")
        if "tails" in result:
            parts.append(gain(result["tails"]))
        if result.get("unregistered"):
            parts.append(f"not page-locked: {result['unregistered']}")
        parts += [f"**{result[how]}**" for how in ("incomplete", "stopped") if how in result]
        lines.append(f"- {case.name}, {case.tokens / K:g}k, {label(case)}: {'; '.join(parts)}")
    return lines


def _beside(value: Any, planned: Any) -> str:
    """Return a choice as text, with the planned one if it is another."""
    return str(value) if planned is None or planned == value else f"{value} (**planned {planned}**)"


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True)
    return f", CUDA {torch.version.cuda}, driver {found.stdout.split()[0]}" if found.returncode == 0 else ""
