"""Find the order in which passes compute the units of a model, before they begin.

The decoder's blocks are computed in every pass. Which towers are computed, whether before or after the embedding, and through which blocks
gradients flow is decided by the model's own code. It is tried once for each kind of call, without weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import EMBED, Unit, block
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import Batch
from horizon_lm.engine.passes.forward_state import PassOrder
from horizon_lm.errors import StreamingError
from horizon_lm.model import attention
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.outer_trial import require_causal_images
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.planning.measure.block_probe import output_on_meta
from horizon_lm.planning.measure.pass_trial import PassTrial


class PassOrders:
    """The orders of the units of a model in its passes.

    Args:
        engine: the model's engine.
        call_model: the model's own forward method.
    """

    def __init__(self, engine: Engine, call_model: Callable[..., Any]) -> None:
        self._engine, self._call_model = engine, call_model
        self._known: dict[Any, PassOrder] = {}  # by the kind of a call, and what is trained
        self._kinds: dict[Any, nn.Module] = {}  # a block on the meta device, by structure
        self._has_causal_images = False  # known to have them

    def of_text(self, batch: Batch, inputs_need_grad: bool = False) -> PassOrder:
        """Return the order of a pass that computes no tower."""
        parts = self._engine.parts
        with torch._C.DisableTorchFunctionSubclass():
            first = parts.decoder_blocks.start if inputs_need_grad else parts.first_differentiated()
        units = _embedding_of(batch) + tuple(map(block, parts.decoder_blocks))
        return PassOrder(units, frozenset(range(first, parts.num_blocks)))

    def of(self, batches: Sequence[Batch], recording: bool, inputs_need_grad: bool) -> PassOrder:
        """Return the order of a pass.

        Args:
            batches: what the pass computes.
            recording: a backward pass may follow.
            inputs_need_grad: embeddings of the caller need a gradient.

        Raises:
            StreamingError: a batch passes through a tower twice, or batches pass through units in different orders.
        """
        if any(batch.modal for batch in batches):
            self._require_causal_images()
        if not self._engine.parts.towers:
            return self.of_text(batches[0], inputs_need_grad)
        mesh = self._engine.mesh
        own = merged([self._of_batch(batch, recording) for batch in batches])
        if mesh.size == 1:
            return own
        text = [str(unit) for unit in own.units], sorted(own.differentiated)
        everywhere = [
            PassOrder(tuple(map(Unit.parse, units)), frozenset(differentiated))
            for units, differentiated in mesh.exchange("the order of a pass", text)
        ]
        order = merged(everywhere)
        absent = frozenset(unit.block_index for unit in order.units if unit.is_block and unit not in own.units)
        return PassOrder(order.units, order.differentiated, absent)

    def _require_causal_images(self) -> None:
        """Raise ImagesNotSupportedError if tokens of images see later ones, and the attention of the model cannot compute that."""
        parts = self._engine.parts
        if not self._has_causal_images and parts.model.config.get_text_config()._attn_implementation == attention.NAME:
            require_causal_images(parts)
            self._has_causal_images = True

    def _of_batch(self, batch: Batch, recording: bool) -> PassOrder:
        """Return the order of a pass with one batch, from a trial of the model's code unless one of its kind was tried before."""
        parts = self._engine.parts
        with torch._C.DisableTorchFunctionSubclass():
            trained = [ref.param.requires_grad for ref in parts.refs()] if recording else []
        names = sorted((name, _kind(value)) for name, value in batch.call.items())
        key = (tuple(names), tuple(trained), recording)
        if key not in self._known:
            self._known[key] = self._find(batch, recording)
        return self._known[key]

    def _find(self, batch: Batch, recording: bool) -> PassOrder:
        """Run the model's code around its blocks on a batch, and return the order in which it calls them."""
        engine = self._engine
        found = PassTrial(
            engine.parts, self._call_model, engine.options.compute_dtype, engine.device.torch_device, self._output_on_meta, recording
        )  # fmt: skip
        with engine.device.rng_state_restored():
            return PassOrder(*found.run(batch.call))

    def _output_on_meta(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a block for these arguments on the meta device; its hidden states if it cannot be tried there."""
        module, parts = self._engine.parts.blocks[index], self._engine.parts
        key = structure_key(module)
        if key not in self._kinds:
            self._kinds[key] = meta_copy(module)
        in_float32 = parts.in_float32_inside(parts.block_names[index])
        try:
            return output_on_meta(self._kinds[key], args, kwargs, self._engine.options.compute_dtype, in_float32)
        except Exception:  # the model's own code may raise any exception on the meta device
            return args[0] if args else kwargs["hidden_states"]


def merged(orders: Sequence[PassOrder]) -> PassOrder:
    """Return an order with the units of all orders, each of which it keeps.

    Raises:
        StreamingError: two orders have units in different orders.
    """
    first, *others = orders
    if all(each == first for each in others):  # as nearly always
        return first
    left, units = [list(each.units) for each in orders], list[Unit]()
    while any(left):
        later = {unit for each in left for unit in each[1:]}
        unit = next((each[0] for each in left if each and each[0] not in later), None)
        if unit is None:
            raise StreamingError(
                "batches pass through the parts of the model in different orders; compute them one by one"
            )
        units.append(unit)
        left = [each[1:] if each[:1] == [unit] else each for each in left]
    return PassOrder(tuple(units), frozenset().union(*(each.differentiated for each in orders)))


def _embedding_of(batch: Batch) -> tuple[Unit, ...]:
    """Return the embedding, if a batch looks its tokens up there."""
    return (EMBED,) if batch.call.get("inputs_embeds") is None else ()


def _kind(value: Any) -> str:
    """Return a description of an argument of the model by which its code may decide what to call."""
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.ndim} dimensions, {'differentiable' if value.requires_grad else 'constant'}"
    return repr(value) if isinstance(value, bool | str | None) else type(value).__name__
