"""Simulate our step on models and machines that we do not have: bytes, whether they fit, and seconds. Nothing is measured.

python benchmarks/simulated_models.py [--output FILE.md]
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from horizon_lm.cli.largest_models import MODES
from horizon_lm.common.quantities import format_bytes
from horizon_lm.model.known_models import find_known, known_config
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.request import Budget
from horizon_lm.runs.admission.inputs import RowShape, Source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.runs.config.load import parse_overrides

LENGTH = 4096
ENOUGH = 10**15  # bytes of host memory, to simulate a step that may not fit
TIMED = ("fp32_master", "bf16, 8-bit moments, in backward")


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    Attributes:
        title: heading of the section.
        model: name of a published model.
        changes: changes of its config, for a hypothetical model.
        profile: profile of the machine.
        host_memory: bytes; None for as many as needed.
        tokens: tokens of the steps to simulate.
    """

    title: str
    model: str
    profile: str
    host_memory: int | None
    tokens: Sequence[int]
    changes: Mapping[str, int]


def case(title: str, model: str, profile: str, host_memory: int | None, tokens: Sequence[int], **changes: int) -> Case:
    return Case(title, model, profile, host_memory, tokens, changes)


K = 1024
CASES = [
    case("Llama-3.1-405B on GH200", "Llama-3.1-405B", "gh200", 480 * 10**9, (16 * K, 64 * K, 256 * K)),
    case("DeepSeek-V3, 671B, on H200 with 2 TB", "DeepSeek-V3", "h200", 2 * 10**12, (32 * K, 64 * K, 256 * K)),
    case(
        "A dense trillion on H200", "Llama-3.1-405B", "h200", None, (32 * K, 64 * K, 256 * K),
        num_hidden_layers=136, hidden_size=24576, intermediate_size=81920, num_attention_heads=192,
    ),
    case(
        "A trillion in experts on H200", "DeepSeek-V3", "h200", None, (32 * K, 64 * K, 256 * K), num_hidden_layers=91,
    ),
]  # fmt: skip


@cache
def _source(name: str, changes: tuple[tuple[str, Any], ...]) -> Source:
    known = find_known(name)
    assert known is not None
    config = known_config(replace(known, config={**known.config, **dict(changes)}))
    return Source(ModelSource(config, name), 2, is_local=False)


def source_of(name: str, **changes: Any) -> Source:
    """Return a known model with changes of its config."""
    return _source(name, tuple(changes.items()))


def plan_of(case: Case, mode: str, tokens: int, priced: bool = True) -> Plan:
    settings = parse_overrides(MODES[mode].split())
    run = plan_config(
        model_name_or_path=case.model, device="cuda", per_device_train_batch_size=tokens // LENGTH, max_length=LENGTH,
        **settings,
    )  # fmt: skip
    machine = other_machine(find_profile(case.profile), case.host_memory or ENOUGH)
    source = source_of(case.model, **case.changes)
    return plan_run(run, source, machine, rows=RowShape(LENGTH, LENGTH, masked=False), priced=priced)


def verdict(budget: Budget, is_limited: bool = True) -> str:
    if not is_limited:
        return "unlimited"
    return f"**{format_bytes(budget.deficit)} missing**" if budget.deficit else "fits"


def byte_lines(case: Case) -> Iterator[str]:
    yield "| mode | bytes per parameter | host | fits | device | fits |"
    yield "|---|---|---|---|---|---|"
    for mode in MODES:
        plan = plan_of(case, mode, case.tokens[0], priced=False)
        per_parameter = plan.host.bytes / plan.step.outline.layout.num_parameters
        yield (
            f"| {mode} | {per_parameter:.2f} | {format_bytes(plan.host.bytes)} "
            f"| {verdict(plan.host, case.host_memory is not None)} | {format_bytes(plan.device.bytes)} | {verdict(plan.device)} |"
        )


TIME_HEADER = """\
| tokens a step | mode | device | peak of the step on it | micro-batches | step, s | tokens/s | TFLOP/s | limited by | waiting for copies in, s | for updates \
| for copies out | saved if updates were free, s | busy: in | compute | out | host | loads overlapped from | updates overlapped from |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def time_lines(case: Case) -> Iterator[str]:
    yield TIME_HEADER
    for tokens in case.tokens:
        for mode in TIMED:
            yield _time_line(plan_of(case, mode, tokens), tokens, mode)


def _time_line(plan: Plan, tokens: int, mode: str) -> str:
    time, step = plan.time, plan.step
    assert time is not None
    waiting = " | ".join(f"{time.exposed_seconds[cause]:.2f}" for cause in ("copy_in", "update", "copy_out"))
    busy = " | ".join(f"{time.busy[stream]:.0%}" for stream in ("copy_in", "compute", "copy_out", "host"))
    hidden = " | ".join(f"{time.hidden_from_tokens[what] / K:.0f}k" for what in ("copy_in", "update"))
    return (
        f"| {tokens // K}k | {mode} | {verdict(plan.device)} | {format_bytes(device_use(step).total)} "
        f"| {len(step.settings.slices)} | {time.seconds:.1f} | {time.tokens_per_second:,.0f} | {time.model_tflops:.0f} "
        f"| {time.limited_by} | {waiting} | {time.exposed_update_seconds:.2f} | {busy} | {hidden} |"
    )


def case_lines(case: Case) -> Iterator[str]:
    outline = plan_of(case, TIMED[0], case.tokens[0], priced=False).step.outline
    memory = "unlimited host memory" if case.host_memory is None else f"{case.host_memory / 1e9:,.0f} GB of host memory"
    changes = ", ".join(f"{name} {value}" for name, value in case.changes.items())
    yield f"\n## {case.title}\n"
    yield (
        f"{outline.layout.num_parameters / 1e9:,.0f} billion parameters, {outline.active / 1e9:,.0f} of them active per token; "
        f"{outline.num_blocks} blocks, the largest with {format_bytes(2 * max(map(outline.layout.numel, outline.layout.blocks)))} of weights. "
        f"`{case.profile}` with {memory}." + (f" Hypothetical: {case.model} with {changes}." if changes else "")
    )
    yield f"\nBytes, for steps of {case.tokens[0] // K}k tokens:\n"
    yield from byte_lines(case)
    yield "\nSeconds, with enough memory of every kind:\n"
    yield from time_lines(case)


def introduction() -> Iterator[str]:
    yield "# Simulated, not measured: models and machines that we do not have\n"
    yield (
        f"{date.today().isoformat()}. Plans of `horizon-lm plan` for our schedule on published hardware figures (`planning/arithmetic/profiles`), rows of "
        f"{LENGTH:,} tokens, blocks compiled; k = 1024. `docs/field-check.md` says how far to trust such figures: "
        "those of Hopper GPUs are probably too fast by a fifth or more."
    )
    yield "\nCommand: `python benchmarks/simulated_models.py`"


NOTES = """
## Notes

- Host: weights, gradients, optimizer state, activation checkpoints that do not fit on the device, and the process. Device:
  includes the driver's context and a margin of 5%; the peak of a step does not.
- TFLOP/s: 6 x active parameters x tokens, and attention. Waiting: seconds of a step without computation, by the last cause. A
  copy that itself waited for an update counts as a copy, so *saved if updates were free* says more about updates. Busy: the
  fraction of the step in which a stream works; *host* is the optimizer.
- *Overlapped from*: tokens per step from which loads, or updates, take no longer than the concurrent computation. With
  experts a token needs few of the parameters that are moved, so both numbers are an order of magnitude larger.
- A step in several micro-batches accumulates gradients in an fp32 buffer of a block, which a step in one does not need. If a
  block takes a sixth of the device, steps in one micro-batch fit, and larger steps may not.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = "\n".join([*introduction(), *(line for case in CASES for line in case_lines(case)), NOTES.rstrip()]) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
