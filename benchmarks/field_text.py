"""The text of docs/field-check.md. `field_check` simulates its figures and passes them in."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill

INTRODUCTION = """\
# Our simulator against published figures

MegaTrain (arXiv 2604.05091) trains on one GPU from host memory as we do, and has published throughput on three machines.
Here its step is expressed as one of our schedules (`benchmarks/field_schedule.py`), priced as a plan prices ours
(`plan.step`, `schedule.simulate`, the profiles in `planning/arithmetic/profiles`), and compared with the published figures. Our own step is
then simulated on the same rows and machines. **Nothing was measured here**, and no constant was fitted: each machine has one
set of assumptions. Ratios that are off by more than 25% are bold, with the reasons that we know below the table.

Command: `python benchmarks/field_check.py` (writes this file)

## Assumptions

"Code" is MegaTrain's public repository at the time of the paper; "transcription" is a public summary of the paper, which
we have not seen in the original.
"""

_CODE, _TRANSCRIPTION, _ASSUMED = "code", "transcription", "assumed"
_PROFILE = "profile, with its sources"

ASSUMPTIONS: Sequence[Sequence[str]] = (
    ("published figures, batches on GH200 (7B 158, 14B 96)", "as in the tables", _TRANSCRIPTION),
    ("batch of 32B on GH200", "96 rows, the repository's configuration", f"{_CODE}; not stated for the figure"),
    ("row length", "1,024 tokens", f"{_TRANSCRIPTION} for GH200; {_ASSUMED} for the others"),
    ("batch on A100", "the most rows that fit, by our estimate of their memory", f"{_ASSUMED}; not found"),
    ("batch for each depth", "158 rows, or the most that fit", f"{_ASSUMED}; not found"),
    ("TFLOP/s", "6 x all parameters x tokens / s; on GH200 with 12 x blocks x width x length for attention", _TRANSCRIPTION),
    ("embedding, norm, head", "resident on the device; copied there again after every update", _CODE),
    ("loss", "chunks of 128 positions of all rows, logits of all chunks kept for one backward", _CODE),
    ("each block", "3 loads, 3 forwards, 1 backward; activation checkpoints every 4 blocks, on the device", _CODE),
    ("a load", "packed into one of 2 page-locked buffers by the main thread (host: 4 bytes per parameter), copied to the "
     "device (2), copied into one of 2 templates there (4)", _CODE),
    ("packing", "by all cores, as torch copies large tensors; by one core at 10 GB/s if stated", _ASSUMED),
    ("loads and computation", "overlap as far as buffers allow, since launches are asynchronous; the host waits for the loss", _CODE),
    ("a gradient", "bf16, offloaded (host: 2 bytes per parameter), then copied by a thread (4)", _CODE),
    ("optimizer", "in series after the backward, 30 bytes of host traffic per parameter: clipping 6, update 22, zeroing 2",
     _CODE),
    ("blocks", "eager Hugging Face, fused attention; elementwise bytes counted on meta tensors", f"{_CODE}; {_PROFILE}"),
    ("GH200", "`gh200`, unchanged: all 480 GB at the rate of the superchip's own memory", _PROFILE),
    ("A100 PCIe", "`a100-pcie-80gb`, unchanged; the host is not stated", _PROFILE),
    ("RTX 3090, link", "PCIe 3.0 x16: 12.5 GB/s each way, 19 both (in proportion to the profile's)", f"{_TRANSCRIPTION}; rate {_ASSUMED}"),
    ("RTX 3090, host", "251 GB at 100 GB/s: more than a desktop with DDR4 holds (128), so a server of that generation; six "
     "channels of DDR4-2933 have 141", f"{_TRANSCRIPTION}; rate {_ASSUMED}"),
)  # fmt: skip

THEIRS = """\
## Their schedule, simulated and published

Computing, optimizer and waiting add up to the step. Waiting is for loads, and for gradients to land.
"""

REQUIRED = """\
The published figures imply these device rates if everything else is as simulated: the factor on the simulated computing
time, and the fraction of the datasheet's peak that is executed over the whole published step, with all three forwards.
"""

VARIANTS = """\
## Sensitivity to unknown settings

The same simulation with one changed assumption.
"""

ABLATIONS = """\
## Ablations

These are the ablations that the schedule can express. *No double buffering*: one buffer of each kind, and a load begins when
the computation before it has ended. *No slab pool*: a gradient lands before the next block is bound (one interpretation).
*Block interval 1*: an activation checkpoint for each block, which is still computed three times, and the smaller batch.
"""

DEPTH = """\
## Depth

Models of Qwen2.5-7B's width with more blocks on GH200. *Split memory*: everything beyond 120 GB is in other superchips, as
above.
"""

OURS = """\
## Our schedule on the same rows and machines

*Schedule alone*: our step in their setting, with eager blocks, bf16 weights with fp32 moments, no resident blocks or graphs,
and activation checkpoints where the planner puts them. *As planned*: the choice of `horizon-lm plan` with compiled blocks, in
the first of `fp32_master`, `bf16`, `bf16` with bf16 moments that fits. An update in `fp32_master` moves 26 bytes of host
memory per parameter instead of 22, which shows if no computation overlaps with it.
"""


def wrapped(lines: Sequence[str]) -> list[str]:
    """Wrap paragraphs and list items at 120 characters, like the other documents."""
    return [fill(line, 120, subsequent_indent="  " * line.startswith("- "), break_on_hyphens=False) for line in lines]


def explanations(span: Callable[..., str], cases: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the explanation of the errors, by machine.

    Args:
        span: returns the range of a quantity over a machine's figures, as text.
        cases: numbers for the sentences about single figures.
    """
    small, split = cases["RTX 3090 14B"], cases["GH200 split"]
    return [
        "## Reasons for the errors",
        "",
        f"**GH200: simulated too fast, {span('ratio', 'GH200')} times the published rate.** Computation would have to take "
        f"{span('factor', 'GH200')} times as long. Public facts do not decide between these reasons:",
        "",
        "- *Rates.* The profile takes 0.70 of the datasheet's peak for large products, from measurements of isolated products. A "
        "whole step must hold its clocks for longer, under a power limit that this module's CPU and GPU share. This would be an "
        "error of the profile, and the profiles of H100 and H200 make the same assumption.",
        "- *Eager code.* Elementwise operations are priced at 0.85 of the memory's peak, without gaps between kernels.",
        "- *Location of host memory, for 14B and 32B.* Early commits carry the name of a login node of NCSA's DeltaAI, whose nodes have four "
        "superchips with 120 GB each (docs.ncsa.illinois.edu). If the paper's figures are from there, which is not confirmed, then "
        "most of the 12 bytes per parameter are in the memory of other superchips. With these at 100 GB/s (assumed) the ratios are "
        f"{split['14B']:.2f} and {split['32B']:.2f} instead of {split['14B before']:.2f} and {split['32B before']:.2f}: about that "
        "of 7B. No other reason here grows with size, and the decline with depth is consistent with it (below).",
        '- *32B.* ">250" is a lower bound, and the batch is a guess; a smaller one would explain part of it (table below).',
        "",
        f"**A100 PCIe: {span('ratio', 'A100 PCIe')}, but this proves little.** With 16 rows it would be "
        f"{span('with 16 rows', 'A100 PCIe')}, so the unknown batch decides. The published rates also imply "
        f"{span('share', 'A100 PCIe')} of the datasheet's peak for whole steps of eager code on a 300 W card, compared with GH200's "
        f"{span('share', 'GH200')}.",
        "",
        f"**RTX 3090: simulated too slow, {span('ratio', 'RTX 3090')}.** The transcription only assumes rows of 1,024 "
        f"tokens, which is implausible. By the estimate that gives {cases['GH200 7B']['memory']:.0f} GiB for "
        f"the published peak of 74.2 GB on GH200, 7, 5 and 3 such rows take {span('memory', 'RTX 3090')} GiB of "
        f"{small['device']:.1f}, far less than fits. Rows of 8,192 tokens take {span('long memory', 'RTX 3090')} GiB, about "
        f"as much as fits, and the ratios become {span('long ratio', 'RTX 3090')}. Moreover, at 1,024 tokens the 14B model, with a published "
        f"step of {small['published seconds']:.1f} s, loads weights for {small['loads']:.1f} s over PCIe 3.0 and "
        f"updates them in series for {small['optimizer']:.1f} s: this schedule cannot reach the published figure with that "
        "link and such rows.",
        "",
    ]


def depth_sentences(before: str, split: str, deepest: str, num_bytes: str) -> list[str]:
    """Return the conclusion from the depths: ranges of ratios without the deepest, with one memory and with split memory."""
    return [
        f"Without the deepest model, the ratio is {before} with all memory at one rate, and {split} with split memory. One factor on "
        "computation and split memory thus explain the published decline with depth; no constant was fitted to "
        f"it. The model with {deepest} blocks is different: at 12 bytes per parameter it takes {num_bytes} GB, more than 480.",
        "",
    ]


def lessons(facts: Mapping[str, str]) -> list[str]:
    """Return the lessons of the comparison. ``facts``: figures as text, by name."""
    return [
        "## Lessons",
        "",
        "- **Ratios between schedules on one machine are worth more than seconds.** Absolute figures are off by up to a third, for "
        "reasons outside the schedule: rates of the device, and unknown settings of the runs.",
        f"- **Our rates for Hopper are probably too high.** As planned, our step would execute {facts['our share']} of GH200's peak; "
        f"the published figures are {facts['their share']} of it. Until a run is measured, divide our GH200 figures by {facts['factor']}; those of H100 and "
        "H200 rest on the same assumption.",
        f"- **Where their time goes** (GH200, 14B): {facts['forward']} of a step is the third forward, {facts['optimizer']} the "
        f"optimizer in series, {facts['waiting']} is waiting for loads. Their batches hide loads; the cost is arithmetic.",
        f"- **Gain of our schedule alone**: {facts['alone large']} where computation dominates, since 8 operations per "
        f"parameter and token are executed instead of 10 and updates run under the next forward; {facts['alone small']} with "
        "the small batches of the RTX 3090, where the optimizer and three loads show.",
        f"- **Gain with device memory and compiled blocks**: {facts['planned']} over theirs simulated, {facts['published']} over "
        "theirs published.",
        f"- **Their packing is probably slow.** Without double buffering they lose {facts['published loss']}. If all cores packed, "
        f"it would be {facts['loss of all']}; one core at 10 GB/s makes it {facts['loss of one']}. Weights that are "
        "page-locked in place, like ours, need no packing.",
        "- **Limits of the simulator**: it does not know how fast one thread packs while others use the memory (it shares host memory equally "
        "between updates and has no rate of a single core), the cost of launches, and the cost of a block interval of 1 beyond "
        "its smaller batch.",
    ]
