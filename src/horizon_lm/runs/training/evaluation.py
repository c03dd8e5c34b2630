"""Evaluation of the eval sets, before, between and after the steps of a run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, cast

from horizon_lm.errors import NonFiniteError
from horizon_lm.runs.data.ahead import BatchesAhead
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.loader import batch_from
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.objective.base import Loss, evaluation_mode
from horizon_lm.runs.training.best_model import BestModel
from horizon_lm.runs.training.intervals import Control, Intervals
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training
from horizon_lm.runs.training.run_state import Value
from horizon_lm.runs.training.saver import Saver

_LARGEST_EXPONENT = 700.0  # beyond it `math.exp` overflows


class Evaluation(Part):
    """The evaluations of a run: before its first step, between steps, and after the last one.

    Args:
        saver: saves the best model.
        stop_if_interrupted: called after each batch but the last, with the number of steps that are done.

    Attributes:
        loss_before: holds the eval loss before the first step.
    """

    def __init__(self, run: Run, training: Training, saver: Saver, stop_if_interrupted: Callable[[int], None]) -> None:
        self._config, self._num_steps = run.settings.config, run.intervals.num_steps
        self._ranks, self._reporter, self._eval_sets = run.session.ranks, run.session.reporter, run.data.eval_sets
        self._training, self._saver, self._stop_if_interrupted = training, saver, stop_if_interrupted
        # In the checkpoints, and restored in a resumed run: the best evaluation,
        self._best = training.state.keep("best", BestModel(self._config))
        # the step and the loss of the last one, so that no step is evaluated twice,
        self._last_eval = training.state.keep("last_eval", Value[Sequence[Any]]((-1, None)))
        # and the loss before the first step.
        self.loss_before = training.state.keep("loss_before", Value[float | None](None))

    @property
    def control(self) -> Control:
        return Control(stop=self._best.stops)

    def after_step(self, step: int, due: Intervals) -> None:
        if due.evaluates(step):
            self.run(step)

    def run(self, step: int) -> float | None:
        """Evaluate, report and save the best model, unless this step was already evaluated. Return its eval loss; None without an eval set.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        last_step, last_loss = self._last_eval.value
        if last_step == step:
            return cast(float | None, last_loss)
        with self._training.metrics.exclude_from_timing():
            line = self.evaluate_rows(step) if self._eval_sets else None
        if line is None:
            self._last_eval.value = step, None
            return None
        loss: float = line["eval_loss"]
        self._last_eval.value = step, loss
        self._reporter.write(line)
        is_best = self._best.update(line)
        if is_best and self._config.load_best_model_at_end and step < self._num_steps:  # the last model is exported
            self._saver.save(step, best=True)
        return loss

    def load_best(self, step: int) -> None:
        """If ``load_best_model_at_end`` is set, evaluate the last model, and load the best one unless it is the last."""
        if self._config.load_best_model_at_end:
            with self._saver.saving_on_fault(step):
                self.run(step)
            if self._best.step != step:
                self._saver.keeper.load_best(step)

    def evaluate_rows(self, step: int) -> dict[str, Any]:
        """Evaluate all eval sets and return their mean losses as a line of metrics.

        Returns:
            ``eval_loss`` over all rows and the objective's other metrics, prefixed with ``eval_``; with several eval sets
            also the same for each set, prefixed with ``eval_NAME_``. A loss per token adds ``eval_perplexity`` and
            ``eval_tokens``. Token metrics are means of the means of batches, as in TRL.
        """
        totals, rows_done = dict[str, _Total](), 0
        num_rows = sum(map(len, self._eval_sets.values()))
        with self._reporter.progress("eval set") as advance:
            for name, rows in self._eval_sets.items():
                of_this_rank = _Total()
                for rows_of_turn in self._evaluate_set(name, rows, of_this_rank):
                    rows_done += rows_of_turn
                    advance(rows_done, num_rows)
                    if rows_done < num_rows:
                        self._stop_if_interrupted(step)
                totals[name] = self._sum_over_ranks(of_this_rank)
        line: dict[str, Any] = {"step": step, **_means([*totals.values()], "eval_")}
        if len(totals) > 1:
            for name, total in totals.items():
                line |= _means([total], f"eval_{name}_")
        if not math.isfinite(line["eval_loss"]):
            raise NonFiniteError(f"after step {step}: the eval loss is {line['eval_loss']}")
        return line

    def _evaluate_set(self, name: str, rows: TokenTable, total: "_Total") -> Iterator[int]:
        """Add this rank's losses of an eval set to ``total``. In each turn, every rank computes a batch of its own; yield the number
        of rows in all of them after it.

        In the last turn, ranks without a batch compute the last one again, and do not count it: all take part in every pass.
        """
        model, objective = self._training.model, self._training.objectives.eval_sets[name]
        ranks, batch_size = self._ranks, self._config.per_device_eval_batch_size
        num_batches = -(-len(rows) // batch_size)
        num_turns = -(-num_batches // ranks.size)

        def build(turn: int) -> Batch:
            own_batch = min(turn * ranks.size + ranks.rank, num_batches - 1)
            return batch_from(rows, own_batch * batch_size, batch_size)

        with evaluation_mode(model), BatchesAhead(build, num_turns, rows) as batches:
            for turn in range(num_turns):
                batch = batches.batch(turn)
                loss = objective(model, batch)
                if turn * ranks.size + ranks.rank < num_batches:
                    total.add(_batch_total(loss, batch.num_trained))
                yield min((turn + 1) * ranks.size * batch_size, len(rows)) - turn * ranks.size * batch_size

    def _sum_over_ranks(self, of_this_rank: "_Total") -> "_Total":
        """Return the sums over all ranks, added in the order of ranks, so that each rank gets the same bits."""
        total = _Total()
        for of_rank in self._ranks.exchange("an evaluation", astuple(of_this_rank)):
            total.add(_Total(*of_rank))
        return total


@dataclass
class _Total:
    """Sums over batches of an eval set."""

    loss: float = 0.0  # each batch's loss times its weight
    weight: float = 0.0  # number of targets or pairs
    metrics: dict[str, float] = field(default_factory=dict)  # sums over targets or pairs
    token_means: dict[str, list[float]] = field(default_factory=dict)  # of each batch
    per_token: bool = True  # the loss of each batch is a mean over its targets

    def add(self, other: "_Total") -> None:
        self.loss += other.loss
        self.weight += other.weight
        self.per_token &= other.per_token
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, means in other.token_means.items():
            self.token_means.setdefault(name, []).extend(means)


def _batch_total(loss: Loss, num_trained: float) -> _Total:
    """Return the sums of a batch, whose token metrics have one mean, over all of its sequences."""
    token_means = {name: sums.means(len(sums.counts)) for name, sums in loss.token_metrics.items()}
    return _Total(
        loss=float(loss.value) * loss.weight, weight=loss.weight, metrics=dict(loss.metrics), token_means=token_means,
        per_token=loss.weight == num_trained,
    )  # fmt: skip


def _means(totals: Sequence[_Total], prefix: str) -> dict[str, float]:
    """Return the means over eval sets as metrics, whose names begin with a prefix."""
    weight = sum(total.weight for total in totals)
    loss = sum(total.loss for total in totals) / weight
    line = {f"{prefix}loss": loss}
    if all(total.per_token for total in totals):
        perplexity = math.exp(min(loss, _LARGEST_EXPONENT))
        line |= {f"{prefix}perplexity": perplexity, f"{prefix}tokens": int(weight)}
    for name in totals[0].metrics:
        line[f"{prefix}{name}"] = sum(total.metrics[name] for total in totals) / weight
    for name in totals[0].token_means:
        means = [mean for total in totals for mean in total.token_means[name]]
        line[f"{prefix}{name}"] = sum(means) / len(means)
    return line
