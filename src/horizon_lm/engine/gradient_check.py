"""Comparing some blocks with plain autograd, on the device, in one training step.

A block is computed again the plain way: uncompiled, with weights copied straight from host memory, with attention by
plain kernels, once in float32 and once in the dtype of training. What the engine made of it (outputs, gradients of
inputs, gradients in host memory) may be off from float32 by a few times what plain computation in that dtype is.
"""

from typing import TYPE_CHECKING, Any

import torch

from horizon_lm.engine.executor import Engine
from horizon_lm.engine.micro_batches import slice_rows
from horizon_lm.engine.recompute import no_autocast_cache, replaying
from horizon_lm.engine.tree import Tree
from horizon_lm.errors import GradientMismatchError
from horizon_lm.model import capture
from horizon_lm.model.attention import attending, plain_kernels
from horizon_lm.schedule.ops import block

if TYPE_CHECKING:
    from horizon_lm.engine.block_autograd import BlockAutograd

_TIMES = 4.0  # what plain computation in the dtype of training may be off by
_FLOOR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of a tensor's norm; of less nothing is said
_NOISE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-3,
    torch.float16: 1e-3,
}  # of a block's gradients, root mean square: zero but for rounding

Values = dict[str, torch.Tensor]


class GradientCheck:
    """See the module's description.

    Args:
        engine: of the model.
        num_blocks: to compare, spread over the model.
    """

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        self._engine = engine
        last = engine.parts.num_blocks - 1
        count = min(num_blocks, last + 1)
        self.indices = {round(i * last / max(1, count - 1)) for i in range(count)}
        self._expected: dict[str, tuple[torch.Tensor, float]] = {}  # by parameter: gradient, and how far it may be off

    def compare_block(
        self, node: "BlockAutograd", inputs: list[torch.Tensor], grads: tuple[Any, ...], input_grads: list[Any]
    ) -> None:
        """Compare what a block's node computed; its parameters' gradients are compared when they have landed.

        Args:
            node: after its backward.
            inputs: of its forward, kept apart.
            grads: that its outputs got.
            input_grads: that it made.
        """
        dtype = self._engine.options.compute_dtype
        plain = self._plainly(node, inputs, grads, dtype)
        exact = plain if dtype == torch.float32 else self._plainly(node, inputs, grads, torch.float32)
        bounds = _bounds(exact, plain, dtype)
        got = {_input(i): g for i, g in enumerate(input_grads) if g is not None}
        for name, tensor in got.items():
            _require_close(f"{node.module.name}, {name}", tensor, exact[name], bounds[name])
        for name in self._engine.trained(block(node.index)):
            inner = name.removeprefix(f"{node.module.name}.")
            if inner in exact:
                rounding = torch.finfo(self._engine.store.precision.grad_dtype).eps * float(exact[inner].norm())
                self._expected[name] = exact[inner].cpu(), bounds[inner] + rounding

    def compare_landed(self) -> None:
        """Compare gradients in host memory. They were empty before the backward."""
        self._engine.wait_for_grads()
        for name, (expected, bound) in self._expected.items():
            _require_close(name, self._engine.store.grad(name), expected, bound)
        self._expected = {}

    def _plainly(
        self, node: "BlockAutograd", inputs: list[torch.Tensor], grads: tuple[Any, ...], dtype: torch.dtype
    ) -> Values:
        """Return all gradients of a block in plain autograd, in that dtype; by name of the parameter, or of the input.

        All rows at once: that micro-batches are put together rightly is compared, too. Where a block draws numbers, they
        follow the micro-batch, and so does this.
        """
        whole = [(0, node.num_rows)]
        try:
            return self._of_rows(node, inputs, grads, dtype, whole)
        except _DrawsNumbersError:
            return self._of_rows(node, inputs, grads, dtype, node.micro_batches)

    def _of_rows(
        self, node: "BlockAutograd", inputs: list[torch.Tensor], grads: tuple[Any, ...], dtype: torch.dtype,
        ranges: list[tuple[int, int]],
    ) -> Values:  # fmt: skip
        engine = self._engine
        params = {
            name: engine.store.weight(f"{node.module.name}.{name}")
            .to(engine.device.torch_device, dtype, copy=True)
            .requires_grad_()
            for name in node.module.param_names()
        }
        leaves = [
            t.detach().to(dtype if t.is_floating_point() else t.dtype).requires_grad_(t.is_floating_point())
            for t in inputs
        ]
        dims = node.dims if len(ranges) > 1 else [None] * len(leaves)
        for number, (start, stop) in enumerate(ranges):
            with (
                torch.enable_grad(), no_autocast_cache(), node.module.bound(params), node.module.in_mode(node.mode),
                replaying(engine.device, node.kept.states[number]), attending(node.segments, start, stop),
                plain_kernels(), capture.capture(node.keys) as captured,
            ):  # fmt: skip
                part = [slice_rows(t, d, start, stop) for t, d in zip(leaves, dims, strict=True)]
                before = torch.get_rng_state()
                args, kwargs = node.call.rebuild(part)
                output = node.module.forward(*args, plainly=True, **kwargs)
                if len(ranges) < len(node.micro_batches) and not torch.equal(before, torch.get_rng_state()):
                    raise _DrawsNumbersError
            tensors = Tree((output, captured)).tensors
            pairs = [
                (t, _rows_of(g, t, start, stop, len(ranges)).to(t.dtype))
                for t, g in zip(tensors, grads, strict=True)
                if g is not None and t.requires_grad
            ]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        found = {name: p.grad.float() for name, p in params.items() if p.grad is not None}
        return found | {_input(i): leaf.grad.float() for i, leaf in enumerate(leaves) if leaf.grad is not None}


class _DrawsNumbersError(Exception):
    """A block's forward advances a generator, as dropout does."""


def _input(index: int) -> str:
    return f"gradient of input {index}"


def _rows_of(grad: torch.Tensor, output: torch.Tensor, start: int, stop: int, ranges: int) -> torch.Tensor:
    per_row = output.shape[0] // (stop - start) if output.ndim else 0
    return grad if ranges == 1 else grad[start * per_row : stop * per_row]


def _bounds(exact: Values, plain: Values, dtype: torch.dtype) -> dict[str, float]:
    """How far a gradient may be off: a few times what plain computation in ``dtype`` is, and at least some rounding."""
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
    off = float((got.to(expected.device).float() - expected).norm())
    if not off <= bound:
        norm = float(expected.norm())
        raise GradientMismatchError(
            f"check_gradients: {name} differs from plain autograd by {off:.3g}, where its norm is {norm:.3g} and {bound:.3g} is "
            "allowed. Set compile=False, or another attn_implementation, to find the kernel that is wrong; please report it."
        )
