"""Compare some blocks with plain autograd, on the device, in one training step.

The reference is computed without the engine: the block uncompiled, its weights copied straight from host memory, attention
by plain kernels; once in float32 and once in the dtype of training. The engine's gradients (of the block's inputs, and of
its parameters in host memory) may differ from the float32 gradients by a few times as much as those of plain autograd
in the dtype of training.
"""

from collections.abc import Sequence

import torch

from horizon_lm.common.units import block
from horizon_lm.device.base import same_rng_state
from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.left_state import rejecting_state
from horizon_lm.engine.passes.micro_batches import MicroBatch, rows_of_output, run_block, split_batches
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.engine.units.block_autograd import BlockAutograd
from horizon_lm.errors import GradientMismatchError
from horizon_lm.model.attention import plain_kernels

_TIMES = 4.0  # allowed error, relative to the error of plain autograd in the dtype of training
# Minimum allowed error, relative to the tensor's norm.
_FLOOR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# Also allowed, relative to the root mean square of all the block's gradients: some gradients are zero except for
# rounding (the bias of a key projection, for example), so their own norm is no measure.
_NOISE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}

Grads = dict[str, torch.Tensor]  # by the parameter's name inside the block, or a description of the input


class GradientCheck:
    """A comparison of the gradients of some blocks with the gradients of plain autograd; see the module's docstring.

    Args:
        engine: the model's engine.
        num_blocks: the number of blocks to compare, spread evenly over the decoder.
    """

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        self._engine = engine
        # Of the decoder, which every batch passes through; and one block of each tower.
        blocks = engine.parts.decoder_blocks
        last, count = len(blocks) - 1, min(num_blocks, len(blocks))
        self.indices = {blocks[round(i * last / max(1, count - 1))] for i in range(count)}
        self.indices |= {tower[0] for tower in engine.parts.towers}
        self._expected: dict[str, tuple[torch.Tensor, float]] = {}  # by parameter: gradient, and the error allowed

    def compare_block(
        self, node: BlockAutograd, inputs: list[torch.Tensor], grads: Sequence[torch.Tensor | None],
        input_grads: list[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Compare the gradients of a block's inputs now, and remember the expected gradients of its parameters.

        Args:
            node: the block's node, after its backward pass.
            inputs: copies of the inputs of its forward pass.
            grads: the gradients of its outputs; None for an output that no loss depends on.
            input_grads: the gradients that the node computed for its inputs; None for an input without one.

        Raises:
            GradientMismatchError: a gradient differs by more than is allowed.
        """
        dtype = self._engine.options.compute_dtype
        plain = self._plain_grads(node, inputs, grads, dtype)
        # In float32, plain autograd is the reference itself; otherwise its own error says how much rounding is normal.
        exact = plain if dtype == torch.float32 else self._plain_grads(node, inputs, grads, torch.float32)
        bounds = _allowed_errors(exact, plain, dtype)
        for number, grad in enumerate(input_grads):
            if grad is not None:
                name = _input_name(number)
                _require_close(f"{node.module.name}, {name}", grad, exact[name], bounds[name])
        for name in self._engine.trained_names(block(node.index)):
            inner = name.removeprefix(f"{node.module.name}.")
            # A parameter that the batch does not use, such as an idle expert, has no gradient to compare with.
            if inner in exact:
                # In host memory a gradient has the store's dtype: one more rounding than on the device.
                rounding = torch.finfo(self._engine.store.precision.grad_dtype).eps * float(exact[inner].norm())
                self._expected[name] = exact[inner].cpu(), bounds[inner] + rounding

    def compare_landed(self) -> None:
        """Compare gradients in host memory, which must have been empty before the backward pass.

        Raises:
            GradientMismatchError: a gradient differs by more than is allowed.
        """
        self._engine.access.wait_for_grads()
        for name, (expected, bound) in self._expected.items():
            _require_close(name, self._engine.store.grad(name), expected, bound)
        self._expected = {}

    def _plain_grads(
        self,
        node: BlockAutograd,
        inputs: list[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> Grads:
        """Return all gradients of a block, computed by plain autograd in that dtype.

        All rows are computed together, so that the comparison also covers splitting and merging micro-batches. A block
        that draws random numbers (dropout) draws them per micro-batch, so its reference is computed per micro-batch,
        too.
        """
        try:
            return self._grads_of_rows(node, inputs, grads, dtype, split_batches(node.num_rows, None))
        except _DrawsNumbersError:
            return self._grads_of_rows(node, inputs, grads, dtype, node.micro_batches)

    def _grads_of_rows(
        self, node: BlockAutograd, inputs: list[torch.Tensor], grads: Sequence[torch.Tensor | None], dtype: torch.dtype,
        parts: Sequence[MicroBatch],
    ) -> Grads:  # fmt: skip
        """Return the gradients summed over ``parts``, computed by plain autograd in that dtype.

        Raises:
            _DrawsNumbersError: the block draws random numbers, and ``parts`` are not the micro-batches that it was computed in.
        """
        engine, params = self._engine, self._params(node, dtype)
        # Only inputs that required a gradient do so here: a mask that required one would be another computation.
        leaves = node.saved.input_leaves([t.to(dtype) if t.is_floating_point() else t for t in inputs], slice(None))
        for number, part in enumerate(parts):
            with (
                torch.enable_grad(), no_autocast_cache(), node.module.bound(params), node.module.in_mode(node.mode),
                engine.device.rng_state_restored(node.saved.rng_states[number]), plain_kernels(),
            ):  # fmt: skip
                args, kwargs = node.calls.calls[part.batch].rebuild(node.calls.inputs(leaves, part))
                before = engine.device.rng_state()
                segments = node.segments[part.batch]
                with rejecting_state(node.module.name, args, kwargs):
                    output = run_block(node.module, args, kwargs, node.keys, segments, part.rows, uncompiled=True)
                # A whole batch would draw other numbers than its micro-batches did.
                if len(parts) < len(node.micro_batches) and not same_rng_state(before, engine.device.rng_state()):
                    raise _DrawsNumbersError
            pairs = [
                (t, rows_of_output(g, t, part).to(t.dtype))
                for t, g in zip(Tree(output).tensors, node.entries_of_batch(grads, part), strict=True)
                if g is not None and t.requires_grad
            ]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        found = {name: p.grad.float() for name, p in params.items() if p.grad is not None}
        return found | {_input_name(i): leaf.grad.float() for i, leaf in enumerate(leaves) if leaf.grad is not None}

    def _params(self, node: BlockAutograd, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return leaves with a block's weights on the device, by their names inside the block."""
        engine, params = self._engine, {}
        for name in node.module.param_names():
            full = f"{node.module.name}.{name}"
            # From host memory, past copies and slots, whose mistakes would be in both results otherwise.
            values = engine.store.decode(full) if full in engine.store.codecs else engine.store.weight(full)
            on_device = values.to(engine.device.torch_device, engine.parts.computed_dtype(full, dtype), copy=True)
            params[name] = on_device.requires_grad_()
        return params


class _DrawsNumbersError(Exception):
    """Raised if a block draws random numbers, for example for dropout."""


def _input_name(index: int) -> str:
    """Return the name of an input's gradient among those of a block."""
    return f"gradient of input {index}"


def _allowed_errors(exact: Grads, plain: Grads, dtype: torch.dtype) -> dict[str, float]:
    """Return the allowed error of each gradient as a norm: a multiple of the error of plain autograd in ``dtype``, plus
    rounding.
    """
    numel = sum(t.numel() for t in exact.values())
    rms = (sum(float(t.square().sum()) for t in exact.values()) / max(1, numel)) ** 0.5
    return {
        name: max(
            _TIMES * float((plain[name] - value).norm()),
            _FLOOR[dtype] * float(value.norm()),
            _NOISE[dtype] * rms * value.numel() ** 0.5,
        )
        for name, value in exact.items()
    }


def _require_close(name: str, got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Raise GradientMismatchError if the norm of a gradient's error is above a bound, or is NaN."""
    off = float((got.to(expected.device).float() - expected).norm())
    if not off <= bound:
        norm = float(expected.norm())
        raise GradientMismatchError(
            f"check_gradients: {name} differs from plain autograd by {off:.3g}; its norm is {norm:.3g}, and {bound:.3g} is "
            "allowed. Set compile=False, or another attn_implementation, to find the kernel that is wrong; please report it."
        )
