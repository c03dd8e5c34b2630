"""Draw ``loss.png``, the loss curve in the folder of a run."""

import io
from importlib.util import find_spec
from pathlib import Path

from horizon_lm.common.disk import Disk, write_file
from horizon_lm.runs.palette import FIRST, GRID, MAX_MARKED_POINTS, MUTED, SECOND, THIRD, axis_note
from horizon_lm.runs.run_files import read_metrics


def write_loss_png(metrics_file: Path, png: Path) -> None:
    """Draw training loss, eval loss and learning rate. Write nothing if no loss was logged, or without the extra ``report``.

    Raises:
        ConfigError: the metrics file is invalid.
        OSError: the image cannot be written.
    """
    metrics = read_metrics(metrics_file)
    if not metrics.losses or find_spec("matplotlib") is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")  # not pyplot, which keeps global state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rate_axes = axes.twinx()
    axes.set_zorder(rate_axes.get_zorder() + 1)  # draw losses on top of the learning rate
    axes.patch.set_visible(False)

    steps = [line.step for line in metrics.training]
    learning_rates = [line.learning_rate for line in metrics.training]
    curves = rate_axes.plot(steps, learning_rates, color=THIRD, linewidth=1, alpha=0.7, label="learning rate")
    curves += axes.plot(
        *zip(*metrics.losses, strict=True),
        color=FIRST,
        label="training loss",
        marker="." if len(metrics.losses) <= MAX_MARKED_POINTS else "",
    )
    if metrics.evaluations:
        eval_losses = [(each.step, each.eval_loss) for each in metrics.evaluations]
        curves += axes.plot(*zip(*eval_losses, strict=True), "D:", color=SECOND, label="eval loss")
    note = axis_note([loss for _, loss in metrics.losses] + [each.eval_loss for each in metrics.evaluations])
    axes.set(xlabel="step", ylabel=f"{metrics.loss_title} ({note})" if note else metrics.loss_title)
    if not note and axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(color=GRID)
    rate_axes.set_ylabel("learning rate", color=MUTED)
    rate_axes.set_ylim(bottom=0)
    rate_axes.ticklabel_format(axis="y", scilimits=(0, 0))
    figure.legend(handles=curves[::-1], loc="outside upper center", ncols=3, frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_file(Disk(), png, image.getvalue())
