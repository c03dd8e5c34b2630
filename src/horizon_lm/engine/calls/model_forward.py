"""The forward pass of a streamed model: prepare the pass, run the model with streamed modules, compute the loss.

A pass usually computes one batch, which is one call of the model. Calls in lock-step are computed in one pass, unit by unit.

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.device.slow_products import warn_of_slow_products
from horizon_lm.engine.calls.calls import Call, arguments_of, put_ignored_before, shape_of
from horizon_lm.engine.calls.chunked_forward import ChunkedForward, without_labels
from horizon_lm.engine.calls.generation import GenerationMemory
from horizon_lm.engine.calls.joint_calls import JointCalls, require_joint
from horizon_lm.engine.calls.merging import MergingLayers
from horizon_lm.engine.calls.pass_runner import Compute, PassRunner
from horizon_lm.engine.calls.replaced_forwards import ReplacedForwards, own_forward, weakly
from horizon_lm.engine.calls.token_logprobs import TokenLogprobs, WantedLogprobs, as_token_logprobs, aux_losses
from horizon_lm.engine.passes.ambient import outside_inference_mode
from horizon_lm.engine.passes.device_buffers import EngineOptions
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.residency_planner import ResidencyPlanner
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.chunked_lm_head import ChunkedLmHead
from horizon_lm.engine.units.embedding import StreamedEmbedding
from horizon_lm.engine.units.gradient_check import GradientCheck
from horizon_lm.engine.units.lm_head import LmHead
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.engine.units.outer_dropout import OuterDropout, outer_dropouts
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.engine.units.trained_tokens import trained_token_layers, trained_tokens_forward
from horizon_lm.errors import StreamingError, SummedLossWarning, warn
from horizon_lm.model.adapter_kinds import adapter_params, num_prompt_tokens, replaced_params
from horizon_lm.model.functional import logprobs_of_logits
from horizon_lm.model.head_path import ChunkedPath
from horizon_lm.model.parts import ModelParts


class ModelForward:
    """The forward pass of a streamed model, and the replaced forward methods of its embedding, blocks, norm and head.

    The model refers to this object, which refers back to it weakly. A cycle would keep the slabs of a dropped model,
    hundreds of gigabytes, in memory until the garbage collector runs.

    Args:
        engine: the model's engine.
        model_class: the model's own class, before it was streamed.
        path: the path from hidden states to the loss in chunks; None for ``head="whole"``.
        is_adapter: the model has PEFT adapters.
        images: as in `Examined`.
        renew: called with this object, attaches the model again if PEFT has changed its adapters.
    """

    def __init__(
        self, engine: Engine, model_class: Any, path: ChunkedPath | None, is_adapter: bool, images: frozenset[str],
        renew: Callable[["ModelForward"], None],
    ) -> None:  # fmt: skip
        self.engine, self.is_adapter, self.renew = engine, is_adapter, renew
        parts = engine.parts
        self._model, self._class = weakref.ref(parts.model), model_class
        self.adapter_params = adapter_params(parts.model)  # identities of PEFT's parameters, in blocks and elsewhere
        # Identities are taken now, while the adapters are in place: after PEFT has unloaded them nothing tells what
        # they were.
        self.removable_params = self.adapter_params | replaced_params(parts.model)  # which PEFT may remove
        self._signature = inspect.signature(model_class.forward)
        self.joint = JointCalls(parts.model, self.adapter_params)
        # Weakly, because units hold it and this object holds the units.
        call_model = weakly(self._call_model)
        self.blocks = Blocks(engine, call_model)
        self._tables = [StreamedEmbedding(engine, module, self.blocks) for module in parts.tables]
        self._head, self._dropout, self._merging = LmHead(engine), OuterDropout(engine), MergingLayers(engine)
        self._runner = PassRunner(
            engine, self.blocks, self._tables, self._head,
            call_model=call_model, model_name=model_class.__name__, images=images,
        )  # fmt: skip
        self._chunked: ChunkedForward | None = None
        if path is not None:
            head = ChunkedLmHead(self._head, path, call_model)
            self._chunked = ChunkedForward(head, self._signature, call_model)
        self.generation = GenerationMemory(engine)
        self.statistics: TokenStatistics | None = None  # collects statistics of each forward pass with labels
        self.expects_mean_loss = engine.mesh.size > 1  # as DistributedDataParallel takes it
        self.whole_logits = False  # compute all logits at once, because the caller uses them
        self.replaced = ReplacedForwards(parts, self.blocks, self._replacements(parts))

    def reconfigure(self, options: EngineOptions) -> None:
        """Use other options from the next forward on: the micro-batch, the chunks of the head, and what stays on the device.

        Forward passes that await their backward pass are given up. Raise StreamingError for a change of any other option.
        """
        self.engine.reconfigure(options)
        # The plan holds for the old micro-batch; a new planner plans again for the next batch.
        self._runner.planner = ResidencyPlanner(self.engine)

    def check_gradients(self, num_blocks: int) -> None:
        """Compare blocks with plain autograd in the next backward pass. Gradients must be empty before it.

        Args:
            num_blocks: the number of blocks to compare, spread evenly over the model.
        """
        blocks, check = self.blocks, GradientCheck(self.engine, num_blocks)

        def compare() -> None:
            # Removed before the comparison, which may raise: later backward passes add to these gradients, and sums cannot
            # be compared.
            blocks.gradient_check = None
            check.compare_landed()

        blocks.gradient_check = check
        self.engine.after_next_backward = compare

    def _replacements(self, parts: ModelParts) -> dict[nn.Module, Any]:
        """Return the replacement of each streamed module's forward method, by module."""
        forwards: dict[nn.Module, Any] = {
            module: weakly(self.blocks.forward, index) for index, module in enumerate(parts.blocks)
        }
        forwards |= {table.module: weakly(table.forward) for table in self._tables}
        # PEFT's own forward would copy the whole table, in whose place the pass has a stand-in.
        forwards |= {layer: trained_tokens_forward(layer) for layer in trained_token_layers(parts)}
        for module in outer_dropouts(parts.decoder, parts.blocks):
            forwards[module] = weakly(self._dropout.forward, weakref.ref(module), own_forward(module))
        forwards[parts.head] = weakly(self._head_forward)
        if self._chunked is not None:
            head, path, norm = self._chunked.head, self._chunked.head.path, parts.final_norm
            forwards[path.trunk] = weakly(head.trunk_forward, own_forward(path.trunk))
            if path.norm_is_last:
                assert norm is not None
                forwards[norm] = weakly(head.norm_forward, own_forward(norm))
        return forwards

    def _head_forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits of hidden states. In a chunked pass these are the current chunk's, or zeros (`ChunkedLmHead.head_forward`)."""
        if options:  # PEFT's names of the adapters of each row
            raise StreamingError(
                f"{', '.join(options)}: adapters for each row are not supported by the head of a streamed model; compute the rows "
                "of each adapter on their own, after model.set_adapter(name)"
            )
        if self._chunked is not None and self._chunked.head.replaces_head:
            return self._chunked.head.head_forward(hidden)
        return self._head.project(hidden)

    def _call_model(self, **kwargs: Any) -> Any:
        """Call the model's original forward method."""
        # The forward of the class that the model had; the forward of its present class leads here.
        return self._class.forward(self.model, **kwargs)

    @property
    def model_class(self) -> Any:
        """The model's own class, before it was streamed."""
        return self._class

    @property
    def model(self) -> Any:
        """The streamed model."""
        return self._model()

    @property
    def planner(self) -> ResidencyPlanner:
        """The planner of what stays on the device."""
        return self._runner.planner

    # Forward

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward pass of the model through the engine, with the arguments of the model's own forward method."""
        self._warn_of_slow_products()
        with outside_inference_mode():
            return self._forward(arguments_of(self._signature, args, kwargs))

    def _forward(self, call: Call) -> Any:
        """Compute a call, together with the calls that are in lock-step with it; with labels, in chunks if that is possible."""
        has_labels = call.get("labels") is not None  # `shift_labels` alone gives no loss, as in transformers
        if self.expects_mean_loss and has_labels and torch.is_grad_enabled():
            self._check_loss_scale(call)
        chunked = self._chunked_for(call) if has_labels else None
        run = partial(self._run_whole, has_labels) if chunked is None else partial(self._run_chunked, chunked)
        # Chunked and whole losses need different passes, so calls of the two kinds do not meet.
        return self.joint.compute(("loss", chunked is not None), call, run)

    def _warn_of_slow_products(self) -> None:
        """Warn once if this pass computes on a CPU, in a dtype that it has no instructions for."""
        if self.engine.device.torch_device.type == "cpu":
            autocast = torch.is_autocast_enabled("cpu")
            warn_of_slow_products(torch.get_autocast_dtype("cpu") if autocast else self.engine.options.compute_dtype)

    def _check_loss_scale(self, call: Call) -> None:
        """Warn once of a loss that is the mean over the targets of this rank alone."""
        self.expects_mean_loss = False
        if call.get("num_items_in_batch") is None:
            warn(
                "each rank divides its loss by its own targets, and gradients are summed over the ranks, so they are larger than "
                "those of a mean; pass num_items_in_batch, the number of targets of all ranks, or ignore this if you scale the loss",
                SummedLossWarning,
            )

    def _run_whole(self, has_labels: bool, calls: list[Call]) -> list[Any]:
        """Run one forward pass over all calls, with all logits, as the model's own code does. Return the output of each."""
        outputs = self._run(calls, lambda calls, outer: self._runner.call_all(calls))
        if self.statistics is not None and has_labels:
            for call, output in zip(calls, outputs, strict=True):
                inputs = LossInputs.of(dict(call), self.engine.device.torch_device)  # of a copy, which loses its labels
                self._add_statistics(output.logits, inputs)
        return outputs

    def _run_chunked(self, chunked: ChunkedForward, calls: list[Call]) -> list[Any]:
        """Run one forward pass over all calls, whose losses are computed in chunks. Return the output of each."""
        # Chunks have exactly the trained tokens, so a number of last tokens, or a tensor of their positions, would be ignored.
        to_keep = [call.get("logits_to_keep", 0) for call in calls]
        if any(not isinstance(each, int) or each for each in to_keep):
            raise StreamingError("logits_to_keep together with labels needs head='whole'")
        # This takes the labels out of the calls; the pass over the whole batch gets one ignored label for them.
        inputs = [LossInputs.of(call, self.engine.device.torch_device) for call in calls]
        # The engine reads fields of the output by name, and makes the tuple at the end.
        as_tuple = [call.pop("return_dict", None) is False for call in calls]
        calls = [call | without_labels(each) for call, each in zip(calls, inputs, strict=True)]
        outputs = self._run(
            calls,
            lambda calls, outer: chunked.losses(calls, outer, inputs, self.statistics),
            # The sum of the head's gradients over several losses needs the gradient of each, which only the backward pass
            # knows.
            may_have_head_grads=len(calls) == 1,
        )
        return [output.to_tuple() if tuples else output for output, tuples in zip(outputs, as_tuple, strict=True)]

    def token_logprobs(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: WantedLogprobs) -> TokenLogprobs:
        """Compute log-probabilities of labels instead of a loss, for arguments of the model's forward method."""
        self._warn_of_slow_products()
        call = arguments_of(self._signature, args, kwargs)
        if call.get("labels") is None and call.get("shift_labels") is None:
            raise ValueError("give labels or shift_labels")
        put_ignored_before(call, num_prompt_tokens(self.model))
        chunked = self._chunked_for(call)
        kind = ("logprobs", chunked is not None, wanted.temperature, *wanted.names)
        with outside_inference_mode():
            result: TokenLogprobs = self.joint.compute(kind, call, partial(self._run_logprobs, chunked, wanted))
        return result

    def _run_logprobs(
        self, chunked: ChunkedForward | None, wanted: WantedLogprobs, calls: list[Call]
    ) -> list[TokenLogprobs]:
        """Compute the log-probabilities of all calls in one forward pass."""
        inputs = [LossInputs.of(call, self.engine.device.torch_device) for call in calls]
        if chunked is not None:
            return self._run(
                calls, lambda calls, outer: chunked.logprobs(calls, outer, inputs, self.statistics, wanted)
            )
        outputs = self._run(calls, lambda calls, outer: self._runner.call_all(calls))
        return [self._logprobs_of_whole(output, each, wanted) for output, each in zip(outputs, inputs, strict=True)]

    def _logprobs_of_whole(self, output: Any, inputs: LossInputs, wanted: WantedLogprobs) -> TokenLogprobs:
        """Return the log-probabilities of a batch whose logits were computed as a whole."""
        logits = output.logits  # (B, T, V)
        if self.statistics is not None:
            self._add_statistics(logits, inputs)
        # Only trained positions: an ignored label of -100 is no index into the vocabulary.
        labels = inputs.labels.reshape(-1)[inputs.trained]
        values = logprobs_of_logits(logits.flatten(0, 1)[inputs.trained], labels, wanted.temperature, wanted.names)
        zeros = torch.zeros(inputs.labels.numel(), dtype=torch.float32, device=logits.device)
        by_token = [zeros.index_put((inputs.trained,), value) for value in values]  # (B * T,) each
        return as_token_logprobs(wanted.names, by_token, inputs.labels.shape, aux_losses(self.model, output))

    def _add_statistics(self, logits: torch.Tensor, inputs: LossInputs) -> None:
        """Collect the statistics of a batch whose logits (B, T, V) were computed as a whole."""
        assert self.statistics is not None
        self.statistics.begin(inputs.labels, self.engine.options.compile)
        self.statistics.add_batch(inputs.trained, logits)

    def _chunked_for(self, call: Call) -> ChunkedForward | None:
        """Return the chunked forward pass for a call with labels; None if all logits are computed at once, because chunks would not compute
        what the model does (`ChunkedForward.fits`).
        """
        if self._chunked is None or self.whole_logits or not self._chunked.fits(call):
            return None
        return self._chunked

    def _run(self, calls: list[Call], compute: Compute, may_have_head_grads: bool = False) -> list[Any]:
        """Run ``compute`` as one pass (`PassRunner.run`), after checks of what other code may have changed in the model."""
        self.engine.require_device()
        self.replaced.require_unchanged()
        self._merging.unmerge_disabled()
        if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise StreamingError(
                "DistributedDataParallel never sees the gradients of a streamed model; call the streamed model itself, whose "
                "processes sum their gradients without it (docs/distributed.md)"
            )
        if len(calls) > 1:
            self._prepare_joint(calls)
        return self._runner.run(calls, compute, may_have_head_grads)

    def _prepare_joint(self, calls: list[Call]) -> None:
        """Prepare the engine for calls in lock-step. From the first such call on, the gradients of a pass are summed over its calls in
        float32, as over micro-batches, which frees all device buffers and gives up forward passes that await their backward pass.

        Raises:
            StreamingError: the calls cannot be computed in one pass.
        """
        require_joint(calls)
        if self.statistics is not None:
            raise StreamingError("statistics of tokens are collected for one batch at a time")
        options = self.engine.options
        if not options.in_micro_batches:  # sums over batches are float32 with micro-batches
            # Rows of the largest call, so none of them is cut: with this setting the engine only adds up in float32. A later call with
            # more rows is cut into micro-batches of this size.
            self.reconfigure(options.in_micro_batches_of(max(shape_of(call)[0] for call in calls)))
