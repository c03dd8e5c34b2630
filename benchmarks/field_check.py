"""Simulate MegaTrain's published settings with its schedule and with ours, and compare with its figures. Nothing is measured.

python benchmarks/field_check.py [--output FILE.md]    # docs/field-check.md
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import field_text as text
from field_cases import CASES, GH200, PEAK, Case, Ours, Simulated, desktop_memory, ours, split_memory, theirs
from field_schedule import most_rows

from horizon_lm.schedule.ops import Kind

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "field-check.md"
OFF = 0.25  # a larger relative error is marked
ONE_CORE = 10e9  # bytes per second that one core copies: assumed
DEPTHS = {28: 284, 42: 272, 56: 264, 84: 255, 132: 247, 180: 227}
ABLATED: dict[str, tuple[dict[str, object], float]] = {
    "full": ({}, 266.3),
    "no double buffering": ({"double_buffered": False}, 182.91),
    "no slab pool": ({"slab_pool": False}, 257.55),
    "block interval 1, 64 rows": ({"interval": 1, "rows": 64}, 240.45),
}
Ablated = dict[str, list[float]]
SPLIT, SHORT, LONG = "superchips with 120 GB each, 100 GB/s between them", "16 rows", "rows of 8,192 tokens"


def table(header: str, rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {header} |", "|---" * len(header.split(" | ")) + "|", *lines, ""]


def bold_if_off(ratio: float) -> str:
    return f"**{ratio:.2f}**" if abs(ratio - 1) > OFF else f"{ratio:.2f}"


def their_table(found: list[Simulated]) -> list[str]:
    header = "machine | model | rows | computing, s | optimizer, s | waiting, s | step, s | simulated, TFLOP/s | published | ratio"
    rows = [
        [
            each.case.machine, each.case.model, f"{each.step.settings.rows}{'' if each.case.rows else ' (assumed)'}",
            f"{each.time.computing:.2f}", f"{each.time.optimizer:.2f}", f"{each.time.waiting:.2f}",
            f"{each.time.seconds:.2f}", f"{each.tflops:.1f}", f"{each.case.published:g}", bold_if_off(each.ratio),
        ]
        for each in found
    ]  # fmt: skip
    return table(header, rows)


def required_table(found: list[Simulated]) -> list[str]:
    rows = [[each.case.name, f"x {each.computing_factor:.2f}", f"{each.executed_share:.0%}"] for each in found]
    return table("figure | factor on computing time | executed, of the peak", rows)


def variants() -> dict[tuple[str, str], Simulated]:
    """Return the cases with one changed assumption, by case and change."""
    found = {}
    for case in CASES:
        changed: dict[str, Case] = {}
        if case.machine == "GH200" and case.model != "7B":
            changed[SPLIT] = split_memory(case)
        if case.name == "GH200 32B":
            changed["32 rows"] = replace(case, rows=32)
        if case.machine == "A100 PCIe":
            changed |= {f"{rows} rows": replace(case, rows=rows) for rows in (16, 32, 64)}
        if case.machine == "RTX 3090":
            changed |= {LONG: replace(case, length=8192), "host memory of a desktop": desktop_memory(case)}
        found |= {(case.name, what): theirs(each) for what, each in changed.items()}
        if case.model == "14B":
            found[case.name, f"one core packs and lands, {ONE_CORE / 1e9:.0f} GB/s"] = theirs(case, ONE_CORE)
    return found


def variant_table(found: dict[tuple[str, str], Simulated]) -> list[str]:
    rows = [
        [name, what, f"{each.gib:.1f}", f"{each.tflops:.1f}", f"{each.ratio:.2f}"]
        for (name, what), each in found.items()
    ]
    return table("figure | changed assumption | device memory, GiB | simulated, TFLOP/s | ratio to published", rows)


def ablations() -> Ablated:
    """Return TFLOP/s by ablation: published, simulated with all cores packing, and with one."""
    case = next(case for case in CASES if case.name == "GH200 14B")
    return {
        what: [published, *(theirs(case, packing, **changes).tflops for packing in (None, ONE_CORE))]
        for what, (changes, published) in ABLATED.items()
    }


def ablation_table(found: Ablated) -> list[str]:
    header = "GH200 14B | published | all cores pack | one core packs | published, of full | all cores, of full | one core, of full"
    rows = [
        [what, *(f"{value:.1f}" for value in values), *(f"{loss:+.1%}" for loss in _losses(values, found["full"]))]
        for what, values in found.items()
    ]
    return table(header, rows)


def _losses(values: list[float], full: list[float]) -> list[float]:
    return [value / of_full - 1 for value, of_full in zip(values, full, strict=True)]


def depths() -> list[tuple[Simulated, Simulated, Ours]]:
    """Return for each depth their step, their step with split memory, and ours."""
    found = []
    for layers, published in DEPTHS.items():
        case = Case(GH200, "7B", None, published, layers=layers)
        case = replace(case, rows=min(158, most_rows(case.outline, GH200)))
        found.append((theirs(case), theirs(split_memory(case)), ours(case, case.rows)))
    return found


def depth_table(found: list[tuple[Simulated, Simulated, Ours]]) -> list[str]:
    rows = []
    for their, split, our in found:
        case, num_parameters = their.case, their.case.outline.layout.num_parameters
        rows.append([
            f"{case.layers}", f"{num_parameters / 1e9:.1f}", f"{12 * num_parameters / 1e9:.0f}", f"{case.rows}",
            f"{case.published}", f"{their.tflops:.1f}", bold_if_off(their.ratio), f"{split.ratio:.2f}",
            f"{case.tflops(their.step.tokens, our.planned):.1f}", our.precision, f"{our.plan.host.bytes / 1e9:.0f}",
        ])  # fmt: skip
    header = (
        "blocks | parameters, 1e9 | their bytes on the host, 1e9 | rows | published | theirs, simulated | ratio "
        "| ratio with split memory | ours | our precision | our bytes, 1e9"
    )
    last = found[-1][0].case
    fitting = [each for each in found if each[0].case is not last]
    sentences = text.depth_sentences(
        spread(their.ratio for their, _, _ in fitting), spread(split.ratio for _, split, _ in fitting),
        f"{last.layers}", f"{12 * last.outline.layout.num_parameters / 1e9:.0f}",
    )  # fmt: skip
    return [*table(header, rows), *text.wrapped(sentences)]


def our_table(pairs: list[tuple[Simulated, Ours]]) -> list[str]:
    rows = []
    for their, mine in pairs:
        case, tokens, settings = their.case, their.step.tokens, mine.plan.step.settings
        rows.append([
            case.name, f"{their.step.settings.rows}", f"{their.time.seconds:.2f}", f"{mine.alone:.2f}",
            f"{mine.planned:.2f}", f"{tokens / mine.planned:,.0f}", f"{case.tflops(tokens, mine.planned):.1f}",
            f"{their.time.seconds / mine.alone:.2f}", f"{their.time.seconds / mine.planned:.2f}",
            f"{their.published_seconds / mine.planned:.2f}", mine.precision,
            f"{len(settings.slices)}, {settings.residency.weights}, {settings.residency.graphs}",
        ])  # fmt: skip
    header = (
        "figure | rows | theirs simulated, s | our schedule alone, s | ours as planned, s | tokens/s | TFLOP/s "
        "| faster by schedule alone | as planned | than published | precision | micro-batches, resident blocks, resident graphs"
    )
    return table(header, rows)


# Sentences


def spread(values: Iterable[float], form: str = ".2f") -> str:
    ordered = sorted(values)
    low, high = f"{ordered[0]:{form}}", f"{ordered[-1]:{form}}"
    return low if low == high else f"{low} to {high}"


def explanations(found: list[Simulated], changed: dict[tuple[str, str], Simulated]) -> list[str]:
    by_name = {each.case.name: each for each in found}

    def span(what: str, machine: str) -> str:
        same = [each for each in found if each.case.machine == machine]
        return {
            "ratio": lambda: spread(each.ratio for each in same),
            "factor": lambda: spread(each.computing_factor for each in same),
            "share": lambda: spread((each.executed_share for each in same), ".0%"),
            "memory": lambda: ", ".join(f"{each.gib:.1f}" for each in same),
            "long memory": lambda: ", ".join(f"{changed[each.case.name, LONG].gib:.1f}" for each in same),
            "long ratio": lambda: ", ".join(f"{changed[each.case.name, LONG].ratio:.2f}" for each in same),
            "with 16 rows": lambda: spread(changed[each.case.name, SHORT].ratio for each in same),
        }[what]()

    small = by_name["RTX 3090 14B"]
    cost = small.step.cost(small.case.hardware)
    loads = sum(cost(op) for each in small.step.passes() for op in each.ops if op.kind == Kind.STREAM_IN)
    return text.explanations(span, {
        "GH200 7B": {"memory": by_name["GH200 7B"].gib},
        "GH200 split": {
            **{model: changed[f"GH200 {model}", SPLIT].ratio for model in ("14B", "32B")},
            **{f"{model} before": by_name[f"GH200 {model}"].ratio for model in ("14B", "32B")},
        },
        "RTX 3090 14B": {
            "published seconds": small.published_seconds, "optimizer": small.time.optimizer,
            "loads": loads / small.case.hardware.link_in, "device": small.case.hardware.device_memory / 2**30,
        },
    })  # fmt: skip


def lessons(
    pairs: list[tuple[Simulated, Ours]], changed: dict[tuple[str, str], Simulated], ablated: Ablated
) -> list[str]:
    large = [(their, mine) for their, mine in pairs if their.case.machine != "RTX 3090"]
    small = [pair for pair in pairs if pair not in large]
    on_gh200 = [(their, mine) for their, mine in pairs if their.case.machine == "GH200"]
    example = next(their for their, _ in pairs if their.case.name == "GH200 14B")
    third = example.step.executed(forwards=1, backwards=0) / example.step.executed()
    published, of_all, of_one = _losses(ablated["no double buffering"], ablated["full"])
    peak = PEAK[GH200.gpu]
    seconds = example.time.seconds
    return text.lessons({
        "factor": spread(changed.get((their.case.name, SPLIT), their).ratio for their, _ in on_gh200),
        "our share": spread((their.step.executed(forwards=2) / mine.planned / peak for their, mine in on_gh200), ".0%"),
        "their share": spread((their.executed_share for their, _ in on_gh200), ".0%"),
        "forward": f"{third * example.time.computing / seconds:.0%}",
        "optimizer": f"{example.time.optimizer / seconds:.0%}", "waiting": f"{example.time.waiting / seconds:.1%}",
        "alone large": spread(their.time.seconds / mine.alone for their, mine in large),
        "alone small": spread(their.time.seconds / mine.alone for their, mine in small),
        "planned": spread(their.time.seconds / mine.planned for their, mine in pairs),
        "published": spread(their.published_seconds / mine.planned for their, mine in pairs),
        "published loss": f"{-published:.0%}", "loss of all": f"{-of_all:.0%}", "loss of one": f"{-of_one:.0%}",
    })  # fmt: skip


def report() -> str:
    """Return the text of the document."""
    found, changed, ablated = [theirs(case) for case in CASES], variants(), ablations()
    pairs = [(each, ours(each.case, each.step.settings.rows)) for each in found]
    lines = [
        text.INTRODUCTION, *table("quantity | as simulated | source", text.ASSUMPTIONS),
        text.THEIRS, *their_table(found), text.REQUIRED, *required_table(found), *text.wrapped(explanations(found, changed)),
        text.VARIANTS, *variant_table(changed),
        text.ABLATIONS, *ablation_table(ablated),
        text.DEPTH, *depth_table(depths()),
        text.OURS, *our_table(pairs), *text.wrapped(lessons(pairs, changed, ablated)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    arguments.output.write_text(report(), encoding="utf-8")


if __name__ == "__main__":
    main()
