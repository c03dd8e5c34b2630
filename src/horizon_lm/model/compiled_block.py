"""Compile a block in two versions: one that computes its outputs, and one without what is computed for them alone.

A block is computed again for the sake of its graph: of the tensors that autograd saves. Nobody reads its outputs then, so what only
they need, the product of a down projection and a sum in most models, is left out of the second version. Both versions are compiled
from one trace, so they save the same tensors, computed in the same way, for the one compiled backward pass.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from horizon_lm.errors import first_line, warn
from horizon_lm.model.of_thread import OfThread


class CompiledBlock:
    """A compiled function whose outputs are not read in some of its calls.

    Args:
        function: the forward method of a class of blocks.
        backend: backend of torch.compile. Only "inductor" compiles two versions.
    """

    def __init__(self, function: Callable[..., Any], backend: str) -> None:
        self._function, self._backend = function, backend
        # As one graph, because the code between several graphs reads what they return.
        own_backend = _compile_two_versions if backend == "inductor" else backend
        self._compiled = torch.compile(function, backend=own_backend, fullgraph=True)
        self._is_one_graph = True

    def __call__(self, unread: bool, *args: Any, **kwargs: Any) -> Any:
        """Call the function, from now on in several graphs if it cannot be compiled as one. ``unread``: nobody reads the output."""
        if not self._is_one_graph:
            return self._compiled(*args, **kwargs)
        if is_in_torch_dispatch_mode(include_infra_modes=False):  # in which torch compiles nothing
            return self._function(*args, **kwargs)
        try:
            with _is_unread.replaced(unread):
                return self._compiled(*args, **kwargs)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = first_line(error)
        self._is_one_graph, self._compiled = False, torch.compile(self._function, backend=self._backend)
        name = getattr(self._function, "__qualname__", repr(self._function))
        warn(
            f"{name} cannot be compiled as one graph ({reason}), so its recompute in the backward pass computes outputs that nobody reads"
        )
        return self._compiled(*args, **kwargs)


_is_unread = OfThread(False)  # nobody reads the outputs of the compiled code that this thread runs


class _TwoVersions:
    """The two versions of a compiled forward pass, as AOTAutograd calls them: with a list of arguments that it empties."""

    _boxed_call = True

    def __init__(self, whole: Callable[..., Any], without_outputs: Callable[..., Any]) -> None:
        self._whole, self._without_outputs = whole, without_outputs

    def __call__(self, args: list[Any]) -> Any:
        return (self._without_outputs if _is_unread.value else self._whole)(args)


def _compile_two_versions(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph as the backend "inductor" does, its forward pass in two versions."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(enable_autograd_cache=False):  # the cache knows one version
        return compile_fx(graph, inputs, inner_compile=_compile_inner)


def _compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile one graph: in two versions if it is a forward pass that is differentiated, otherwise as inductor does.

    The backward pass is compiled for the strides of the tensors that the forward pass saves, so both versions must save the same ones;
    if they do not, only the first version is used.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner

    context, is_forward = TracingContext.try_get(), not (options.get("is_backward") or options.get("is_inference"))
    if context is None or context.fw_metadata is None or context.output_strides is None or not is_forward:
        return compile_fx_inner(graph, inputs, **options)
    num_outputs = context.fw_metadata.num_forward_returns
    reduced = _without_outputs(graph, num_outputs)
    if reduced is None:
        return compile_fx_inner(graph, inputs, **options)
    without_outputs = compile_fx_inner(reduced, inputs, **options)
    strides_without_outputs = context.output_strides.copy()
    context.output_strides.clear()  # the compiler appends to it
    whole = compile_fx_inner(graph, inputs, **options)
    # The tensors behind the outputs are saved for the backward pass.
    if strides_without_outputs[num_outputs:] != context.output_strides[num_outputs:]:
        return whole
    return _TwoVersions(whole, without_outputs)


def _without_outputs(module: fx.GraphModule, num_outputs: int) -> fx.GraphModule | None:
    """Return a forward graph without the operations that only its first ``num_outputs`` outputs need.

    Such an output is replaced by an empty tensor like an input of the same layout, as hidden states have. Return None if no matrix
    product is left out then, or if an operation that draws random numbers would be.
    """
    graph: fx.Graph = copy.deepcopy(module.graph)
    end = next(node for node in graph.nodes if node.op == "output")
    outputs = list(end.args[0])
    saved = {each for each in outputs[num_outputs:] if isinstance(each, fx.Node)}
    for place, output in enumerate(outputs[:num_outputs]):
        if not isinstance(output, fx.Node) or output.op == "placeholder" or output in saved:
            continue
        if (like := _input_like(graph, output)) is not None:
            with graph.inserting_before(end):
                outputs[place] = graph.call_function(torch.ops.aten.empty_like.default, (like,))
            outputs[place].meta = copy.copy(output.meta)
    end.args = (tuple(outputs),)
    before = list(graph.nodes)
    graph.eliminate_dead_code()
    left_out = set(before).difference(graph.nodes)
    # Without an operation that draws random numbers, later ones would draw others.
    if not any(map(_is_product, left_out)) or any(map(_draws_numbers, left_out)):
        return None
    return fx.GraphModule(module, graph)


def _input_like(graph: fx.Graph, output: fx.Node) -> fx.Node | None:
    """Return an input of a graph with the shape, strides, dtype and device of an output; None if there is none."""
    wanted = _layout(output)
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    return next((node for node in inputs if wanted is not None and _layout(node) == wanted), None)


def _layout(node: fx.Node) -> Any:
    """Return the shape, strides, dtype and device of a node's tensor; None if it has none."""
    value = node.meta.get("val")
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def _is_product(node: fx.Node) -> bool:
    """Return whether a node is a matrix product, whose time is worth a second version."""
    return getattr(node.target, "overloadpacket", None) in _PRODUCTS


_PRODUCTS = {
    torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten._scaled_mm,
}  # fmt: skip


def _draws_numbers(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
