"""The prose of docs/field-check.md. The script that simulates the figures passes them in."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill

INTRODUCTION = """\
# Our simulator against published figures

MegaTrain (arXiv 2604.05091) trains on one GPU from host memory, as we do, and has published throughput on three machines.
On this page its step is expressed as one of our schedules (`benchmarks/field_schedule.py`), priced as a plan prices ours
(`plan/step.py`, `schedule/simulate.py`, the profiles in `plan/profiles`), and compared with the published figures; then our step
is simulated on the same rows and the same machine. **Nothing was measured here**, and no constant was fitted: there is one set of
assumptions for each machine. A figure that is off by more than 25% is bold, and the reasons that we know of are below the table.

Command: `python benchmarks/field_check.py` (writes this file)

## Assumptions

"Code" is MegaTrain's public repository at the time of the paper; "transcription" is a public summary of
the paper, whose original we have not seen.
"""

_CODE, _TOLD, _ASSUMED = "code", "transcription", "assumed"
_PROFILE = "profile, with its sources"

ASSUMPTIONS: Sequence[Sequence[str]] = (
    ("published figures, batches on GH200 (7B 158, 14B 96)", "as in the tables", _TOLD),
    ("batch of 32B on GH200", "96 rows, the repository's configuration", f"{_CODE}; not stated for the figure"),
    ("length of rows", "1,024 tokens", f"{_TOLD} for GH200; {_ASSUMED} for the others"),
    ("batch on A100", "the most rows that fit by our arithmetic of their memory", f"{_ASSUMED}: not found"),
    ("batch for each depth", "158 rows, or the most that fit", f"{_ASSUMED}: not found"),
    ("TFLOP/s", "6 x all parameters x tokens / s; on GH200 with 12 x blocks x width x length for attention", _TOLD),
    ("embedding, norm, head", "stay on the device; sent there again after every update", _CODE),
    ("loss", "chunks of 128 positions of all rows, logits of all chunks kept for one backward", _CODE),
    ("each block", "3 loads, 3 forwards, 1 backward; checkpoints every 4 blocks, on the device", _CODE),
    ("a load", "packed into one of 2 page-locked buffers by the main thread (host: 4 bytes per parameter), sent (2), copied "
     "into one of 2 templates on the device (4 there)", _CODE),
    ("packing", "by all cores, as torch copies large tensors; one core at 10 GB/s where stated", _ASSUMED),
    ("loads and computation", "overlap wherever buffers allow it: launches are asynchronous. The host waits for the loss", _CODE),
    ("a gradient", "bf16, sent out (host: 2 bytes per parameter), then copied by a thread (4)", _CODE),
    ("optimizer", "in series after the backward, 30 bytes of host traffic per parameter: clipping 6, update 22, zeroing 2",
     _CODE),
    ("blocks", "eager Hugging Face, fused attention; elementwise bytes as counted on meta tensors", f"{_CODE}; {_PROFILE}"),
    ("GH200", "`gh200`, unchanged: all 480 GB at the rate of the superchip's own memory", _PROFILE),
    ("A100 PCIe", "`a100-pcie-80gb`, unchanged; its host is not stated", _PROFILE),
    ("RTX 3090, link", "PCIe 3.0 x16: 12.5 GB/s each way, 19 both (in proportion to the profile's)", f"{_TOLD}; rate {_ASSUMED}"),
    ("RTX 3090, host", "251 GB at 100 GB/s: more than a desktop with DDR4 holds (128), so a server of that generation; six "
     "channels of DDR4-2933 have 141", f"{_TOLD}; rate {_ASSUMED}"),
)  # fmt: skip

THEIRS = """\
## Their schedule, simulated and published

Computing, optimizer and waiting add up to the step. Waiting is for loads, and for gradients to land.
"""

ASKED = """\
The table shows what the published figures require of the device if everything else is as simulated: the factor by which
computation would have to be slower than simulated, and the share of the datasheet's peak that is executed over the whole
published step, with all three forwards counted.
"""

VARIANTS = """\
## Sensitivity to unknown conditions

The same simulation with one assumption changed.
"""

ABLATIONS = """\
## Ablations

As far as the schedule can express them: *No double buffering*: one buffer of each kind, and a load begins when the
computation before it has ended. *No slab pool*: a gradient has landed before the next block is bound (one interpretation).
*Block interval 1*: a checkpoint for each block, which is still computed three times, with the smaller batch.
"""

DEPTH = """\
## Depth

Qwen2.5-7B's width with more blocks on GH200. *Split memory*: everything beyond 120 GB is in the memory of other superchips, as above.
"""

OURS = """\
## Our schedule on the same rows and machines

*Schedule alone*: our step under their conditions: eager blocks, bf16 weights with fp32 moments, no weights or graphs kept on
the device; activation checkpoints where the planner puts them. *As planned*: what `horizon-lm plan` chooses, blocks compiled, in the
first of `fp32_master`, `bf16`, `bf16` with bf16 moments that fits. An update in `fp32_master` moves 26 bytes of host memory per
parameter instead of 22, which shows where nothing hides it.
"""


def wrapped(lines: Sequence[str]) -> list[str]:
    """Wrap paragraphs and list items at 120 columns, as in the other documents."""
    return [fill(line, 120, subsequent_indent="  " * line.startswith("- "), break_on_hyphens=False) for line in lines]


def explanations(span: Callable[..., str], cases: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Explain why figures are off, by machine.

    Args:
        span: returns the range of a quantity over a machine's figures, as text.
        cases: quantities of single figures, by figure and name.
    """
    small, split = cases["RTX 3090 14B"], cases["GH200 split"]
    return [
        "## Reasons for the differences",
        "",
        f"**GH200: simulated too fast, {span('ratio', 'GH200')} times the published rate.** Computation would have to take "
        f"{span('factor', 'GH200')} times as long. Public facts do not decide between these reasons:",
        "",
        "- *Rates.* The profile takes 0.70 of the datasheet's peak for large products, from measurements of products alone. A "
        "whole step has to hold its clocks for longer, under a power limit that this module's CPU and GPU share. This would be an "
        "error of the profile, and the profiles of H100 and H200 make the same assumption.",
        "- *Eager code.* Elementwise operations are priced at 0.85 of the memory's peak, without gaps between kernels.",
        "- *Remote memory, for 14B and 32B.* Early commits carry the name of a login node of NCSA's DeltaAI, whose nodes have four "
        "superchips with 120 GB each (docs.ncsa.illinois.edu). If the paper's figures are from there, which is not confirmed, then "
        "most of the 12 bytes per parameter are in other superchips' memory. With these at 100 GB/s (assumed) the ratios are "
        f"{split['14B']:.2f} and {split['32B']:.2f} instead of {split['14B before']:.2f} and {split['32B before']:.2f}: about that "
        "of 7B. No other reason here grows with size, and the decline with depth points the same way (below).",
        '- *32B.* ">250" is a lower bound, and the batch is a guess; a smaller one would explain part of it (table below).',
        "",
        f"**A100 PCIe: {span('ratio', 'A100 PCIe')}, but that proves little.** With 16 rows it would be "
        f"{span('with 16 rows', 'A100 PCIe')}: the unknown batch decides. And the published rates require "
        f"{span('share', 'A100 PCIe')} of the datasheet's peak for whole steps of eager code on a card with 300 W, where GH200 has "
        f"{span('share', 'GH200')}.",
        "",
        f"**RTX 3090: simulated too slow, {span('ratio', 'RTX 3090')}.** Rows of 1,024 tokens are only assumed by the "
        f"transcription, and hard to believe. By the arithmetic that gives {cases['GH200 7B']['memory']:.0f} GiB for "
        f"the published peak of 74.2 GB on GH200, 7, 5 and 3 such rows take {span('memory', 'RTX 3090')} GiB of "
        f"{small['device']:.1f}; nobody would stop there. With 8,192 tokens they take {span('long memory', 'RTX 3090')} GiB, about "
        f"what fits, and the ratio becomes {span('long ratio', 'RTX 3090')}. And at 1,024 the 14B model, which is said "
        f"to take {small['published seconds']:.1f} s a step, sends weights for {small['loads']:.1f} s over PCIe 3.0 and "
        f"updates them in series for {small['optimizer']:.1f} s: the published figure is impossible with this schedule, that "
        "link and such rows.",
        "",
    ]


def depth_words(before: str, split: str, deepest: str, num_bytes: str) -> list[str]:
    """Summarise the depths: ranges of ratios without the deepest, with one memory and with split memory."""
    return [
        f"Without the deepest model, the ratio is {before} with all of the memory at one rate, and {split} with split "
        "memory. So one factor on computation, together with split memory, reproduces the published decline with depth; no constant was chosen for "
        f"it. {deepest} blocks are different: at 12 bytes per parameter they take {num_bytes} GB, more than 480.",
        "",
    ]


def lessons(facts: Mapping[str, str]) -> list[str]:
    """Return the conclusions. ``facts``: figures as text, by name."""
    return [
        "## Conclusions",
        "",
        "- **Ratios between schedules on one machine are worth more than seconds.** Absolute figures are off by up to a third, for "
        "reasons outside the schedule: rates of the device, and unknown conditions of the runs.",
        f"- **Our rates for Hopper are probably too high.** As planned, our step would execute {facts['our share']} of GH200's peak; "
        f"the published figures are {facts['their share']} of it. Until a run is measured, divide our GH200 figures by {facts['factor']}; those of H100 and "
        "H200 rest on the same assumption.",
        f"- **Where their time goes** (GH200, 14B): {facts['forward']} of a step is the third forward, {facts['optimizer']} the "
        f"optimizer in series, {facts['waiting']} is waiting for loads. Their batches hide the loads; the arithmetic is the cost.",
        f"- **Gain of our schedule alone**: {facts['alone large']} where computation dominates, since 8 operations per "
        f"parameter and token are executed instead of 10 and updates run under the next forward; {facts['alone small']} with "
        "the small batches of the RTX 3090, where the optimizer and three loads show.",
        f"- **Gain with device memory and compiled blocks**: {facts['planned']} over theirs as simulated, {facts['published']} over "
        "theirs as published.",
        f"- **Their packing is probably slow.** Without double buffering they lose {facts['published loss']}. If all cores packed, "
        f"it would be {facts['loss of all']}; one core at 10 GB/s makes it {facts['loss of one']}. Weights that are "
        "page-locked in place, as ours are, need no packing.",
        "- **Not covered by the simulator**: how fast one thread packs while others use the memory (it shares host memory between "
        "updates in equal parts and has no rate for a single core), the cost of launches, and the cost of a block interval of 1 "
        "beyond its smaller batch.",
    ]
