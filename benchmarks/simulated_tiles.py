"""Simulate steps of large mixtures whose experts are streamed in tiles, on machines that we do not have. Nothing is measured.

python benchmarks/simulated_tiles.py [--output FILE.md]
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from horizon_lm.common.quantities import counted, format_bytes, parse_bytes
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.runs.admission.inputs import open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config

LORA = {"use_peft": True, "lora_target_modules": r".*attn\.\w*proj\w*"}
FULL = {"moments": "bfloat16"}
LENGTH, ROWS = 4096, (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Case:
    """A model, its settings, and a machine with this much host memory."""

    model: str
    trained: str
    settings: Mapping[str, Any]
    profile: str
    memory: str


CASES = [
    Case("DeepSeek-V3", "LoRA on FP8", LORA, "rtx-4090", "768GB"),
    Case("Kimi-K2-Instruct", "LoRA on FP8", LORA, "rtx-4090-server", "1.2TB"),
    Case("Kimi-K2-Thinking", "LoRA on INT4", LORA, "rtx-4090", "768GB"),
    Case("Qwen3-235B-A22B", "all weights, moments in bf16", FULL, "rtx-4090-server", "3TB"),
    Case("Qwen3-235B-A22B", "all weights, moments in bf16", FULL, "h200", "3TB"),
    Case("Qwen3-30B-A3B", "all weights", {}, "rtx-4090", "512GB"),
]


def planned(case: Case, tile: str | None) -> Plan:
    """Return the plan with the largest batch that fits, or with the smallest if none does."""
    source = None
    for rows in ROWS:
        run = plan_config(
            model_name_or_path=case.model, max_length=LENGTH, per_device_train_batch_size=rows, device="cuda", expert_tile=tile, **case.settings,
        )  # fmt: skip
        source = source or open_source(run)
        machine = other_machine(find_profile(case.profile), parse_bytes(case.memory))
        # Without its time, which takes longer than the bytes.
        if plan_run(run, source, machine, priced=False).fits or rows == ROWS[-1]:
            return plan_run(run, source, machine)
    raise AssertionError


def row(case: Case, tile: str | None) -> str:
    plan = planned(case, tile)
    settings, time = plan.step.settings, plan.time
    blocks = "whole" if settings.expert_tile is None else f"tiles of {settings.expert_tile}"
    start = (
        f"| {case.model} | {case.trained} | {case.profile}, {case.memory} | {blocks} | {format_bytes(plan.host.bytes)} | "
        f"{format_bytes(plan.device.bytes)} | "
    )
    lacking = [f"{place}: {format_bytes(budget.deficit)} missing" for place, budget in plan.lacking.items()]
    if lacking or time is None:
        return f"{start}{'; '.join(lacking)} | - | - | - |"
    exposed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in time.exposed_seconds.items() if seconds > 0.05)
    return (
        f"{start}{counted(settings.rows, 'row')} in parts of {settings.slices[0]} | {time.seconds:.1f} | "
        f"{time.tokens_per_second:,.0f} | {time.limited_by}; computes {time.busy['compute']:.0%} of the time, exposed: {exposed or 'nothing'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = [
        "# Simulated, nothing measured: mixtures whose experts are streamed in tiles", "",
        f"{date.today().isoformat()}. What `horizon-lm plan` says of rows of {LENGTH:,} tokens, with whole blocks and with `expert_tile: auto`, for the largest batch of "
        f"{', '.join(map(str, ROWS))} rows that fits. LoRA has rank 16 on the attention; the published weights stay as they are. "
        "`docs/field-check.md` says how far such figures are to be trusted; on GPUs other than 9.x and 10.x, experts are multiplied one by one, which is not simulated.", "",
        "Command: `python benchmarks/simulated_tiles.py`", "",
        "| model | trains | machine | blocks | host memory | device memory | batch | step, s | tokens/s | held by |", "|" + "---|" * 10,
    ]  # fmt: skip
    for case in CASES:
        for tile in (None, "auto"):
            lines.append(row(case, tile))
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
