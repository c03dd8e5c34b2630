"""``loss.png``: the loss of a run at a glance, for those who look into its folder."""

from pathlib import Path

from horizon_lm.report.figures import FIRST, GRID, MUTED, SECOND, THIRD
from horizon_lm.report.run_files import read_metrics


def write_loss_png(metrics_file: Path, png: Path) -> None:
    """Draw training loss, held-out loss and learning rate; nothing is written where no loss was logged.

    Raises:
        ConfigError: the file is not one of metrics.
        OSError: the picture cannot be written.
    """
    metrics = read_metrics(metrics_file)
    if not metrics.losses:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")  # no pyplot: it would keep it, and its state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rates = axes.twinx()
    axes.set_zorder(rates.get_zorder() + 1)  # losses lie over the learning rate
    axes.patch.set_visible(False)

    steps = [line.step for line in metrics.training]
    learning_rates = [line.learning_rate for line in metrics.training]
    lines = rates.plot(steps, learning_rates, color=THIRD, linewidth=1, alpha=0.7, label="learning rate")
    lines += axes.plot(
        *zip(*metrics.losses, strict=True), color=FIRST, label="training loss", marker=_mark(metrics.losses)
    )
    if metrics.evaluations:
        held_out = [(each.step, each.eval_loss) for each in metrics.evaluations]
        lines += axes.plot(*zip(*held_out, strict=True), "D:", color=SECOND, label="held-out loss")
    axes.set(xlabel="step", ylabel=metrics.loss_title)
    axes.grid(color=GRID)
    rates.set_ylabel("learning rate", color=MUTED)
    rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", scilimits=(0, 0))
    figure.legend(handles=lines[::-1], loc="outside upper center", ncols=3, frameon=False)  # over no line
    figure.savefig(png, format="png")


def _mark(points: list[tuple[int, float]]) -> str:
    """A single loss is no line, and would not be seen."""
    return "." if len(points) <= 60 else ""
