"""Simulate a step of several GPUs and machines that we do not have, beside published figures. Nothing is measured.

python benchmarks/simulated_scaling.py [--output FILE.md]
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from horizon_lm.cli.largest_models import MODES
from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.memory.layout.ranks import Shard
from horizon_lm.model.known_models import find_known, known_config
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates
from horizon_lm.runs.admission.inputs import RowShape, Source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.runs.config.load import parse_overrides
from horizon_lm.schedule.ops import Kind, Op
from horizon_lm.schedule.simulate import step_seconds, without

LENGTH = 4096
K = 1024
EXACT, SMALLEST = "fp32_master", "bf16, 8-bit moments, in backward"
QUANTIZED, ADAPTERS = "adapters, 4-bit base", "adapters, bf16 base"
ALL_MODES = MODES | {ADAPTERS: MODES[QUANTIZED].removesuffix(" --load_in_4bit true")}
MODELS = (
    "Qwen3-8B", "gpt-oss-20b", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-235B-A22B", "Llama-3.1-405B", "DeepSeek-V3",
)  # fmt: skip
ENOUGH = 10**15  # bytes of host memory, to simulate a step that may not fit


@dataclass(frozen=True)
class Cluster:
    """Equal machines.

    Attributes:
        profile: profile of the GPU.
        gpus: GPUs of each machine.
        machines: number of machines.
        tokens: tokens of each GPU in the steps to simulate.
    """

    profile: str
    gpus: int
    machines: int
    tokens: Sequence[int]

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.machines

    @property
    def title(self) -> str:
        return f"{self.machines} x {self.gpus} {self.profile}"


CLUSTERS = (
    Cluster("h100", 8, 1, (16 * K, 64 * K)),
    Cluster("h100", 8, 4, (16 * K, 64 * K)),
    Cluster("rtx-4090-server", 8, 1, (8 * K, 32 * K)),
)
PUBLISHED = """
| system, on 8 x RTX 4090 | Qwen3-8B | gpt-oss-20b | Qwen3-32B | Qwen3-235B, LoRA |
|---|---|---|---|---|
| RoundPipe, synchronous | 18,888 | 12,549 | 4,164 | 1,592 |
| RoundPipe, gradients one step late (its default) | 24,275 | 18,122 | 5,516 | 1,820 |
| FSDP2 offload, as RoundPipe ran it | 1,924 | | | |
| ZeRO-Infinity, as RoundPipe ran it | 1,843 | | 218 | |
"""


@cache
def source_of(name: str, is_published: bool) -> Source:
    """Return a model as a bf16 copy, or with the quantized weights with which it was published."""
    known = find_known(name)
    assert known is not None
    config = known_config(known)
    if is_published and known.quantization:
        config.quantization_config = dict(known.quantization)
    return Source(ModelSource(config, name), 2, is_local=False)


@cache
def plan_of(model: str, cluster: Cluster, mode: str, tokens: int, ranges: int, host_memory: int | None = None) -> Plan:
    """Return the plan of the first rank.

    Args:
        model: name of a published model.
        cluster: the machines.
        mode: a key of `ALL_MODES`.
        tokens: tokens of each GPU in a step.
        ranges: number of ranks that share a copy of the model.
        host_memory: bytes of each machine; None for those of its profile.
    """
    settings = parse_overrides(ALL_MODES[mode].split())
    run = plan_config(
        model_name_or_path=model,
        device="cuda",
        per_device_train_batch_size=tokens // LENGTH,
        max_length=LENGTH,
        **settings,
    )
    machine = other_machine(find_profile(cluster.profile), host_memory, cluster.gpus, cluster.machines)
    rows = RowShape(LENGTH, LENGTH, masked=False)
    shard = Shard(0, ranges)
    source = source_of(model, mode == QUANTIZED)
    return plan_run(run, source, machine, rows=rows, shard=shard, num_ranks=cluster.num_ranks)


def chosen(model: str, cluster: Cluster, tokens: int) -> Plan:
    """Return the most exact plan that fits: fp32 masters first, a copy of the model in each machine first. If none fits, the smallest."""
    meshes = dict.fromkeys((cluster.gpus, cluster.num_ranks))
    for mode in (EXACT, SMALLEST):
        for ranges in meshes:
            plan = plan_of(model, cluster, mode, tokens, ranges)
            if plan.fits:
                return plan
    return plan_of(model, cluster, SMALLEST, tokens, cluster.num_ranks, ENOUGH)


HEADER = """\
| model | tokens of each GPU | mode | ranks of a copy | host memory of each machine | device | step, s | tokens/s | TFLOP/s of each GPU | limited by \
| busy: in | collectives | compute | out | host | hidden from tokens of each GPU: updates | gathers | loads |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def line(model: str, cluster: Cluster, tokens: int) -> str:
    return plan_line(chosen(model, cluster, tokens), model, cluster, tokens)


def plan_line(plan: Plan, model: str, cluster: Cluster, tokens: int) -> str:
    time = plan.time
    assert time is not None
    needed = plan.host.bytes * cluster.gpus
    has = int(find_profile(cluster.profile).server["host_memory"])
    host = format_bytes(needed) + (f", **{format_bytes(needed - has)} missing**" if needed > has else "")
    device = format_bytes(plan.device.bytes) + (
        f", **{format_bytes(plan.device.deficit)} missing**" if plan.device.deficit else ""
    )
    busy = " | ".join(
        f"{time.busy.get(stream, 0):.0%}" for stream in ("copy_in", "collective", "compute", "copy_out", "host")
    )
    hidden = " | ".join(_thousands(time.hidden_from_tokens.get(what)) for what in ("update", "gather", "copy_in"))
    return (
        f"| {model} | {tokens // K}k | {plan.request.precision}{', 8-bit' if plan.request.moments == '8bit' else ''} "
        f"| {plan.request.shard.count} | {host} | {device} | {time.seconds:.2f} | {time.tokens_per_second:,.0f} "
        f"| {time.model_tflops:.0f} | {time.limited_by} | {busy} | {hidden} |"
    )


def _thousands(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens / K:.1f}k"


def cluster_lines(cluster: Cluster) -> Iterator[str]:
    server = find_profile(cluster.profile).server
    within = f"{server['peer'] / 1e9:.0f} GB/s between GPUs" if "peer" in server else "no peer access"
    network = f", {server['network'] / 1e9:.0f} GB/s between machines" if cluster.machines > 1 else ""
    yield f"\n## {cluster.title}\n"
    yield (
        f"{counted(cluster.machines, 'machine')} with {cluster.gpus} GPUs and {server['host_memory'] / 1e9:,.0f} GB each, updates at "
        f"{server['host_bandwidth'] / 1e9:.0f} GB/s of host memory in each; {within}{network}."
    )
    yield f"\n{HEADER}"
    for model in MODELS:
        for tokens in cluster.tokens:
            yield line(model, cluster, tokens)


SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))  # GPUs of a machine, machines
SCALED = ("Qwen3-8B", "Llama-3.1-70B", "Qwen3-235B-A22B", "Llama-3.1-405B")


def scaling_lines() -> Iterator[str]:
    """Yield the throughput of 1 to 64 GPUs, with enough host memory."""
    yield "\n## From 1 to 64 GPUs: h100\n"
    yield (
        "fp32_master, 16k and 64k tokens of each GPU, with as much host memory as needed. One copy of the model in each machine; in *one copy*, "
        "all ranks share one. In brackets: tokens/s of each GPU, divided by those of 8 GPUs. One GPU has one socket "
        f"({find_profile('h100').host_rate / 1e9:.0f} GB/s), several share a server with two "
        f"({find_profile('h100').server['host_bandwidth'] / 1e9:.0f} GB/s): the fewer share it, the sooner updates are hidden."
    )
    yield (
        "\n| model | tokens of each GPU | mesh | " + " | ".join(str(gpus * machines) for gpus, machines in SIZES) + " |"
    )
    yield "|---|---|---" + "|---" * len(SIZES) + "|"
    for model in SCALED:
        for tokens in (16 * K, 64 * K):
            for is_one_copy in (False, True):
                yield (
                    f"| {model} | {tokens // K}k | {'one copy' if is_one_copy else 'a copy in each'} | "
                    + " | ".join(_scaled(model, tokens, is_one_copy))
                    + " |"
                )


def _scaled(model: str, tokens: int, is_one_copy: bool) -> Iterator[str]:
    found = []
    for gpus, machines in SIZES:
        cluster = Cluster("h100", gpus, machines, ())
        time = plan_of(model, cluster, EXACT, tokens, gpus * (machines if is_one_copy else 1), ENOUGH).time
        assert time is not None
        found.append((cluster.num_ranks, time.tokens_per_second))
    of_machine = dict(found)[8] / 8
    for num_ranks, throughput in found:
        yield f"{throughput:,.0f} ({throughput / num_ranks / of_machine:.0%})"


def whole_unit_lines() -> Iterator[str]:
    """Yield our step beside one in which each GPU loads whole units over its own link, so that nothing is gathered."""
    yield "\n## Boards without NVLink: ranges and gathering, or whole units over each link\n"
    yield (
        "8 x rtx-4090-server, fp32_master. *Whole units*: host memory is shared, each GPU loads all of a unit over its own link, and nothing is gathered; "
        "gradients are summed as now. Sums in host memory, by the updating threads, are not simulated."
    )
    yield "\n| model | tokens of each GPU | as it is, s | whole units, s | shorter by | free collectives, s |\n|---|---|---|---|---|---|"
    cluster = CLUSTERS[2]
    for model in ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B"):
        for tokens in (4 * K, 8 * K, 16 * K, 32 * K):
            yield _whole_units(plan_of(model, cluster, EXACT, tokens, cluster.gpus, ENOUGH), model, tokens)


def _whole_units(plan: Plan, model: str, tokens: int) -> str:
    hardware, time = plan.machine.hardware, plan.time
    assert hardware is not None
    assert time is not None
    step = plan.step
    passes, cost = step.passes(), StepCost(step, hardware, plan.machine.interconnect)
    speed = rates(hardware, None, plan.machine.interconnect, step.settings)
    ungathered = without(cost, Kind.GATHER)

    def of_whole_units(op: Op) -> float:
        return ungathered(op) * (plan.request.shard.count if op.kind == Kind.STREAM_IN else 1)

    seconds = step_seconds(passes, of_whole_units, speed)
    free = step_seconds(passes, without(cost, Kind.GATHER, Kind.REDUCE), speed)
    shorter = 1 - seconds / time.seconds
    return f"| {model} | {tokens // K}k | {time.seconds:.2f} | {seconds:.2f} | {shorter:.1%} | {free:.2f} |"


def published_lines() -> Iterator[str]:
    """Yield published figures, and ours for the same models and machine."""
    cluster = CLUSTERS[2]
    yield "\n## Published figures on 8 x RTX 4090\n"
    yield (
        "Tokens/s, measured by their authors (arXiv 2604.27085); tokens of a step and the host are not the same as ours. Ours are simulated, "
        "full fine-tuning with fp32 masters, and the updates of one step under the next forward, so gradients are never late. RoundPipe's benchmark "
        "(benchmark/train.py of its repository) computes in float16 and accumulates in float16, at twice the peak of bfloat16 with float32 "
        "accumulation on these GPUs (330 and 165 TFLOP/s, NVIDIA Ada whitepaper), in which ours computes. Adapters are those of attention."
    )
    rows = PUBLISHED.strip().splitlines()
    yield "\n" + "\n".join(rows)
    for tokens in cluster.tokens:
        cells = []
        for model in ("Qwen3-8B", "gpt-oss-20b", "Qwen3-32B"):
            plan = plan_of(model, cluster, EXACT, tokens, cluster.gpus)
            assert plan.time is not None
            cells.append(_throughput(plan))
        for mode, note in ((ADAPTERS, ""), (QUANTIZED, ", 4-bit base")):
            adapters = _throughput(plan_of("Qwen3-235B-A22B", cluster, mode, tokens, cluster.gpus))
            yield f"| ours, simulated, {tokens // K}k tokens of each GPU{note} | {' | '.join(cells)} | {adapters} |"
            cells = [""] * len(cells)


def _throughput(plan: Plan) -> str:
    assert plan.time is not None
    return f"{plan.time.tokens_per_second:,.0f}{'' if plan.fits else ', does not fit'}"


def adapter_lines() -> Iterator[str]:
    """Yield plans of adapters on a quantized base: 4 bits, or as it was published (MXFP4 or FP8)."""
    yield "\n## Adapters of attention on a quantized base\n"
    yield "One copy of the base in each machine, as codes and scales, which are gathered as such. 4-bit bases, but DeepSeek-V3 in FP8."
    yield f"\n| machine {HEADER}".replace("\n|---", "\n|---|---")
    for cluster in CLUSTERS:
        for model in ("Llama-3.1-70B", "Qwen3-235B-A22B", "Llama-3.1-405B", "DeepSeek-V3"):
            plan = plan_of(model, cluster, QUANTIZED, cluster.tokens[-1], cluster.gpus, ENOUGH)
            yield f"| {cluster.title} {plan_line(plan, model, cluster, cluster.tokens[-1])}"


def introduction() -> Iterator[str]:
    yield "# Simulated, not measured: several GPUs and machines\n"
    yield (
        f"{date.today().isoformat()}. Plans of `horizon-lm plan --gpus --nodes` for our schedule on published hardware figures (`planning/arithmetic/profiles`), rows of "
        f"{LENGTH:,} tokens; k = 1024. The most exact mode and the smallest mesh that fit are shown; if nothing fits, 8-bit moments on all ranks, with "
        "what is missing. `docs/field-check.md` says how far to trust such figures: those of Hopper GPUs are probably too fast by a "
        "fifth or more, and nothing was ever run on several GPUs."
    )
    yield "\nCommand: `python benchmarks/simulated_scaling.py`"


NOTES = """
## Notes

- *limited by*: what would shorten the step by more than 5% if it were free; otherwise computation.
- *hidden from*: tokens of each GPU in a step from which updates, the gathering of weights, and loads take no longer than the computation beside
  them. Without peer access gathers cross the links to the host, and are part of the loads.
- Sums have the order of the ranks, and so the bits of one process. Within a machine this moves as many bytes as a reduce-scatter; if a copy of the
  model spans machines, a network carries partial sums in float32, once into each machine. The start of this chain is not simulated.
- A block of DeepSeek-V3 has 11.5 billion parameters. Its buffers need a GPU with more memory, or experts in tiles, which are not built.
- All ranks do the same at the same time; latencies, stragglers and the agreement before each pass are not simulated.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sections = (
        introduction(),
        published_lines(),
        *map(cluster_lines, CLUSTERS),
        adapter_lines(),
        scaling_lines(),
        whole_unit_lines(),
    )
    text = "\n".join([*(line for section in sections for line in section), NOTES.rstrip()]) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
