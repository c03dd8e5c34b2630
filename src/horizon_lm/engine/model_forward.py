"""The forward pass of a streamed model: prepare the pass, run the model with streamed modules, compute the loss.

A pass usually computes one batch, which is one call of the model. Calls in lock-step are computed in one pass, unit by unit.

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.device.base import send
from horizon_lm.engine.blocks import Blocks
from horizon_lm.engine.chunked_lm_head import ChunkedLmHead, LossInputs
from horizon_lm.engine.chunked_losses import WITHOUT_GRADIENT, LogprobRun, LossRun, TokenLogprobs, WantedLogprobs
from horizon_lm.engine.device_buffers import EngineOptions
from horizon_lm.engine.embedding import StreamedEmbedding
from horizon_lm.engine.executor import Engine
from horizon_lm.engine.gradient_check import GradientCheck
from horizon_lm.engine.lm_head import LmHead
from horizon_lm.engine.lockstep import apart, meet, place, run_on_in_backward, run_together, watch
from horizon_lm.engine.merging import MergingLayers
from horizon_lm.engine.micro_batches import ProbeDoneError, split_batches
from horizon_lm.engine.outer import OuterParameters
from horizon_lm.engine.outer_dropout import OuterDropout, outer_dropouts
from horizon_lm.engine.parameters import StandIn
from horizon_lm.engine.recompute import outside_inference_mode
from horizon_lm.engine.residency_planner import ResidencyPlanner
from horizon_lm.engine.token_statistics import TokenStatistics
from horizon_lm.engine.trained_tokens import trained_token_layers, trained_tokens_forward
from horizon_lm.errors import HorizonError, MissingLogitsError, StreamingError, SummedLossWarning
from horizon_lm.model import attention
from horizon_lm.model.active_adapters import ActiveAdapters
from horizon_lm.model.adapter_kinds import is_differentiable_cache, num_prompt_tokens
from horizon_lm.model.block_template import Structure, has_foreign_hooks
from horizon_lm.model.functional import in_place, logprobs_of_logits
from horizon_lm.model.head_path import AUXILIARY, ChunkedPath
from horizon_lm.model.units import ModelParts, adapter_params, replaced_params
from horizon_lm.planning.residency import BatchSize

_MODAL = re.compile("pixel|image|video|audio|speech|visual|vision|patch|feature")


def modal_inputs(call: Mapping[str, Any]) -> list[str]:
    """Return the names of the model's arguments that contain images, video or audio."""
    return [name for name, value in call.items() if isinstance(value, torch.Tensor) and _MODAL.search(name)]


Call = dict[str, Any]  # the arguments of a call of the model, by name


@dataclass(slots=True)
class _Batch:
    """A batch of a pass: a call of the model whose tensors are on the device.

    Attributes:
        call: the arguments.
        host_ids: the caller's own ``input_ids``.
        rows, length: shape of the batch, B and T.
        segments: the documents in its rows, if attention needs them.
    """

    call: Call
    host_ids: Any
    rows: int
    length: int
    segments: attention.Segments | None


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
        self.blocks, self.tables = Blocks(engine), [StreamedEmbedding(engine, module) for module in parts.tables]
        self.head, self.outer, self.dropout = LmHead(engine), OuterParameters(engine), OuterDropout(engine)
        self.blocks.probe_rows = _weakly(self._probe_rows)
        self.chunked = ChunkedLmHead(self.head, path, _weakly(self._call_model)) if path is not None else None
        self.planner, self._merging = ResidencyPlanner(engine), MergingLayers(engine)
        self.statistics: TokenStatistics | None = None  # collects those of each forward pass with labels
        self._adapters_at_begin: Any = None  # their state when the running lock-step began
        watch(self)
        self.switches_per_call = False  # each call in lock-step has its own switches of adapters
        self.expects_mean_loss = engine.mesh is not None  # as DistributedDataParallel takes it
        self.whole_logits = False  # compute all logits at once, because the caller uses them
        self._calls: list[Call] = []  # arguments of the running forward pass, for a row probe
        self.renew: Callable[[], None] | None = None  # attaches the model again if PEFT has changed its adapters
        self._own_forwards: list[tuple[nn.Module, Any]] = []  # before they were replaced; None for those of the class
        self._replaced = self._replace_forwards(parts)
        inside = {id(module) for block in parts.blocks for module in block.modules()}
        self._structure = Structure(
            module for module in parts.model.modules() if id(module) not in inside and module is not parts.model
        )
        self._root = self._root_ids()

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

    def _replace_forwards(self, parts: ModelParts) -> list[tuple[nn.Module, Any]]:
        """Replace the forward methods of streamed modules. Return the modules with their new forward methods."""
        forwards: dict[nn.Module, Any] = {
            module: _weakly(self.blocks.forward, index) for index, module in enumerate(parts.blocks)
        }
        forwards |= {table.module: _weakly(table.forward) for table in self.tables}
        forwards |= {layer: trained_tokens_forward(layer) for layer in trained_token_layers(parts)}
        for module in outer_dropouts(parts.decoder, parts.blocks):
            forwards[module] = _weakly(self.dropout.forward, weakref.ref(module), _own_forward(module))
        forwards[parts.head] = _weakly(self._head_forward)
        if self.chunked is not None:
            path, norm = self.chunked.path, parts.final_norm
            forwards[path.trunk] = _weakly(self.chunked.trunk_forward, _own_forward(path.trunk))
            if path.norm_is_last:
                assert norm is not None
                forwards[norm] = _weakly(self.chunked.norm_forward, _own_forward(norm))
        for module, forward in forwards.items():
            self._own_forwards.append((module, module.__dict__.get("forward")))
            module.forward = forward  # type: ignore[method-assign]
        return list(forwards.items())

    def replace_forwards(self) -> None:
        """Undo `restore_forwards`."""
        for module, forward in self._replaced:
            module.forward = forward

    def restore_forwards(self) -> None:
        """Give streamed modules their own forward methods back, and remove the replaced ones from copies of these modules."""
        replaced = {id(forward) for _, forward in self._replaced}
        for module in self.model.modules():
            if id(module.__dict__.get("forward")) in replaced:
                del module.forward
        for module, forward in self._own_forwards:
            if forward is not None:
                module.forward = forward

    def is_structure_changed(self) -> bool:
        """Return whether a module or parameter of the model was added, removed or replaced."""
        return self._root_ids() != self._root or self._structure.is_changed() or self.blocks.is_structure_changed()

    def require_structure(self) -> None:
        """Raise StreamingError if other code has added, removed or replaced a module or parameter, whose weights would be written
        under the names that they had.
        """
        if self.is_structure_changed():
            raise StreamingError(
                "a module or parameter of the model was added, removed or replaced after horizon_lm.stream(), so its weights "
                "cannot be written under their names; undo the change, or make it first, then stream the model"
            )

    def _root_ids(self) -> list[int]:
        return [*map(id, self.model._modules.values()), *map(id, self.model._parameters.values())]

    def _require_unchanged(self) -> None:
        """Raise StreamingError if other code has replaced a module, a parameter or a forward method of the model."""
        self._structure.require_unchanged("outside of blocks")
        if self._root_ids() != self._root:
            raise StreamingError(
                "a module of the model was added, removed or replaced after horizon_lm.stream(); change the model first, then "
                "stream it"
            )
        for module, forward in self._replaced:
            if module.__dict__.get("forward") is not forward:
                raise StreamingError(
                    f"the forward of a streamed {type(module).__name__} was replaced after horizon_lm.stream(), so it would "
                    "compute without the model's streamed weights; replace it before streaming, or replace the forward of "
                    "an inner module"
                )

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
            return self._forward(self._bind(args, kwargs))

    def _forward(self, call: Call) -> Any:
        has_labels = call.get("labels") is not None or call.get("shift_labels") is not None
        if self.expects_mean_loss and has_labels and torch.is_grad_enabled():
            self._check_loss_scale(call)
        is_chunked = has_labels and self._is_chunked(call)
        return self._meet(("loss", is_chunked), call, partial(self._forward_all, is_chunked, has_labels))

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

    def _meet(self, kind: Hashable, call: Call, compute: Callable[[list[Call]], list[Any]]) -> Any:
        """Compute a call, together with the calls of the same kind that are in lock-step with it."""
        point = (id(self), torch.is_grad_enabled(), kind)
        if place() == 0 or not self.adapter_params:
            return meet(point, call, compute)
        if not self.switches_per_call and not torch.is_grad_enabled():
            # The code around this call may have switched adapters for it, and switches them back afterwards.
            return apart(lambda: compute([call])[0])
        adapters = ActiveAdapters(self.model)
        state = adapters.read()
        if not self.switches_per_call and state != self._adapters_at_begin:
            raise StreamingError(
                "adapters were switched in one of the functions of run_together, where the others would see it; switch them "
                "around run_together, or compute this call under torch.no_grad()"
            )

        def compute_with_adapters(calls: list[Call]) -> list[Any]:
            with adapters.set_to(state):
                return compute(calls)

        return meet((*point, state), call, compute_with_adapters)

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Context manager: remember which adapters were active when the lock-step began."""
        horizon = self._present()
        before = horizon._adapters_at_begin
        if horizon.adapter_params and not horizon.switches_per_call and horizon.model is not None:
            horizon._adapters_at_begin = ActiveAdapters(horizon.model).read()
        try:
            yield
        finally:
            horizon._adapters_at_begin = before

    def _present(self) -> "ModelForward":
        """Return what this object was replaced by, if PEFT has changed the model's adapters."""
        model = self._model()
        if model is None or "_horizon" not in vars(model):  # it is being attached
            return self
        with suppress(HorizonError):  # raised where the model is used
            return model._horizon  # type: ignore[no-any-return]
        return self

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
        calls = [call | _without_labels(each) for call, each in zip(calls, inputs, strict=True)]
        # With several losses their gradients are known only in the backward pass, and so is the sum of the head's.
        head_grads = len(calls) == 1
        outputs = self._run(calls, lambda calls, outer: self._loss_forward(calls, outer, inputs), head_grads)
        return [output.to_tuple() if tuples else output for output, tuples in zip(outputs, as_tuple, strict=True)]

    def token_logprobs(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: WantedLogprobs) -> TokenLogprobs:
        """Compute log-probabilities of labels instead of a loss, for arguments of the model's forward method."""
        call, (temperature, names) = self._bind(args, kwargs), wanted
        if call.get("labels") is None and call.get("shift_labels") is None:
            raise ValueError("give labels or shift_labels")
        _put_ignored_before(call, num_prompt_tokens(self.model))
        is_chunked = self._is_chunked(call)
        kind = ("logprobs", is_chunked, temperature, *names)
        with outside_inference_mode():
            found: TokenLogprobs = self._meet(kind, call, partial(self._logprobs_all, is_chunked, temperature, names))
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
        return _by_name(names, by_token, inputs.labels.shape, self._aux_losses(output))

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
        self._require_unchanged()
        self._merging.unmerge_disabled()
        if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise StreamingError(
                "DistributedDataParallel never sees the gradients of a streamed model; call the streamed model itself, whose "
                "processes sum their gradients without it (docs/distributed.md)"
            )
        if len(calls) > 1:
            self._require_joint(calls)
        batches = [self._prepare(call) for call in calls]
        inputs_need_grad = any(_needs_grad(batch.call.get("inputs_embeds")) for batch in batches)
        recording = torch.is_grad_enabled() and (inputs_need_grad or any(engine.trainable().values()))
        for batch in batches:
            _choose_cache(batch.call, recording)
            self._require_supported(batch.call, batch.rows)
        size = self._size_of(batches)
        if recording and self.planner.is_needed(size):
            self._plan(batches, size)
        embed = self._announce(batches)
        with engine.forward_pass(
            recording=recording,
            rows=[batch.rows for batch in batches],
            embed=embed,
            inputs_need_grad=inputs_need_grad,
            head_grads=head_grads and recording and engine.head_grads_lease.holder is None,
            draws=self.model.training,
            whole_batch=self.blocks.caching,
        ):
            outer = self.outer.load()
            with self.outer.in_place(outer), self._stand_ins():
                return compute([batch.call for batch in batches], outer)

    def _announce(self, batches: list[_Batch]) -> bool:
        """Tell blocks and embedding what the next forward pass computes. Return whether it looks up tokens."""
        calls = [batch.call for batch in batches]
        for table in self.tables:
            table.expect([(batch.call.get("input_ids"), batch.host_ids) for batch in batches])
        # A cache holds all rows together, so blocks compute the whole batch; see `Blocks.forward` for compiled code.
        self.blocks.caching = any(call.get("use_cache") or call.get("past_key_values") is not None for call in calls)
        self.blocks.signatures = [tuple(sorted((k, _rank(v)) for k, v in call.items())) for call in calls]
        self.blocks.segments = [batch.segments for batch in batches]
        return calls[0].get("inputs_embeds") is None

    def _prepare(self, call: Call) -> _Batch:
        """Return a call with its tensors on the device."""
        engine = self.engine
        tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if tokens is None:
            raise ValueError("give input_ids or inputs_embeds")
        rows, length = tokens.shape[:2]
        config = self.model.config.get_text_config()
        attention.reject_large_mask(config, call, rows, length, engine.options.compute_dtype.itemsize)
        device = engine.device.torch_device
        # Segments are found, and the embedding looks up ids, on the host. If the caller already has them there, copying
        # them back would only make the host wait.
        segments = attention.segments_of_call(call, device) if config._attn_implementation == attention.NAME else None
        sent = {k: send(v, device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        return _Batch(sent, call.get("input_ids"), rows, length, segments)

    def _require_joint(self, calls: list[Call]) -> None:
        """Raise StreamingError if calls in lock-step cannot be computed in one pass; prepare the engine for it."""
        if len({call.get("inputs_embeds") is None for call in calls}) > 1:
            raise StreamingError(
                "batches with input_ids and with inputs_embeds cannot be computed together; use one of them"
            )
        if any(call.get("use_cache") or call.get("past_key_values") is not None for call in calls):
            raise StreamingError("a cache of keys and values cannot be used for several batches at once")
        if self.statistics is not None:
            raise StreamingError("statistics of tokens are collected for one batch at a time")
        options = self.engine.options
        if options.device_micro_batch_size is None:  # sums over batches are float32 with micro-batches
            most = max(len(next(v for v in call.values() if isinstance(v, torch.Tensor) and v.ndim)) for call in calls)
            self.reconfigure(replace(options, device_micro_batch_size=most))

    def _size_of(self, batches: list[_Batch]) -> BatchSize:
        """Return the size of a step with these batches."""
        most_rows = self.engine.options.device_micro_batch_size
        return BatchSize(
            tokens=sum(batch.rows * batch.length for batch in batches),
            length=max(batch.length for batch in batches),
            tokens_at_once=max(_tokens_at_once(batch, most_rows) for batch in batches),
            is_masked=any(batch.call.get("attention_mask") is not None for batch in batches),
        )

    def _require_supported(self, call: Call, rows: int) -> None:
        """Raise StreamingError for inputs that a streamed model would not compute exactly."""
        modal = modal_inputs(call)
        if modal and not self._takes_images:
            raise StreamingError(
                f"{modal[0]}: {self._class.__name__} is streamed on text only so far (docs/models.md); leave it out, or stream "
                "with allow_unproven_model=True"
            )
        if modal and (self.engine.options.device_micro_batch_size or rows) < rows:
            raise StreamingError(
                f"{modal[0]} cannot be cut into micro-batches yet; leave device_micro_batch_size unset for images, video and "
                "audio"
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

    def _plan(self, batches: list[_Batch], size: BatchSize) -> None:
        """Plan what stays on the device, using a rehearsal of the largest batch that measures one block per structure."""
        engine = self.engine
        state, most_rows = engine.device.rng_state(), engine.options.device_micro_batch_size
        largest = max(batches, key=lambda batch: _tokens_at_once(batch, most_rows))
        num_micro_batches = len(split_batches([batch.rows for batch in batches], most_rows))
        embed = self._announce([largest])
        with self.planner.planning(size) as plans:
            rehearsal = self.blocks.rehearse()
            try:
                with (
                    torch.no_grad(),
                    engine.forward_pass(
                        recording=False, rows=[largest.rows], embed=embed, inputs_need_grad=False, head_grads=False,
                        draws=False,
                    ),
                    self.outer.in_place(self.outer.load()),
                    self._stand_ins(),
                ):  # fmt: skip
                    self._call_all([largest.call])
            except ProbeDoneError:  # at the last block
                plans.append(rehearsal.plan(size.tokens, num_micro_batches))
            finally:
                self.blocks.rehearsal = None
                engine.device.set_rng_state(state)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments of a call of the model by name, including those in ``**kwargs``."""
        bound = self._signature.bind(None, *args, **kwargs).arguments
        bound.pop(next(iter(self._signature.parameters)))
        extra = {p.name for p in self._signature.parameters.values() if p.kind == p.VAR_KEYWORD}
        call = {k: v for k, v in bound.items() if k not in extra}
        for name in extra & set(bound):
            call |= bound[name]
        return call

    def _call_all(self, calls: list[Call]) -> list[Any]:
        """Run the model's original forward method for each call, unit by unit, and keep the calls for a row probe."""
        self._calls = calls
        try:
            outputs = run_together([partial(self._call_model, **call) for call in calls])
        finally:
            self._calls = []
        if len(calls) > 1:
            run_on_in_backward(outputs)
        return outputs

    def _run_trunk(self, calls: list[Call]) -> list[tuple[Any, torch.Tensor]]:
        """Run the model without its head for each call. Return each output and the hidden states (B, T, H)."""
        chunked = self.chunked
        assert chunked is not None

        def run(call: Call) -> tuple[Any, torch.Tensor]:
            return self._call_model(**call), chunked.take_hidden()

        self._calls = calls
        try:
            with chunked.without_head(with_norm=any(map(self._needs_normed_hidden, calls))):
                return run_together([partial(run, call) for call in calls])
        finally:
            self._calls = []

    def _loss_forward(self, calls: list[Call], outer: dict[str, torch.Tensor], inputs: list[LossInputs]) -> list[Any]:
        """Run the trunk once over whole batches, then norm, head and loss over chunks of their trained tokens."""
        assert self.chunked is not None
        ran = self._run_trunk(calls)
        runs = [
            LossRun(self.chunked, each, self._head_options(call), self.statistics)
            for call, each in zip(calls, inputs, strict=True)
        ]
        losses = self.chunked.compute(runs, [hidden for _, hidden in ran], outer)
        return [_with_loss(output, loss) for (output, _), (loss,) in zip(ran, losses, strict=True)]

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
            _by_name(names, of_call, each.labels.shape, self._aux_losses(output))
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

    # Finding the rows of block inputs

    def _probe_rows(self, index: int, batch: int) -> list[torch.Size]:
        """Return the shapes of a block's inputs for a batch with one more row."""
        rows = self.engine.running.num_rows[batch]
        call = {k: _one_more_row(k, v, rows) for k, v in self._calls[batch].items()}
        shapes: list[torch.Size] = []
        state = self.engine.device.rng_state()
        self._probe((index, batch, shapes), rows + 1)
        try:
            with torch.no_grad():
                self._call_model(**call)
        except ProbeDoneError:
            return shapes
        finally:
            self._probe(None, None)
            self.engine.device.set_rng_state(state)
        raise AssertionError(f"block {index} was not reached by the probe")

    def _probe(self, probing: Any, rows: int | None) -> None:
        self.blocks.probing = probing
        for table in self.tables:
            table.probe_rows = rows


_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # which each chunk has for itself
# Arguments of the decoder, which chunks do not call.
_DECODER_ONLY = ("output_hidden_states", "output_attentions", "position_ids", "cache_position")


def _by_name(
    names: Sequence[str], values: Sequence[torch.Tensor], shape: torch.Size, aux_losses: Mapping[str, torch.Tensor]
) -> TokenLogprobs:
    """Return flat values (B * T,) in the shape (B, T) of the labels, or None for values that were not computed."""
    found = {name: value.view(shape) for name, value in zip(names, values, strict=True)}
    constant = {name: found[name].detach() for name in WITHOUT_GRADIENT if name in found}
    return TokenLogprobs(**(found | constant), **aux_losses)


class MissingLogits:
    """A placeholder for logits that were computed only in chunks; using it raises MissingLogitsError."""

    def __getattr__(self, name: str) -> Any:
        raise MissingLogitsError

    def __getitem__(self, index: Any) -> Any:
        raise MissingLogitsError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MissingLogitsError

    def __repr__(self) -> str:
        return "no logits with head='chunked'"


def _without_labels(inputs: LossInputs) -> Call:
    """Return arguments of a call whose loss the chunks compute.

    With one ignored token instead of all labels, the model's own loss has no cross-entropy: it is the auxiliary loss of
    experts, or zero.
    """
    ignored = inputs.labels.new_full((1, 1), IGNORE_INDEX)
    return {"labels": ignored, "shift_labels": ignored, "num_items_in_batch": inputs.num_items}


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return a model's output with the loss of the chunks added to its own, and without logits."""
    fields = {k: v for k, v in output.items() if k not in ("loss", "logits")}
    return type(output)(loss=loss + output.loss, logits=MissingLogits(), **fields)


def _tokens_at_once(batch: _Batch, most_rows: int | None) -> int:
    """Return the tokens of the batch's largest micro-batch."""
    return min(batch.rows, most_rows or batch.rows) * batch.length


def _put_ignored_before(call: Call, num_tokens: int) -> None:
    """Put ignored labels before those of each row (B, T), for the virtual tokens that the model puts before its tokens."""
    for name in ("labels", "shift_labels") if num_tokens else ():
        if call.get(name) is not None:
            call[name] = nn.functional.pad(call[name], (num_tokens, 0), value=IGNORE_INDEX)


def _needs_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _choose_cache(call: Call, recording: bool) -> None:
    """Turn off the cache of keys and values unless the caller asks for it. Raise StreamingError if that is in training."""
    # Configs have use_cache=True by default; a cache is kept only for callers that ask for one.
    if call.get("use_cache") is None and (recording or call.get("past_key_values") is None):
        call["use_cache"] = False
    if torch.is_grad_enabled() and is_differentiable_cache(call.get("past_key_values")):
        raise StreamingError(
            "past_key_values need gradients, as in PEFT's prefix tuning, which is not streamed; use LoRA, or prompt tuning"
        )
    if recording and call["use_cache"]:
        raise StreamingError(
            "use_cache=True is for generation; in training it would keep every block's keys; set it to False"
        )


def _rank(value: Any) -> Any:
    return value.ndim if isinstance(value, torch.Tensor) else type(value).__name__


def _one_more_row(name: str, value: Any, rows: int) -> Any:
    """Return an argument of the model with its first row repeated at the end."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    # Rows are dimension 0, except in positions with several coordinates (M-RoPE), which are (3, B, T).
    dim = 1 if name == "position_ids" and value.ndim == 3 else 0
    if value.shape[dim] != rows:
        return value
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)


def _weakly(method: Callable[..., Any], *leading: Any) -> Callable[..., Any]:
    """Return a function that calls a method with these leading arguments, and refers to its object weakly."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        function = ref()
        assert function is not None, "the streamed model is gone"
        return function(*leading, *args, **kwargs)

    return call


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs a module's original forward method, and refers to the module weakly."""
    instance, ref = module.__dict__.get("forward"), weakref.ref(module)
    if instance is not None:
        return instance  # type: ignore[no-any-return]

    def forward(*args: Any, **kwargs: Any) -> Any:
        own: Any = ref()
        return type(own).forward(own, *args, **kwargs)

    return forward
