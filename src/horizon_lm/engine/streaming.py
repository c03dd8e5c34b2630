"""What runs in the place of the forwards of a streamed model and its modules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from horizon_lm.device.base import send
from horizon_lm.engine.blocks import Blocks
from horizon_lm.engine.chunked_head import IGNORED, ChunkedHead, LossInputs
from horizon_lm.engine.engine import Engine
from horizon_lm.engine.head import Head
from horizon_lm.engine.logprobs import LogprobRun, TokenLogprobs
from horizon_lm.engine.loss import LossRun
from horizon_lm.engine.outer import Outer
from horizon_lm.engine.rows import ProbeDoneError
from horizon_lm.engine.table import Table
from horizon_lm.errors import StreamingError
from horizon_lm.model import attention
from horizon_lm.model.logits import logprobs_of_logits
from horizon_lm.model.parts import ModelParts
from horizon_lm.plan.residency import BatchSize


class Streaming:
    """A streamed model's connection to its engine: what runs in the place of its modules' forwards."""

    def __init__(self, engine: Engine, model_class: Any) -> None:
        self.engine = engine
        parts = engine.parts
        self._model, self._class = parts.model, model_class
        self._signature = inspect.signature(model_class.forward)
        self.blocks, self.table, self.head, self.outer = Blocks(engine), Table(engine), Head(engine), Outer(engine)
        self.blocks.probe_rows = self._probe_rows
        self.chunked = ChunkedHead(self.head, self._call_model) if engine.options.head == "chunked" else None
        self._in_chunked_forward = False
        self._call: dict[str, Any] = {}
        self._replace_forwards(parts)

    def _replace_forwards(self, parts: ModelParts) -> None:
        for index, module in enumerate(parts.blocks):
            module.forward = _bound(self.blocks.forward, index, module)  # type: ignore[method-assign]
        parts.embed.forward = self.table.forward  # type: ignore[method-assign]
        parts.head.forward = self._head_forward  # type: ignore[method-assign]
        if self.chunked is None:
            return
        decoder, norm, chunked = parts.decoder, parts.final_norm, self.chunked

        def decoder_forward(*args: Any, **kwargs: Any) -> Any:
            output = type(decoder).forward(decoder, *args, **kwargs)
            chunked.decoder_output = type(output)
            return output

        decoder.forward = decoder_forward  # type: ignore[method-assign]
        if norm is not None:
            norm.forward = lambda hidden: (  # type: ignore[method-assign]
                chunked.seen_by_norm(hidden) if self._in_chunked_forward else type(norm).forward(norm, hidden)
            )

    def _head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.chunked is not None and (self._in_chunked_forward or self.chunked.in_chunk):
            return self.chunked.seen_by_head(hidden)
        return self.head.project(hidden)

    def _call_model(self, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self._class.forward(self._model, **kwargs)  # type: ignore[attr-defined]

    # Forward

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the model through the engine. Arguments are those of the model's own forward."""
        call = self._bind(args, kwargs)
        if self.chunked is None or (call.get("labels") is None and call.get("shift_labels") is None):
            return self._run(call, self._whole_forward, head_grads=False)
        inputs = LossInputs.of(call, self.engine.device.torch_device)
        return self._run(call, lambda call, outer: self._loss_forward(call, outer, inputs), head_grads=True)

    def token_logprobs(self, kwargs: dict[str, Any], temperature: float, names: Sequence[str]) -> TokenLogprobs:
        """Log-probabilities of labels, instead of a loss. Arguments are those of the model's own forward."""
        call = self._bind((), kwargs)
        if call.get("labels") is None and call.get("shift_labels") is None:
            raise ValueError("give labels or shift_labels")
        inputs = LossInputs.of(call, self.engine.device.torch_device)
        if self.chunked is not None:
            return self._run(
                call, lambda call, outer: self._token_forward(call, outer, inputs, temperature, names), False
            )
        output = self._run(call, self._whole_forward, head_grads=False)
        logits = output.logits
        labels = inputs.labels.reshape(-1)[inputs.trained]
        values = logprobs_of_logits(logits.flatten(0, 1)[inputs.trained], labels, temperature, names)
        nothing = torch.zeros(inputs.labels.numel(), dtype=torch.float32, device=logits.device)
        by_token = [nothing.index_put((inputs.trained,), value) for value in values]
        return _by_name(names, by_token, inputs.labels.shape, self._aux_loss(output))

    def _aux_loss(self, output: Any) -> torch.Tensor | None:
        """What a forward without labels would have added to its loss."""
        aux = getattr(output, "aux_loss", None)
        return None if aux is None else aux * self._model.router_aux_loss_coef  # type: ignore[attr-defined]

    def _run(
        self, call: dict[str, Any], compute: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], head_grads: bool
    ) -> Any:
        """A pass of the engine around ``compute``. ``head_grads``: it makes the head's gradients where it can."""
        engine = self.engine
        device = engine.device.torch_device
        tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if tokens is None:
            raise ValueError("give input_ids or inputs_embeds")
        config = self._model.config.get_text_config()
        varlen = config._attn_implementation == attention.NAME
        self.blocks.segments = attention.segments_of_call(call, device) if varlen else None
        rows, length = tokens.shape[:2]
        attention.refuse_large_mask(config, call, rows, length, engine.options.compute_dtype.itemsize)
        given = call.get("input_ids")
        call = {k: send(v, device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        self.table.expect(call.get("input_ids"), given)
        inputs_need_grad = bool(call.get("inputs_embeds") is not None and call["inputs_embeds"].requires_grad)
        trains = inputs_need_grad or any(ref.param.requires_grad for ref in engine.refs.values())
        recording = torch.is_grad_enabled() and trains
        if call.get("use_cache") is None and (recording or call.get("past_key_values") is None):
            call["use_cache"] = False
        if recording and call["use_cache"]:
            raise StreamingError("use_cache=True is for generation; in training it would keep every block's keys")

        self.blocks.signature = tuple(sorted((k, _rank(v)) for k, v in call.items()))
        embed = call.get("inputs_embeds") is None
        at_once = min(rows, engine.options.device_micro_batch_size or rows) * length
        size = BatchSize(rows * length, length, at_once, call.get("attention_mask") is not None)
        if recording and engine.needs_plan(size):
            self._plan(lambda outer: compute(dict(call), outer), size, rows, embed)
        with engine.forward_pass(
            recording=recording,
            rows=rows,
            embed=embed,
            inputs_need_grad=inputs_need_grad,
            head_grads=head_grads and recording and engine.head_buffer.holder is None,
        ):
            outer = self.outer.load()
            with self.outer.in_place(outer):
                output = compute(call, outer)
        return output

    def _plan(self, compute: Callable[[dict[str, torch.Tensor]], Any], size: BatchSize, rows: int, embed: bool) -> None:
        """Plan what may stay on the device: rehearse a forward up to the last block, and see what blocks take."""
        engine = self.engine
        state = engine.device.rng_state()
        with engine.planning(size) as plans:
            rehearsal = self.blocks.rehearse()
            try:
                with (
                    torch.no_grad(),
                    engine.forward_pass(
                        recording=False, rows=rows, embed=embed, inputs_need_grad=False, head_grads=False
                    ),
                    self.outer.in_place(outer := self.outer.load()),
                ):
                    compute(outer)
            except ProbeDoneError:
                plans.append(rehearsal.plan())
            finally:
                self.blocks.rehearsal = None
                engine.device.set_rng_state(state)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(self._model, *args, **kwargs).arguments
        bound.pop("self")
        extra = {p.name for p in self._signature.parameters.values() if p.kind == p.VAR_KEYWORD}
        call = {k: v for k, v in bound.items() if k not in extra}
        for name in extra & set(bound):
            call |= bound[name]
        return call

    def _whole_forward(self, call: dict[str, Any], outer: Any = None) -> Any:
        """The model's own forward, run so that a probe can repeat it."""
        self._call = call
        try:
            return self._call_model(**call)
        finally:
            self._call = {}

    def _loss_forward(self, call: dict[str, Any], outer: dict[str, torch.Tensor], inputs: LossInputs) -> Any:
        """Blocks once over the whole batch, then norm, head and loss over chunks of its trained tokens."""
        assert self.chunked is not None
        if not isinstance(call.get("logits_to_keep", 0), int) or call.get("logits_to_keep", 0):
            raise StreamingError("logits_to_keep together with labels needs head='whole'")
        as_tuple = call.pop("return_dict", None) is False
        # One token without a label: what is left of the loss is what the model adds to it (experts' balance).
        nothing = inputs.labels.new_full((1, 1), IGNORED)
        unlabelled = {"labels": nothing, "shift_labels": nothing, "num_items_in_batch": inputs.num_items}
        with self._without_head():
            output = self._whole_forward(call | unlabelled)
            run = LossRun(self.chunked, inputs, self._head_options(call))
            (loss,) = self.chunked.compute(run, [outer[name] for name in self.chunked.norm_names])
        fields = {k: v for k, v in output.items() if k not in ("loss", "logits")}
        result = type(output)(loss=loss + output.loss, **fields)
        return result.to_tuple() if as_tuple else result

    def _token_forward(
        self, call: dict[str, Any], outer: dict[str, torch.Tensor], inputs: LossInputs, temperature: float,
        names: Sequence[str],
    ) -> TokenLogprobs:  # fmt: skip
        """The same with log-probabilities in the place of the loss."""
        chunked = self.chunked
        assert chunked is not None
        with self._without_head():
            output = self._whole_forward(call)
            run = LogprobRun(chunked, inputs, self._head_options(call), temperature, names)
            values = chunked.compute(run, [outer[name] for name in chunked.norm_names])
        return _by_name(names, values, inputs.labels.shape, self._aux_loss(output))

    @contextmanager
    def _without_head(self) -> Iterator[None]:
        """Inside, the model's forward leaves norm and head to chunks."""
        self._in_chunked_forward = True
        try:
            yield
        finally:
            self._in_chunked_forward = False

    def _head_options(self, call: dict[str, Any]) -> dict[str, Any]:
        """What of a call the model's forward is given for each chunk, too."""
        options = {k: v for k, v in call.items() if k not in self._signature.parameters and k not in _DECODER_ONLY}
        without_aux = {name: False for name in _AUXILIARY if name in self._signature.parameters}
        return options | without_aux | {"use_cache": False}

    # Finding the rows of block inputs

    def _probe_rows(self, index: int) -> list[torch.Size]:
        """Shapes of a block's inputs if the batch had one more row."""
        rows = self.engine.num_rows
        call = {k: _one_more_row(k, v, rows) for k, v in self._call.items()}
        shapes: list[torch.Size] = []
        state = self.engine.device.rng_state()
        self.blocks.probing, self.table.probe_rows = (index, shapes), rows + 1
        try:
            with torch.no_grad():
                self._call_model(**call)
        except ProbeDoneError:
            return shapes
        finally:
            self.blocks.probing, self.table.probe_rows = None, None
            self.engine.device.set_rng_state(state)
        raise AssertionError(f"block {index} was not reached by the probe")


_AUXILIARY = ("output_router_logits",)
_DECODER_ONLY = ("output_hidden_states", "output_attentions", "position_ids", "cache_position")


def _by_name(
    names: Sequence[str], values: Sequence[torch.Tensor], shape: torch.Size, aux_loss: torch.Tensor | None
) -> TokenLogprobs:
    """Flat values in the shape of the labels; None for those that nobody wanted."""
    found = {name: value.view(shape) for name, value in zip(names, values, strict=True)}
    return TokenLogprobs(found["logprobs"], found.get("mean"), found.get("entropy"), aux_loss)


def _rank(value: Any) -> Any:
    return value.ndim if isinstance(value, torch.Tensor) else type(value).__name__


def _one_more_row(name: str, value: Any, rows: int) -> Any:
    """An argument of the model's forward with its first row once more."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    # Hugging Face batches run over dimension 0, but for positions with several coordinates (M-RoPE).
    dim = 1 if name == "position_ids" and value.ndim == 3 else 0
    if value.shape[dim] != rows:
        return value
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)


def _bound(function: Callable[..., Any], index: int, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(index, module, *args, **kwargs)

    return forward
