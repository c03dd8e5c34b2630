"""The numbers of a plan as items, which the text of a command and the page of a report print."""

from collections.abc import Mapping

from horizon_lm.common.quantities import Item, format_count, format_duration, format_rate, three_digits
from horizon_lm.planning.arithmetic.plan_file import PlannedStep
from horizon_lm.schedule.ops import CAUSE_TITLES, STREAM_TITLES

PLACES = {
    "host": "host memory", "device": "device memory", "buffers": "device buffers", "disk": "disk", "download": "download disk",
}  # fmt: skip
"""The names of the places of a plan's bytes."""


def speeds(step: PlannedStep) -> tuple[Item, Item, Item]:
    """Return the time of a step, the tokens per second of all ranks, and the model's operations per second on each device."""
    return (
        Item("step", step.seconds, lambda seconds: f"{format_duration(seconds)}/step"),
        Item("throughput", step.tokens_per_second, lambda rate: f"{format_rate(rate)} tokens/s"),
        Item("operations", step.model_tflops, lambda rate: f"{three_digits(rate):,g} model TFLOP/s"),
    )


def overlaps(step: PlannedStep) -> list[Item]:
    """Return the tokens per step from which computation fully overlaps transfers and updates; without those that it never overlaps."""
    return [
        Item(CAUSE_TITLES.get(cause, cause), tokens, _from_tokens)
        for cause, tokens in step.hidden_from_tokens.items()
        if tokens is not None
    ]


def _from_tokens(tokens: float) -> str:
    return f"from {format_count(tokens)} tokens per step" if tokens > 1 else "with any number of tokens"


def utilization(busy: Mapping[str, float]) -> list[Item]:
    """Return the share of a step in which each stream is busy."""
    return [Item(title, busy[stream], "{:.1%}".format) for stream, title in STREAM_TITLES.items() if stream in busy]


def stalls(exposed_seconds: Mapping[str, float]) -> list[Item]:
    """Return the time of a step without computation, by its cause."""
    return [Item(CAUSE_TITLES.get(cause, cause), s, format_duration) for cause, s in exposed_seconds.items()]
