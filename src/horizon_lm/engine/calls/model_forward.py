"""The forward pass of a streamed model: prepare the pass, run the model with streamed modules, compute the loss.

A pass usually computes one batch, which is one call of the model. Calls in lock-step are computed in one pass, unit by unit.

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.engine.calls.calls import (
    Batch,
    Call,
    arguments_of,
    choose_cache,
    modal_inputs,
    prepare,
    put_ignored_before,
    rank,
    require_supported,
)
from horizon_lm.engine.calls.chunked_losses import LogprobRun, LossRun, TokenLogprobs, WantedLogprobs
from horizon_lm.engine.calls.chunked_outputs import by_name, with_loss, without_labels
from horizon_lm.engine.calls.joint_calls import JointCalls, require_joint
from horizon_lm.engine.calls.merging import MergingLayers
from horizon_lm.engine.calls.replaced_forwards import ReplacedForwards, own_forward, weakly
from horizon_lm.engine.calls.row_probe import RowProbe
from horizon_lm.engine.host.parameters import StandIn
from horizon_lm.engine.passes.device_buffers import EngineOptions
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import ForwardRequest
from horizon_lm.engine.passes.lockstep import run_on_in_backward, run_together
from horizon_lm.engine.passes.micro_batches import ProbeDoneError, split_batches
from horizon_lm.engine.passes.recompute import outside_inference_mode
from horizon_lm.engine.passes.residency_planner import ResidencyPlanner
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.chunked_lm_head import ChunkedLmHead, LossInputs
from horizon_lm.engine.units.embedding import StreamedEmbedding
from horizon_lm.engine.units.gradient_check import GradientCheck
from horizon_lm.engine.units.lm_head import LmHead
from horizon_lm.engine.units.outer import OuterParameters
from horizon_lm.engine.units.outer_dropout import OuterDropout, outer_dropouts
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.engine.units.trained_tokens import trained_token_layers, trained_tokens_forward
from horizon_lm.errors import StreamingError, SummedLossWarning
from horizon_lm.model.adapter_kinds import num_prompt_tokens
from horizon_lm.model.block_template import has_foreign_hooks
from horizon_lm.model.functional import in_place, logprobs_of_logits
from horizon_lm.model.head_path import AUXILIARY, ChunkedPath
from horizon_lm.model.units import ModelParts, adapter_params, replaced_params
from horizon_lm.planning.residency import BatchSize


class ModelForward:
    """The forward pass of a streamed model, and the replaced forward methods of its embedding, blocks, norm and head.

    The model refers to this object, which refers back to it weakly. A cycle would keep the slabs of a dropped model,
    hundreds of gigabytes, in memory until the garbage collector runs.

    Args:
        engine: the model's engine.
        model_class: the model's own class, before it was streamed.
        path: the path from hidden states to the loss in chunks; None for ``head="whole"``.
        is_adapter: the model has PEFT adapters.
        takes_images: images, video and audio are accepted.
    """

    def __init__(
        self, engine: Engine, model_class: Any, path: ChunkedPath | None, is_adapter: bool, takes_images: bool
    ) -> None:
        self.engine, self.is_adapter, self._takes_images = engine, is_adapter, takes_images
        parts = engine.parts
        self._model, self._class = weakref.ref(parts.model), model_class
        self.adapter_params = adapter_params(parts.model)  # identities of PEFT's parameters, in blocks and elsewhere
        self.removable_params = self.adapter_params | replaced_params(parts.model)  # which PEFT may remove
        self._signature = inspect.signature(model_class.forward)
        self.joint = JointCalls(parts.model, self.adapter_params)
        self.blocks, self.tables = Blocks(engine), [StreamedEmbedding(engine, module) for module in parts.tables]
        self.head, self.outer, self.dropout = LmHead(engine), OuterParameters(engine), OuterDropout(engine)
        self._probe = RowProbe(engine, self.blocks, self.tables, weakly(self._call_model))
        self.blocks.probe_rows = weakly(self._probe.shapes)
        self.chunked = ChunkedLmHead(self.head, path, weakly(self._call_model)) if path is not None else None
        self.planner, self._merging = ResidencyPlanner(engine), MergingLayers(engine)
        self.statistics: TokenStatistics | None = None  # collects those of each forward pass with labels
        self.expects_mean_loss = engine.mesh is not None  # as DistributedDataParallel takes it
        self.whole_logits = False  # compute all logits at once, because the caller uses them
        self.renew: Callable[[], None] | None = None  # attaches the model again if PEFT has changed its adapters
        self.replaced = ReplacedForwards(parts, self.blocks, self._forwards(parts))

    def reconfigure(self, options: EngineOptions) -> None:
        """Use other options from the next forward on: the micro-batch, the chunks of the head, and what stays on the device."""
        self.engine.reconfigure(options)
        self.planner = ResidencyPlanner(self.engine)
        if self.chunked is not None:
            self.chunked.chunk_tokens = options.head_chunk_tokens

    def check_gradients(self, num_blocks: int) -> None:
        """Compare blocks with plain autograd in the next backward pass. Gradients must be empty before it.

        Args:
            num_blocks: the number of blocks to compare, spread evenly over the model.
        """
        blocks, check = self.blocks, GradientCheck(self.engine, num_blocks)

        def compare() -> None:
            blocks.gradient_check = None
            check.compare_landed()

        blocks.gradient_check, self.engine.after_next_backward = check, compare

    def _forwards(self, parts: ModelParts) -> dict[nn.Module, Any]:
        """Return the new forward methods of streamed modules."""
        forwards: dict[nn.Module, Any] = {
            module: weakly(self.blocks.forward, index) for index, module in enumerate(parts.blocks)
        }
        forwards |= {table.module: weakly(table.forward) for table in self.tables}
        forwards |= {layer: trained_tokens_forward(layer) for layer in trained_token_layers(parts)}
        for module in outer_dropouts(parts.decoder, parts.blocks):
            forwards[module] = weakly(self.dropout.forward, weakref.ref(module), own_forward(module))
        forwards[parts.head] = weakly(self._head_forward)
        if self.chunked is not None:
            path, norm = self.chunked.path, parts.final_norm
            forwards[path.trunk] = weakly(self.chunked.trunk_forward, own_forward(path.trunk))
            if path.norm_is_last:
                assert norm is not None
                forwards[norm] = weakly(self.chunked.norm_forward, own_forward(norm))
        return forwards

    def _head_forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        if options:  # PEFT's names of the adapters of each row
            raise StreamingError(
                f"{', '.join(options)}: adapters for each row are not supported by the head of a streamed model; compute the rows "
                "of each adapter on their own, after model.set_adapter(name)"
            )
        if self.chunked is not None and self.chunked.replaces_head:
            return self.chunked.head_forward(hidden)
        return self.head.project(hidden)

    def _call_model(self, **kwargs: Any) -> Any:
        """Call the model's original forward method."""
        return self._class.forward(self.model, **kwargs)

    @property
    def model_class(self) -> Any:
        """The model's own class, before it was streamed."""
        return self._class

    @property
    def model(self) -> Any:
        """The streamed model."""
        return self._model()

    # Forward

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the model through the engine, with the arguments of the model's own
        forward method.
        """
        with outside_inference_mode():
            return self._forward(arguments_of(self._signature, args, kwargs))

    def _forward(self, call: Call) -> Any:
        has_labels = call.get("labels") is not None or call.get("shift_labels") is not None
        if self.expects_mean_loss and has_labels and torch.is_grad_enabled():
            self._check_loss_scale(call)
        is_chunked = has_labels and self._is_chunked(call)
        return self.joint.meet(("loss", is_chunked), call, partial(self._forward_all, is_chunked, has_labels))

    def _check_loss_scale(self, call: Call) -> None:
        """Warn once of a loss that is the mean over the targets of this rank alone."""
        self.expects_mean_loss = False
        if call.get("num_items_in_batch") is None:
            warnings.warn(
                "each rank divides its loss by its own targets, and gradients are summed over the ranks, so they are larger than "
                "those of a mean; pass num_items_in_batch, the number of targets of all ranks, or ignore this if you scale the loss",
                SummedLossWarning,
                stacklevel=4,
            )

    def _forward_all(self, is_chunked: bool, has_labels: bool, calls: list[Call]) -> list[Any]:
        """Run one forward pass over all calls. Return the output of each."""
        device = self.engine.device.torch_device
        if not is_chunked:
            outputs = self._run(calls, lambda calls, outer: self._call_all(calls), head_grads=False)
            if self.statistics is not None and has_labels:
                for call, output in zip(calls, outputs, strict=True):
                    self._add_statistics(output.logits, LossInputs.of(dict(call), device))
            return outputs
        if any(not isinstance(call.get("logits_to_keep", 0), int) or call.get("logits_to_keep", 0) for call in calls):
            raise StreamingError("logits_to_keep together with labels needs head='whole'")
        inputs = [LossInputs.of(call, device) for call in calls]
        as_tuple = [call.pop("return_dict", None) is False for call in calls]
        calls = [call | without_labels(each) for call, each in zip(calls, inputs, strict=True)]
        # With several losses their gradients are known only in the backward pass, and so is the sum of the head's.
        head_grads = len(calls) == 1
        outputs = self._run(calls, lambda calls, outer: self._loss_forward(calls, outer, inputs), head_grads)
        return [output.to_tuple() if tuples else output for output, tuples in zip(outputs, as_tuple, strict=True)]

    def token_logprobs(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: WantedLogprobs) -> TokenLogprobs:
        """Compute log-probabilities of labels instead of a loss, for arguments of the model's forward method."""
        call, (temperature, names) = arguments_of(self._signature, args, kwargs), wanted
        if call.get("labels") is None and call.get("shift_labels") is None:
            raise ValueError("give labels or shift_labels")
        put_ignored_before(call, num_prompt_tokens(self.model))
        is_chunked = self._is_chunked(call)
        kind = ("logprobs", is_chunked, temperature, *names)
        with outside_inference_mode():
            found: TokenLogprobs = self.joint.meet(
                kind, call, partial(self._logprobs_all, is_chunked, temperature, names)
            )
        return found

    def _logprobs_all(
        self, is_chunked: bool, temperature: float, names: Sequence[str], calls: list[Call]
    ) -> list[TokenLogprobs]:
        """Compute the log-probabilities of all calls in one forward pass."""
        inputs = [LossInputs.of(call, self.engine.device.torch_device) for call in calls]
        if is_chunked:

            def compute(calls: list[Call], outer: dict[str, torch.Tensor]) -> Any:
                return self._token_forward(calls, outer, inputs, temperature, names)

            return self._run(calls, compute, head_grads=False)
        outputs = self._run(calls, lambda calls, outer: self._call_all(calls), head_grads=False)
        return [
            self._logprobs_of(output, each, temperature, names) for output, each in zip(outputs, inputs, strict=True)
        ]

    def _logprobs_of(self, output: Any, inputs: LossInputs, temperature: float, names: Sequence[str]) -> TokenLogprobs:
        """Return the log-probabilities of a batch whose logits were computed as a whole."""
        logits = output.logits  # (B, T, V)
        if self.statistics is not None:
            self._add_statistics(logits, inputs)
        labels = inputs.labels.reshape(-1)[inputs.trained]
        values = logprobs_of_logits(logits.flatten(0, 1)[inputs.trained], labels, temperature, names)
        zeros = torch.zeros(inputs.labels.numel(), dtype=torch.float32, device=logits.device)
        by_token = [zeros.index_put((inputs.trained,), value) for value in values]  # (B * T,) each
        return by_name(names, by_token, inputs.labels.shape, self._aux_losses(output))

    def _add_statistics(self, logits: torch.Tensor, inputs: LossInputs) -> None:
        """Collect the statistics of a batch whose logits (B, T, V) were computed as a whole."""
        assert self.statistics is not None
        self.statistics.begin(inputs.labels, self.engine.options.compile)
        self.statistics.add_batch(inputs.trained, logits)

    def _is_chunked(self, call: Call) -> bool:
        """Return whether the loss is computed in chunks.

        Chunks are not used if the model's loss function was replaced, for images (whose tokens are inserted inside the
        model), or if modules that chunks call with other inputs have hooks.
        """
        if (
            self.whole_logits
            or self.chunked is None
            or self.chunked.path.loss_function is not self.model.loss_function
            or modal_inputs(call)
        ):
            return False
        parts = self.engine.parts
        return not any(map(has_foreign_hooks, (self.chunked.path.trunk, parts.decoder, parts.head)))

    def _aux_losses(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the auxiliary loss that the model adds to its loss, weighted and unweighted, from an output computed
        without labels; empty without such a loss.
        """
        aux = getattr(output, "aux_loss", None)
        if aux is None:
            return {}
        return {"aux_loss": aux * self.model.router_aux_loss_coef, "unweighted_aux_loss": aux}

    def _run(
        self, calls: list[Call], compute: Callable[[list[Call], dict[str, torch.Tensor]], list[Any]], head_grads: bool
    ) -> list[Any]:
        """Run ``compute`` as one pass of the engine, after checks and, for batches larger than all before, planning.

        Args:
            calls: arguments of the model's forward method for each batch, by name.
            compute: function of these arguments and the outer parameters on the device that returns the outputs.
            head_grads: the head's gradients may be computed in the forward pass.
        """
        engine = self.engine
        engine.require_device()
        self.replaced.require_unchanged()
        self._merging.unmerge_disabled()
        if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise StreamingError(
                "DistributedDataParallel never sees the gradients of a streamed model; call the streamed model itself, whose "
                "processes sum their gradients without it (docs/distributed.md)"
            )
        if len(calls) > 1:
            self._prepare_joint(calls)
        batches = [prepare(engine, call) for call in calls]
        inputs_need_grad = any(_needs_grad(batch.call.get("inputs_embeds")) for batch in batches)
        recording = torch.is_grad_enabled() and (inputs_need_grad or any(engine.trainable().values()))
        for batch in batches:
            choose_cache(batch.call, recording)
            most_rows = engine.options.device_micro_batch_size or batch.rows
            require_supported(batch, most_rows, self._class.__name__, self._takes_images)
        size = self._size_of(batches)
        if recording and self.planner.is_needed(size):
            self._plan(batches, size)
        embed = self._announce(batches)
        request = ForwardRequest(
            recording=recording,
            rows=[batch.rows for batch in batches],
            embed=embed,
            inputs_need_grad=inputs_need_grad,
            head_grads=head_grads and recording and engine.between.head_grads.holder is None,
            draws=self.model.training,
            whole_batch=self.blocks.caching,
        )
        with engine.forward_pass(request):
            outer = self.outer.load()
            with self.outer.in_place(outer), self._stand_ins():
                return compute([batch.call for batch in batches], outer)

    def _announce(self, batches: list[Batch]) -> bool:
        """Tell blocks and embedding what the next forward pass computes. Return whether it looks up tokens."""
        calls = [batch.call for batch in batches]
        for table in self.tables:
            table.expect([(batch.call.get("input_ids"), batch.host_ids) for batch in batches])
        # A cache holds all rows together, so blocks compute the whole batch; see `Blocks.forward` for compiled code.
        self.blocks.caching = any(call.get("use_cache") or call.get("past_key_values") is not None for call in calls)
        self.blocks.signatures = [tuple(sorted((k, rank(v)) for k, v in call.items())) for call in calls]
        self.blocks.segments = [batch.segments for batch in batches]
        return calls[0].get("inputs_embeds") is None

    def _prepare_joint(self, calls: list[Call]) -> None:
        """Prepare the engine for calls in lock-step. Raise StreamingError if they cannot be computed in one pass."""
        require_joint(calls)
        if self.statistics is not None:
            raise StreamingError("statistics of tokens are collected for one batch at a time")
        options = self.engine.options
        if options.device_micro_batch_size is None:  # sums over batches are float32 with micro-batches
            most = max(len(next(v for v in call.values() if isinstance(v, torch.Tensor) and v.ndim)) for call in calls)
            self.reconfigure(replace(options, device_micro_batch_size=most))

    def _size_of(self, batches: list[Batch]) -> BatchSize:
        """Return the size of a step with these batches."""
        most_rows = self.engine.options.device_micro_batch_size
        return BatchSize(
            tokens=sum(batch.rows * batch.length for batch in batches),
            length=max(batch.length for batch in batches),
            tokens_at_once=max(batch.tokens_at_once(most_rows) for batch in batches),
            is_masked=any(batch.call.get("attention_mask") is not None for batch in batches),
        )

    def _stand_ins(self) -> AbstractContextManager[None]:
        """Context manager: replace the weights of head and embedding by stand-ins.

        Models read the dtype and device of these weights, which in the streamed parameters are those of host memory.
        """
        options, device = self.engine.options, self.engine.device.torch_device
        head = [(module, name, None) for module, name in self.head.streamed_places()]
        places: list[tuple[Any, str, Any]] = [*head, *((table.module, "weight", table.read) for table in self.tables)]
        return in_place(
            (module, name, StandIn.of(module._parameters[name], options.compute_dtype, device, read))
            for module, name, read in places
        )

    def _plan(self, batches: list[Batch], size: BatchSize) -> None:
        """Plan what stays on the device, using a rehearsal of the largest batch that measures one block per structure."""
        engine = self.engine
        state, most_rows = engine.device.rng_state(), engine.options.device_micro_batch_size
        largest = max(batches, key=lambda batch: batch.tokens_at_once(most_rows))
        num_micro_batches = len(split_batches([batch.rows for batch in batches], most_rows))
        embed = self._announce([largest])
        with self.planner.planning(size) as plans:
            rehearsal = self.blocks.rehearse()
            try:
                with (
                    torch.no_grad(),
                    engine.forward_pass(ForwardRequest(False, [largest.rows], embed, False, False, draws=False)),
                    self.outer.in_place(self.outer.load()),
                    self._stand_ins(),
                ):  # fmt: skip
                    self._call_all([largest.call])
            except ProbeDoneError:  # at the last block
                plans.append(rehearsal.plan(size.tokens, num_micro_batches))
            finally:
                self.blocks.rehearsal = None
                engine.device.set_rng_state(state)

    def _call_all(self, calls: list[Call]) -> list[Any]:
        """Run the model's original forward method for each call, unit by unit, and keep the calls for a row probe."""
        self._probe.calls = calls
        try:
            outputs = run_together([partial(self._call_model, **call) for call in calls])
        finally:
            self._probe.calls = []
        if len(calls) > 1:
            run_on_in_backward(outputs)
        return outputs

    def _run_trunk(self, calls: list[Call]) -> list[tuple[Any, torch.Tensor]]:
        """Run the model without its head for each call. Return each output and the hidden states (B, T, H)."""
        chunked = self.chunked
        assert chunked is not None

        def run(call: Call) -> tuple[Any, torch.Tensor]:
            return self._call_model(**call), chunked.take_hidden()

        self._probe.calls = calls
        try:
            with chunked.without_head(with_norm=any(map(self._needs_normed_hidden, calls))):
                return run_together([partial(run, call) for call in calls])
        finally:
            self._probe.calls = []

    def _loss_forward(self, calls: list[Call], outer: dict[str, torch.Tensor], inputs: list[LossInputs]) -> list[Any]:
        """Run the trunk once over whole batches, then norm, head and loss over chunks of their trained tokens."""
        assert self.chunked is not None
        ran = self._run_trunk(calls)
        runs = [
            LossRun(self.chunked, each, self._head_options(call), self.statistics)
            for call, each in zip(calls, inputs, strict=True)
        ]
        losses = self.chunked.compute(runs, [hidden for _, hidden in ran], outer)
        return [with_loss(output, loss) for (output, _), (loss,) in zip(ran, losses, strict=True)]

    def _token_forward(
        self, calls: list[Call], outer: dict[str, torch.Tensor], inputs: list[LossInputs], temperature: float,
        names: Sequence[str],
    ) -> list[TokenLogprobs]:  # fmt: skip
        """Run the trunk once over whole batches, then norm, head and log-probabilities over chunks of trained tokens."""
        assert self.chunked is not None
        ran = self._run_trunk(calls)
        runs = [
            LogprobRun(self.chunked, each, self._head_options(call), temperature, names, self.statistics)
            for call, each in zip(calls, inputs, strict=True)
        ]
        values = self.chunked.compute(runs, [hidden for _, hidden in ran], outer)
        return [
            by_name(names, of_call, each.labels.shape, self._aux_losses(output))
            for (output, _), of_call, each in zip(ran, values, inputs, strict=True)
        ]

    def _needs_normed_hidden(self, call: Call) -> bool:
        """Return whether the caller or a hook uses the last hidden states, so that the final norm must be computed."""
        norm = self.engine.parts.final_norm
        if norm is not None and has_foreign_hooks(norm):
            return True
        wanted = call.get("output_hidden_states")
        config = self.model.config
        return bool(
            config.output_hidden_states or config.get_text_config().output_hidden_states if wanted is None else wanted
        )

    def _head_options(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call that are also passed to the model for each chunk."""
        known = {*self._signature.parameters, *_DECODER_ONLY, *_OF_THE_LOSS}
        options = {k: v for k, v in call.items() if k not in known}
        without_aux = {name: False for name in AUXILIARY if name in self._signature.parameters}
        return options | without_aux | {"use_cache": False}


_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # which each chunk has for itself
# Arguments of the decoder, which chunks do not call.
_DECODER_ONLY = ("output_hidden_states", "output_attentions", "position_ids", "cache_position")


def _needs_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
