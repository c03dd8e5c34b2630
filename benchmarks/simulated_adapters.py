"""Simulate steps that train adapters on quantized weights, on machines that we do not have. Nothing is measured.

python benchmarks/simulated_adapters.py [--output FILE.md]
"""

import argparse
from datetime import date
from pathlib import Path

from horizon_lm.common.quantities import format_bytes, parse_bytes
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.runs.admission.inputs import open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config

ATTENTION = r".*attn\.\w*proj\w*"
MODELS = {  # settings of each model, and the host memory for it
    "gpt-oss-120b": ({}, "128GB"),
    "Llama-3.1-70B": ({"load_in_4bit": True}, "96GB"),
    "Qwen3-235B-A22B": ({"load_in_4bit": True}, "192GB"),
    "DeepSeek-V3": ({}, "768GB"),
}
PROFILES = ("rtx-4090", "rtx-5090", "h100", "h200", "gb10")
ROWS, LENGTH = 8, 4096


def planned(model: str, profile: str) -> Plan:
    settings, memory = MODELS[model]
    hardware = find_profile(profile)
    run = plan_config(
        model_name_or_path=model, use_peft=True, lora_target_modules=ATTENTION, max_length=LENGTH,
        per_device_train_batch_size=ROWS, device="cpu" if hardware.on_host else "cuda", **settings,
    )  # fmt: skip
    source = open_source(run)
    return plan_run(run, source, other_machine(hardware, parse_bytes(memory)))


def row(model: str, profile: str) -> str:
    plan = planned(model, profile)
    lacking = [f"{place}: {format_bytes(budget.deficit)} missing" for place, budget in plan.lacking.items()]
    start = f"| {model} | {profile} | {format_bytes(plan.host.bytes)} | {format_bytes(plan.device.bytes)} "
    if lacking or plan.time is None:
        return f"{start}| {'; '.join(lacking)} | - | - | - |"
    exposed = plan.time.exposed_seconds.get("copy_in", 0.0)
    return (
        f"{start}| fits | {plan.time.seconds:.1f} | {plan.time.tokens_per_second:,.0f} | {plan.time.limited_by}; copies in exposed "
        f"{exposed:.2f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = [
        "# Simulated, nothing measured: adapters on quantized weights", "",
        f"{date.today().isoformat()}. What `horizon-lm plan` says of {ROWS} rows of {LENGTH:,} tokens a step, LoRA of rank 16 on the attention. gpt-oss-120b has its "
        "published MXFP4 weights, DeepSeek-V3 its FP8, the others 4 bits (NF4). `docs/field-check.md` says how far such figures are to be trusted.", "",
        "Command: `python benchmarks/simulated_adapters.py`", "",
        "| model | machine | host memory | device memory | | step, s | tokens/s | bound by |", "|" + "---|" * 8,
        *(row(model, profile) for model in MODELS for profile in PROFILES),
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
