"""Lines of metrics as text for people."""

from typing import Any

from horizon_lm.common.quantities import format_bytes, format_rate, format_seconds
from horizon_lm.runs.training.energy import Energy

_LEAST_FIRST = (  # texts that are left out of a line that is too long, in this order
    "host", "device", "energy", "entropy", "epoch", "trained", "learning_rate", "eval_tokens", "mean_token_accuracy",
    "grad_norm", "perplexity",
)  # fmt: skip


def format_line(line: dict[str, Any], num_steps: int, width: int | None = None) -> str:
    """Return a line of metrics as text for people.

    Args:
        line: the metrics.
        num_steps: steps of the run.
        width: the most characters of a line; the least important metrics of a longer one are left out. None for all. Sample answers are
            never cut.
    """
    start = f"step {line['step']}/{num_steps}"
    if "samples" in line:
        return "\n".join(f"{start}  {each['prompt']!r} -> {each['answer']!r}" for each in line["samples"])
    texts = {"start": start} | (_eval_texts(line) if "eval_loss" in line else _training_texts(line))
    for name in _LEAST_FIRST:
        if width is None or sum(map(len, texts.values())) <= width:
            break
        texts.pop(name, None)
    return "".join(texts.values())


def _eval_texts(line: dict[str, Any]) -> dict[str, str]:
    """Return the metrics of an eval set as texts, each after its separator."""
    tokens = {"eval_tokens": f" ({line['eval_tokens']:,} tokens)"} if "eval_tokens" in line else {}
    return {"loss": f"  eval loss {line['eval_loss']:.4f}", **tokens, **_extra_metrics(line, "eval_")}


def _training_texts(line: dict[str, Any]) -> dict[str, str]:
    """Return the metrics of training steps as texts, each after its separator."""
    return {
        "epoch": f"  epoch {line['epoch']:.2f}",
        "loss": f"  loss {_format_or_none(line['loss'], '.4f')}",
        **_extra_metrics(line, ""),
        "grad_norm": f"  grad norm {_format_or_none(line['grad_norm'], '.2f')}",
        "learning_rate": f"  lr {line['learning_rate']:.2e}",
        "rate": f"  tokens/s {format_rate(line['tokens_per_second'])}",
        "trained": f" ({format_rate(line['trained_tokens_per_second'])} trained)",
        "energy": _energy_of_tokens(line),
        "device": f"  device buffers {format_bytes(line['device_bytes_peak'])}",
        "host": f"  host {format_bytes(line['host_bytes'])}",
        "eta": f"  ETA {format_seconds(line['eta_seconds'])}",
        "slow": _slow_note(line["of_planned_speed"]),
    }


def _slow_note(of_planned: float | None) -> str:
    """Return a note if steps take more than twice as long as planned: other programs may be using this machine."""
    return f"  ({of_planned:.0%} of the planned speed)" if of_planned is not None and of_planned < 0.5 else ""


def _energy_of_tokens(line: dict[str, Any]) -> str:
    total = Energy(line.get("host_joules_per_token"), line.get("device_joules_per_token")).total
    return "" if total is None else f"  {total:.3g} J/token"


def _extra_metrics(line: dict[str, Any], prefix: str) -> dict[str, str]:
    """Return the objective's most important metrics as texts: for preferences metrics of pairs, otherwise metrics of tokens."""
    labels = {"perplexity": "perplexity", "mean_token_accuracy": "token accuracy", "entropy": "entropy"}
    if prefix + "rewards/margins" in line:
        labels = {"rewards/margins": "margin", "rewards/accuracies": "accuracy"}
    return {
        key: f"  {label} {_format_metric(line[prefix + key])}" for key, label in labels.items() if prefix + key in line
    }


def _format_metric(value: float) -> str:
    """Format with three decimals, small and very large numbers with three significant digits."""
    return f"{value:z.3f}" if 0.1 <= abs(value) < 1e5 or value == 0 else f"{value:.3g}"


def _format_or_none(value: float | None, spec: str) -> str:
    return "none" if value is None else format(value, spec)


def growth_warning(name: str, before: float | None, after: float | None) -> str:
    """Return a warning if a loss grew tenfold during a run; an empty text if it did not, or is unknown."""
    if before is None or after is None or not 0 < 10 * before <= after:
        return ""
    return (
        f"warning: the {name} loss grew from {before:.4g} to {after:.4g}, so the model is likely worse than before; "
        "lower learning_rate, or check the rows\n"
    )
