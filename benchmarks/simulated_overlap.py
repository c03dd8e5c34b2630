"""Simulate the time that the host optimizer adds to a step on two machines, from published figures. Nothing is measured.

A 7.6B model is planned for each machine, and its step is simulated with and without the cost of updates. The difference is
the exposed time of the optimizer.

    python benchmarks/simulated_overlap.py [--output FILE.md]
"""

import argparse
from datetime import date
from functools import cache
from pathlib import Path

from simulated_models import source_of

from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates, update_bytes
from horizon_lm.planning.arithmetic.step_time import StepTime
from horizon_lm.runs.admission.inputs import RowShape
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.schedule.ops import UPDATES
from horizon_lm.schedule.simulate import step_seconds

MODEL = "Qwen2.5-7B"
MACHINES = ("h200", "rtx-4090")  # profiles
TOKENS = (8 * 1024, 16 * 1024, 64 * 1024)
LENGTH = 1024
HIDDEN = 0.03  # a smaller fraction of the step counts as hidden
MODES = {"after the backward, clipped": False, "in the backward": True}


@cache
def simulated(machine: str, mode: str, tokens: int) -> tuple[Step, StepTime]:
    """Return a planned step with all activation checkpoints on the device and no resident blocks, and its time."""
    in_backward = MODES[mode]
    run = plan_config(
        model_name_or_path=MODEL, device="cuda", per_device_train_batch_size=tokens // LENGTH, max_length=LENGTH,
        activation_checkpoints="device", resident_blocks=0, update_in_backward=in_backward, max_grad_norm=0.0 if in_backward else 1.0,
    )  # fmt: skip
    plan = plan_run(
        run, source_of(MODEL), other_machine(find_profile(machine), None), rows=RowShape(LENGTH, LENGTH, masked=False)
    )
    assert plan.time is not None
    return plan.step, plan.time


def share(time: StepTime) -> float:
    return time.exposed_update_seconds / time.seconds


def first_hidden(machine: str, mode: str) -> int:
    """Return the fewest tokens, in whole rows, at which the simulated optimizer is hidden."""
    return next(t for t in range(LENGTH, 2**20, LENGTH) if share(simulated(machine, mode, t)[1]) < HIDDEN)


def updates_alone(machine: str, mode: str) -> float:
    """Return the simulated seconds of a step in which only updates cost time, to compare with plain arithmetic."""
    (step, _), hardware = simulated(machine, mode, TOKENS[0]), find_profile(machine)
    cost = StepCost(step, hardware)
    return step_seconds(step.passes(), lambda op: cost(op) if op.kind in UPDATES else 0.0, rates(hardware))


def step_lines(machine: str, mode: str) -> list[str]:
    """Return the lines of the main table, one for each number of tokens."""
    lines = []
    for tokens in TOKENS:
        _, time = simulated(machine, mode, tokens)
        verdict = "hidden" if share(time) < HIDDEN else "**NOT hidden**"
        lines.append(
            f"| {find_profile(machine).name} | {mode} | {tokens // 1024}k | {time.busy['compute'] * time.seconds:.2f} "
            f"| {time.seconds - time.exposed_update_seconds:.2f} | {time.seconds:.2f} | {time.exposed_update_seconds:.3f} "
            f"| {share(time):.1%} | {time.hidden_from_tokens['update'] / 1024:.1f}k | {verdict} |"
        )
    return lines


def check_line(machine: str, mode: str) -> str:
    """Return a line that compares formulas with the simulation."""
    (step, time), hardware = simulated(machine, mode, TOKENS[-1]), find_profile(machine)
    arithmetic = update_bytes(step.settings, hardware) * step.outline.layout.num_parameters / hardware.host_rate
    return (
        f"| {hardware.name} | {mode} | {arithmetic:.4f} | {updates_alone(machine, mode):.4f} "
        f"| {time.hidden_from_tokens['update'] / 1024:.1f}k | {first_hidden(machine, mode) / 1024:.1f}k |"
    )


def machine_line(machine: str) -> str:
    hardware = find_profile(machine)
    products = hardware.matmul["bfloat16"]
    return (
        f"- {hardware.name}: large products at {products / 1e12:.0f} TFLOP/s, link {hardware.link_in / 1e9:.0f} GB/s in and "
        f"{hardware.link_out / 1e9:.0f} out, host memory {hardware.host_rate / 1e9:.0f} GB/s: {products / hardware.host_rate:,.0f} "
        f"operations per byte. From: {hardware.sources['matmul']}; {hardware.sources['host_bandwidth']}."
    )


def introduction() -> list[str]:
    step, _ = simulated(MACHINES[0], next(iter(MODES)), TOKENS[0])
    parameters, moved = step.outline.layout.num_parameters, update_bytes(step.settings, find_profile(MACHINES[0]))
    return [
        "# Simulated, not measured: the time that the host optimizer adds to a step",
        "",
        f"{date.today().isoformat()}. Every figure here is a simulation of our schedule on published hardware figures (see `planning/arithmetic/profiles`). "
        "Nothing was measured on such machines; `docs/field-check.md` compares such figures with published ones.",
        "",
        f"Model: {MODEL}, {parameters:,} parameters, all trained, in {step.settings.precision}: an update moves {moved:.0f} "
        f"bytes of host memory per parameter, and up to {parameters * 14 / 1e9:.0f} GB of it hold weights, gradients and "
        f"optimizer state. Rows of {LENGTH} tokens, blocks compiled; activation checkpoints on the device, no resident blocks; k = 1024.",
        "",
        "Command: `python benchmarks/simulated_overlap.py`",
        "",
        *map(machine_line, MACHINES),
    ]


STEP_HEADER = """
| machine | updates | tokens a step | computation alone, s | step if updates were free, s | step, s \
| exposed optimizer, s | fraction of the step | threshold T | verdict |
|---|---|---|---|---|---|---|---|---|---|"""

STEP_NOTES = f"""
Exposed: the step minus the step if updates were free, both among many steps. Hidden: less than {HIDDEN:.0%} of the step.
Threshold T: tokens a step from which updates take no longer than the computation that hides them
(`StepTime.hidden_from_tokens`). It grows with the device's rate and falls as host memory gets faster.

Clipping needs all gradients first, so updates after the backward overlap only with the next forward. If a step is NOT
hidden, use more tokens per step, or update in the backward without clipping by the global norm.

## Checks
"""

CHECK_HEADER = """\
| machine | updates | updates alone, s: bytes / bandwidth | updates alone, simulated, s | threshold T \
| fewest tokens simulated as hidden |
|---|---|---|---|---|---|"""

CHECK_NOTES = """
T counts what transfers take of host memory meanwhile. The simulated threshold is earlier, because 3% may stay exposed, and the head
hides some; an update in the backward waits for its gradient.

Far above the threshold, updates without concurrent computation stay exposed: those of the embedding rows that the next
batch reads, and of one block. Rows are counted as if no token occurred twice in a step, which is the maximum.

Not simulated: latencies, the thread that issues operations (on CUDA it waits for an update before it issues later
operations, and updates the rows by itself; here they have the host's full bandwidth), other users of host memory, and
the time to land the embedding's gradients beyond that of the link."""


def report() -> str:
    """Return the text of the result file."""
    cases = [(machine, mode) for machine in MACHINES for mode in MODES]
    lines = [
        *introduction(),
        STEP_HEADER,
        *(line for case in cases for line in step_lines(*case)),
        STEP_NOTES,
        CHECK_HEADER,
        *(check_line(*case) for case in cases),
        CHECK_NOTES,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
