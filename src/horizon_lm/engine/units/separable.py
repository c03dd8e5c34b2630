"""Prove that a block computes the parts of its inputs alone as it computes them together, with random weights and hidden states."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.micro_batches import BlockCall, RowDim, Rows, run_block, slice_all, slice_rows
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.errors import DeviceFaultError, DeviceMemoryError
from horizon_lm.model.block_template import Mode, StreamedBlock

_TOLERANCE = 0.05  # of the largest output: rounding in any dtype is below, and a wrong computation above


def is_separable(
    engine: Engine, block: StreamedBlock, call: BlockCall, dims: Sequence[RowDim], parts: Sequence[Rows]
) -> bool:
    """Return whether a block computes two parts of its inputs alone as it computes both together.

    It needs the memory of a block's weights, and of a recomputation of both parts.

    Args:
        engine: the engine of the model.
        block: the block.
        call: its arguments.
        dims: the row dimension of each input.
        parts: two parts, one after the other.
    """
    (start, middle), (_, stop) = parts
    first, second = (0, middle - start), (middle - start, stop - start)
    both, dim = slice_all(call.tensors, dims, (start, stop)), dims[call.hidden]
    assert isinstance(dim, int)
    generator = torch.Generator(engine.device.torch_device).manual_seed(0)
    hidden = both[call.hidden] = _random(both[call.hidden].shape, both[call.hidden].dtype, generator).requires_grad_()

    def run(inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = call.rebuild(inputs)
        return Tree(run_block(block, args, kwargs, (), None, (start, stop), uncompiled=True)).tensors

    def is_alone(own: Rows, other: Rows) -> bool:
        outputs = [slice_rows(each, dim, own) for each in together]
        (grad,) = torch.autograd.grad(
            outputs, hidden, [_random(each.shape, each.dtype, generator) for each in outputs], retain_graph=True
        )
        # Exactly zero, because attention that a mask or a border ends has no gradient. Values alone would not show a weak dependence.
        if slice_rows(grad, dim, other).any():
            return False
        return all(map(_are_close, run(slice_all(both, dims, own)), outputs))

    try:
        with engine.device.rng_state_restored(), _undisturbed(engine, block, generator), torch.enable_grad():
            together = run(both)
            if any(each.ndim <= dim or each.shape[dim] != stop - start for each in together):
                return False
            return is_alone(first, second) and is_alone(second, first)
    except (torch.OutOfMemoryError, DeviceMemoryError, DeviceFaultError):  # these say nothing about the block
        raise
    except Exception:  # the model's own code may raise any exception for a part of its inputs
        return False


@contextmanager
def _undisturbed(engine: Engine, block: StreamedBlock, generator: torch.Generator) -> Iterator[None]:
    """Context manager: let a block compute with random weights, since its own may not be on the device, and without dropout and hooks."""
    weights = {}
    for name in block.param_names():
        full = f"{block.name}.{name}"
        shape = engine.refs[full].param.shape
        values = _random(shape, engine.parts.computed_dtype(full, engine.options.compute_dtype), generator)
        weights[name] = values / shape[-1] ** 0.5 if len(shape) > 1 else values
    mode = block.mode()
    hooks = tuple(tuple(OrderedDict[int, Any]() for _ in of_module) for of_module in mode.hooks)
    with block.bound(weights), block.in_mode(Mode((False,) * len(mode.training), hooks)):
        yield


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of a normal distribution."""
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=generator.device)


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).detach().abs().max() <= _TOLERANCE * expected.detach().abs().max())
