"""The kernels of one step, summed by family, from torch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# The first family of which a part is in the name of a kernel, or on a CPU of an operation.
FAMILIES: dict[str, str] = {
    "link": r"memcpy (htod|dtoh)",
    "softmax/nll": r"softmax|nll|cross_entropy",
    "attention": r"flash|fmha|attention|sdpa|mha_",
    "triton": r"^triton_",
    "gemm": r"gemm|nvjet|cutlass|xmma|cublas|splitk|wgmma|aten::(add|b|sparse_|_scaled_|_grouped_)?mm",
    "copy": r"memcpy|memset|copy",
}
COLUMNS = (*FAMILIES, "other")
_NAMED = 5  # kernels of no family that are named


def family(name: str) -> str:
    """Return the family of a kernel or an operation."""
    return next((each for each, pattern in FAMILIES.items() if re.search(pattern, name.lower())), "other")


def profile_step(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run a step under the profiler: the kernels of a GPU alone, or the operations of a CPU.

    Args:
        step: runs a step to its end.
        device: where it computes.

    Returns:
        ``wall``: seconds of the step. ``families``: seconds of kernels by family; those of several streams at once are all counted, and
        ``link``, the copies between host and device, run beside the others. ``kernels``: their number. ``other``: the longest
        kernels of no family, in seconds.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - began
    names = [
        (each.key, each.count, each.self_device_time_total if on_gpu else each.self_cpu_time_total)
        for each in profiler.key_averages()
        if not getattr(each, "is_user_annotation", False)  # which spans kernels that are counted themselves
    ]
    return {"wall": wall} | sums(names)


def sums(kernels: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Return what `profile_step` returns of kernels: names, numbers and microseconds."""
    seconds: Counter[str] = Counter(dict.fromkeys(COLUMNS, 0.0))
    count, others = 0, Counter[str]()
    for name, times, microseconds in kernels:
        if microseconds <= 0:  # the call that has launched a kernel
            continue
        seconds[family(name)] += 1e-6 * microseconds
        count += times
        if family(name) == "other":
            others[name[:80]] += 1e-6 * microseconds
    return {"families": dict(seconds), "kernels": count, "other": dict(others.most_common(_NAMED))}


def table(profiles: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table with a row for each profiled step, by label."""
    if not profiles:
        return []
    lines = [
        "Kernels of one step under torch's profiler, in seconds (and of the step's wall time). `link` is copies between host and device, "
        "which run beside the others; a family's kernels on several streams are all counted.",
        "",
        f"| step | wall | {' | '.join(COLUMNS)} | kernels |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for label, found in profiles.items():
        cells = [f"{found['families'][each]:.3f} ({found['families'][each] / found['wall']:.1%})" for each in COLUMNS]
        lines.append(f"| {label} | {found['wall']:.3f} | {' | '.join(cells)} | {found['kernels']:,} |")
    named = {name: seconds for found in profiles.values() for name, seconds in found["other"].items()}
    longest = sorted(named.items(), key=lambda item: -item[1])[:_NAMED]
    if longest:
        others = "; ".join(f"`{name.replace('|', '/')}` {seconds:.3f} s" for name, seconds in longest)
        lines += ["", f"The longest of no family: {others}."]
    return [*lines, ""]
