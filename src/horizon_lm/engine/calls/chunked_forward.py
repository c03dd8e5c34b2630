"""A forward pass whose loss or log-probabilities are computed over chunks of tokens: trunk, then chunks.

Shapes: B batch rows, T tokens of a row, H hidden size.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.engine.calls.calls import Call
from horizon_lm.engine.calls.token_logprobs import TokenLogprobs, WantedLogprobs, as_token_logprobs, aux_losses
from horizon_lm.engine.passes.lockstep import run_together
from horizon_lm.engine.units.chunked_lm_head import ChunkedLmHead
from horizon_lm.engine.units.chunked_runs import ChunkedRun, LogprobRun, LossRun
from horizon_lm.engine.units.lm_head import compute_runs
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.errors import MissingLogitsError, TokenError
from horizon_lm.model.block_template import has_foreign_hooks
from horizon_lm.model.head_path import AUXILIARY

_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch")  # each chunk gets its own
# Arguments of the decoder, which chunks do not call.
_DECODER_ONLY = ("output_hidden_states", "output_attentions", "position_ids", "cache_position")


class ChunkedForward:
    """The model without its head over whole batches, and the head over chunks of their trained tokens.

    Args:
        head: the chunked head.
        signature: of the model's own forward method.
        call_model: the model's own forward method.
    """

    def __init__(self, head: ChunkedLmHead, signature: inspect.Signature, call_model: Callable[..., Any]) -> None:
        self.head, self._parts, self._call_model = head, head.engine.parts, call_model
        self._parameters = signature.parameters
        self._loss_parameters = inspect.signature(head.path.loss_function).parameters.keys() - set(_LOSS_ARGUMENTS)

    def fits(self, call: Call) -> bool:
        """Return whether chunks give the model's own values: its loss function was not replaced and gets no argument of the caller,
        and no module that is called once per chunk, and not once per batch, has hooks of other code.
        """
        parts, path = self._parts, self.head.path
        # Only the function that the trial of the path saw is known to be a sum over tokens.
        if path.loss_function is not parts.model.loss_function:
            return False
        # Such as `ignore_index`, with which other tokens are trained.
        if not self._loss_parameters.isdisjoint(call):
            return False
        # The trunk returns a chunk's states and the head sees chunks, so such a hook would run once per chunk, on
        # other shapes.
        return not any(map(has_foreign_hooks, (path.trunk, parts.decoder, parts.head)))

    def losses(
        self, calls: list[Call], outer: dict[str, torch.Tensor], inputs: list[LossInputs],
        statistics: TokenStatistics | None,
    ) -> list[Any]:  # fmt: skip
        """Run the trunk once over whole batches, then norm, head and loss over chunks of their trained tokens. Return each output."""
        outputs, hidden = self._run_trunk(calls)
        runs = [
            LossRun(self.head, each, self._head_options(call), statistics)
            for call, each in zip(calls, inputs, strict=True)
        ]
        losses = self._compute(runs, hidden, outer)
        # A run returns a tuple of tensors for autograd; that of a loss has one.
        return [with_loss(output, loss) for output, (loss,) in zip(outputs, losses, strict=True)]

    def logprobs(
        self, calls: list[Call], outer: dict[str, torch.Tensor], inputs: list[LossInputs],
        statistics: TokenStatistics | None, wanted: WantedLogprobs,
    ) -> list[TokenLogprobs]:  # fmt: skip
        """Run the trunk once over whole batches, then norm, head and log-probabilities over chunks of trained tokens."""
        temperature, names = wanted
        outputs, hidden = self._run_trunk(calls)
        runs = [
            LogprobRun(self.head, each, self._head_options(call), temperature, names, statistics)
            for call, each in zip(calls, inputs, strict=True)
        ]
        results = self._compute(runs, hidden, outer)
        return [
            as_token_logprobs(names, values, each.labels.shape, aux_losses(self._parts.model, output))
            for output, values, each in zip(outputs, results, inputs, strict=True)
        ]

    def _compute(
        self, runs: Sequence[ChunkedRun], hidden: Sequence[torch.Tensor], outer: dict[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, ...]]:
        """Compute the chunks of all batches from hidden states (B, T, H). Reject labels of another shape. Return each run's results."""
        for run, states in zip(runs, hidden, strict=True):
            if states.shape[:2] != run.inputs.labels.shape:
                raise TokenError(
                    f"labels have shape {tuple(run.inputs.labels.shape)}, but the model computed "
                    f"{tuple(states.shape[:2])} tokens; set head='whole' for a model that inserts tokens of images by itself"
                )
        outer_of_chunks = {name: outer[name] for name in self.head.outer_names()}
        return compute_runs(self.head.head, self.head.engine.recording, runs, hidden, outer_of_chunks)

    def _run_trunk(self, calls: Sequence[Call]) -> tuple[list[Any], list[torch.Tensor]]:
        """Run the model without its head for each call. Return the output and the hidden states (B, T, H) of each."""

        def run(call: Call) -> tuple[Any, torch.Tensor]:
            # Both in the same thread: calls in lock-step have a thread each, by which they find their own hidden states.
            return self._call_model(**call), self.head.take_hidden()

        with self.head.without_head(with_norm=any(map(self._needs_normed_hidden, calls))):
            results = run_together([partial(run, call) for call in calls])
        return [output for output, _ in results], [hidden for _, hidden in results]

    def _needs_normed_hidden(self, call: Call) -> bool:
        """Return whether the caller or a hook uses the last hidden states, so that the final norm must be computed."""
        norm = self._parts.final_norm
        # A skipped norm returns its input, which the hook would take for normed states.
        if norm is not None and has_foreign_hooks(norm):
            return True
        if (wanted := call.get("output_hidden_states")) is not None:
            return bool(wanted)
        config = self._parts.model.config
        return bool(config.output_hidden_states or config.get_text_config().output_hidden_states)

    def _head_options(self, call: Call) -> dict[str, Any]:
        """Return the arguments that all chunks of a call share: those without `_LOSS_ARGUMENTS`, of which each chunk has its own."""
        known = {*self._parameters, *_DECODER_ONLY, *_LOSS_ARGUMENTS}
        # Arguments that the model's signature does not name reach the loss function through **kwargs. The named ones describe whole
        # rows, which chunks do not have.
        options = {k: v for k, v in call.items() if k not in known}
        # The pass over the whole batch has added the auxiliary loss already; each chunk would add it again.
        without_aux = {name: False for name in AUXILIARY if name in self._parameters}
        return options | without_aux | {"use_cache": False}


class MissingLogits:
    """A placeholder for logits that were computed only in chunks; using it raises MissingLogitsError."""

    # With None in its place, code that uses logits would fail without a word about head='chunked'.
    def __getattr__(self, name: str) -> Any:
        raise MissingLogitsError

    def __getitem__(self, index: Any) -> Any:
        raise MissingLogitsError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MissingLogitsError

    def __repr__(self) -> str:
        return "no logits with head='chunked'"


def without_labels(inputs: LossInputs) -> dict[str, Any]:
    """Return arguments of a call whose loss the chunks compute.

    With one ignored token instead of all labels, the model's own loss has no cross-entropy: it is the auxiliary loss of
    experts, or zero.
    """
    # One token is enough, as `ChunkedLmHead.head_forward` gives logits (1, 1, V) for the whole batch.
    ignored = inputs.labels.new_full((1, 1), IGNORE_INDEX)
    return {"labels": ignored, "shift_labels": ignored, "num_items_in_batch": inputs.num_items}


def with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return a model's output with the loss of the chunks added to its own, and without logits."""
    # A model output leaves out None, so this copies what the model gave, router logits for example, and no more.
    fields = {k: v for k, v in output.items() if k not in ("loss", "logits")}
    return type(output)(loss=loss + output.loss, logits=MissingLogits(), **fields)
