"""What the host optimizer adds to a step on two machines, simulated from published figures. Nothing is measured.

The schedule of a 7.6B model is priced with `horizon_lm.schedule.simulate`, once as it is and once with updates that cost
nothing; the difference is the time that the optimizer does not hide.

    python benchmarks/simulated_overlap.py [--output FILE.md]
"""

import argparse
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from horizon_lm.plan.hardware import (
    H200_SERVER,
    QWEN25_7B,
    RTX_4090_DESKTOP,
    SUSTAINED,
    UPDATE_BYTES,
    Hardware,
    Step,
    hiding_tokens,
)
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, UPDATES, Pass, Stream, block
from horizon_lm.schedule.simulate import step_seconds, without_updates

MACHINES = (H200_SERVER, RTX_4090_DESKTOP)
TOKENS = (8 * 1024, 16 * 1024, 64 * 1024)
LENGTH = 4096
PRECISION = "fp32_master"
HIDDEN = 0.03  # a smaller share of the step is called hidden
MODES = {"after the backward, clipped": False, "in the backward": True}


def passes_of_a_step(update_in_backward: bool) -> list[Pass]:
    """One training step in which everything is trained, as the engine builds it."""
    layout = build.Layout(QWEN25_7B.num_blocks, update_in_backward=update_in_backward)
    kept = range(layout.num_blocks)
    updated = [OUTER, *map(block, kept), HEAD]
    forward = build.forward(layout, keeps=kept, table_update=True, head_grads=True)
    backward = build.backward(layout, blocks=kept, trainable=[EMBED, *updated], head_grads=True)
    return [forward, backward, *([] if update_in_backward else [build.update(layout, updated)])]


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of a step: in all, if updates cost nothing, and if nothing but computation took time."""

    seconds: float
    free: float
    computation: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.free

    @property
    def share(self) -> float:
        return self.exposed / self.seconds


def simulate(hardware: Hardware, passes: list[Pass], tokens: int) -> Result:
    cost = Step(QWEN25_7B, tokens, LENGTH, PRECISION).cost(hardware)
    return Result(
        step_seconds(passes, cost, hardware.rates),
        step_seconds(passes, without_updates(cost), hardware.rates),
        sum(cost(op) for schedule in passes for op in schedule.ops if op.stream == Stream.COMPUTE),
    )


def first_hidden(hardware: Hardware, passes: list[Pass]) -> int:
    """The fewest tokens, in steps of 512, at which the simulated optimizer is hidden."""
    return next(t for t in range(512, 2**20, 512) if simulate(hardware, passes, t).share < HIDDEN)


def updates_alone(hardware: Hardware, passes: list[Pass]) -> float:
    """Simulated seconds of a step in which nothing but updates costs anything; arithmetic gives the same by itself."""
    cost = Step(QWEN25_7B, TOKENS[0], LENGTH, PRECISION).cost(hardware)
    return step_seconds(passes, lambda op: cost(op) if op.kind in UPDATES else 0.0, hardware.rates)


def step_lines(hardware: Hardware, mode: str) -> list[str]:
    """Lines of the main table, one for each number of tokens."""
    passes = passes_of_a_step(MODES[mode])
    threshold = hiding_tokens(hardware, QWEN25_7B, PRECISION, MODES[mode])
    lines = []
    for tokens in TOKENS:
        result = simulate(hardware, passes, tokens)
        verdict = "hidden" if result.share < HIDDEN else "**NOT hidden**"
        lines.append(
            f"| {hardware.name} | {mode} | {tokens // 1024}k | {result.computation:.2f} | {result.free:.2f} "
            f"| {result.seconds:.2f} | {result.exposed:.3f} | {result.share:.1%} | {threshold / 1024:.1f}k | {verdict} |"
        )
    return lines


def check_line(hardware: Hardware, mode: str) -> str:
    """Formulas beside what the simulation says."""
    passes = passes_of_a_step(MODES[mode])
    threshold = hiding_tokens(hardware, QWEN25_7B, PRECISION, MODES[mode])
    arithmetic = UPDATE_BYTES[PRECISION] * QWEN25_7B.num_parameters / hardware.host
    return (
        f"| {hardware.name} | {mode} | {arithmetic:.4f} | {updates_alone(hardware, passes):.4f} "
        f"| {threshold / 1024:.1f}k | {first_hidden(hardware, passes) / 1024:.1f}k |"
    )


def introduction() -> list[str]:
    parameters, update_bytes = QWEN25_7B.num_parameters, UPDATE_BYTES[PRECISION]
    machines = [
        f"- {hw.name}: {hw.flops / 1e12:.0f} TFLOP/s, link {hw.link / 1e9:.0f} GB/s each way, host memory "
        f"{hw.host / 1e9:.0f} GB/s. From: {hw.sources}."
        for hw in MACHINES
    ]
    return [
        "# Simulated, nothing measured: what the host optimizer adds to a step",
        "",
        f"{date.today().isoformat()}. Every figure here is a simulation of our schedule on published figures of hardware. "
        "Nothing was measured on such machines.",
        "",
        f"Model: Qwen2.5-7B's shape, {parameters:,} parameters, all trained, in {PRECISION}: an update moves {update_bytes} "
        f"bytes of host memory per parameter, and up to {parameters * 14 / 1e9:.0f} GB of it hold weights, gradients and "
        f"optimizer state. Sequences of {LENGTH} tokens; boundaries on the device; k = 1024.",
        "",
        "Command: `python benchmarks/simulated_overlap.py`",
        "",
        *machines,
        f"- Computation is assumed to sustain {SUSTAINED:.0%} of the peak on both. Thresholds grow in proportion to that rate, "
        "and fall as host memory gets faster. Operations for each byte of host memory: "
        + ", ".join(f"{hw.name} {hw.flops / hw.host:,.0f}" for hw in MACHINES)
        + ".",
    ]


STEP_HEADER = """
| machine | updates | tokens a step | computation alone, s | step if updates were free, s | step, s \
| exposed optimizer, s | share of the step | threshold T | verdict |
|---|---|---|---|---|---|---|---|---|---|"""

STEP_NOTES = f"""
Exposed: the step less the step if updates were free, both among many steps. Hidden: less than {HIDDEN:.0%} of the step.
Threshold T: tokens a step from which updates fit behind the computation that hides them (`plan.hardware.hiding_tokens`):
13·R/B, times all parameters over those that a token is multiplied with; a third of it when the backward hides them.

Clipping needs all gradients first, so updates after the backward can hide behind the next forward only. Where a step is
NOT hidden, take more tokens a step, or update in the backward if clipping by the global norm can be given up.

## Checks
"""

CHECK_HEADER = """\
| machine | updates | updates alone, s: bytes / bandwidth | updates alone, simulated, s | threshold T \
| fewest tokens simulated as hidden |
|---|---|---|---|---|---|"""

CHECK_NOTES = """
The simulated threshold differs from the formula's because it has more in it. Later: weights and gradients that travel
draw on host memory too. Earlier: 3% may stay exposed, and attention, which the formula leaves out, hides some.

Far above the threshold there stays exposed what nothing computes beside: the update of the table's rows that the next
batch reads, and that of one block. The rows are counted as if no token came twice in a step, the most they can be.

Left out: latencies, the thread that issues operations (on CUDA it waits for an update before it issues what comes after
it in the list, and updates the rows by itself; here they have the host's full bandwidth), other users of host memory, and
what landing the table's gradients takes beside the link."""


def report() -> str:
    """The result file."""
    cases = [(hardware, mode) for hardware in MACHINES for mode in MODES]
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
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
