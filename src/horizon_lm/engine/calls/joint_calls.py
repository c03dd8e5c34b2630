"""Calls of a model in lock-step, which are computed in one pass, and the adapters that are active in each."""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from horizon_lm.engine.calls.calls import Call
from horizon_lm.engine.passes.lockstep import batched_call, caller_id, compute_alone, watch_locksteps
from horizon_lm.errors import HorizonError, StreamingError
from horizon_lm.model.active_adapters import ActiveAdapters
from horizon_lm.model.generation import cache_of


class JointCalls:
    """The calls of a model that meet in a lock-step.

    Args:
        model: the streamed model.
        adapter_params: identities of its adapters' parameters; empty without adapters.

    Attributes:
        switches_per_call: each call in lock-step has its own switches of adapters.
    """

    def __init__(self, model: Any, adapter_params: Collection[int]) -> None:
        self._model, self._has_adapters = weakref.ref(model), bool(adapter_params)
        self.switches_per_call = False
        self._adapters_at_begin: Any = None  # which adapters were active when the running lock-step began
        # Held weakly by the lock-step, so a model that is dropped takes its watcher along.
        watch_locksteps(self)

    def compute(self, kind: Hashable, call: Call, compute: Callable[[list[Call]], list[Any]]) -> Any:
        """Compute a call, together with the calls of the same kind that are in lock-step with it.

        Raises:
            StreamingError: adapters were switched in a function of a lock-step, where the others would see it.
        """
        # Calls at the same point are computed in one pass: of one model, all with or all without gradients, and of one kind.
        point = (id(self), torch.is_grad_enabled(), kind)
        # Outside of a lock-step (caller 0) a call is alone, so nobody else sees its switches; without adapters there are none.
        if caller_id() == 0 or not self._has_adapters:
            return batched_call(point, call, compute)
        if not self.switches_per_call and not torch.is_grad_enabled():
            # The code around this call may have switched adapters for it, and switches them back afterwards.
            return compute_alone(lambda: compute([call])[0])
        adapters = ActiveAdapters(self._model())
        active = adapters.read()
        if not self.switches_per_call and active != self._adapters_at_begin:
            raise StreamingError(
                "adapters were switched in one of the functions of run_together, where the others would see it; switch them "
                "around run_together, or compute this call under torch.no_grad()"
            )

        def compute_with_adapters(calls: list[Call]) -> list[Any]:
            with adapters.set_to(active):
                return compute(calls)

        return batched_call((*point, active), call, compute_with_adapters)

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Context manager: remember which adapters are active now, at the begin of a lock-step, in the model's present `JointCalls`."""
        present = self._present()  # only now, because PEFT may have changed the adapters since this object was made
        before, model = present._adapters_at_begin, present._model()
        if present._has_adapters and not present.switches_per_call and model is not None:
            present._adapters_at_begin = ActiveAdapters(model).read()
        try:
            yield
        finally:
            present._adapters_at_begin = before

    def _present(self) -> "JointCalls":
        """Return the model's present `JointCalls`: a new one if the model was attached again, because PEFT has changed its adapters."""
        model = self._model()
        if model is None or "_horizon" not in vars(model):  # it is being attached
            return self
        # Reading `_horizon` attaches the model again; its errors are raised where the model is used.
        with suppress(HorizonError):
            return model._horizon.joint  # type: ignore[no-any-return]
        return self


def require_joint(calls: list[Call]) -> None:
    """Raise StreamingError if calls in lock-step cannot be computed in one pass."""
    if len({call.get("inputs_embeds") is None for call in calls}) > 1:
        raise StreamingError(
            "batches with input_ids and with inputs_embeds cannot be computed together; use one of them"
        )
    if any(call.get("use_cache") or cache_of(call) is not None for call in calls):
        raise StreamingError("a cache of keys and values cannot be used for several batches at once")
