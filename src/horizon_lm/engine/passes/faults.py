"""Faults: abandon a pass that failed, and settle host memory after the device has failed."""

from contextlib import suppress

from horizon_lm.engine.passes.backward_pass import Running
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.errors import StreamingError


def abandon(engine: EngineState, running: Running, error: BaseException) -> None:
    """Abandon the running pass and free its slots and boundaries. The gradients of a backward pass become invalid."""
    if running.backward is not None:  # a forward pass changes no gradient in host memory
        if running.backward.has_updated or engine.cursor.update_begun():
            # Some units of this step are updated, others are not.
            engine.updates.partial_update.record(error)
        engine.grads.invalidate()
    try:
        engine.cursor.abandon()
        _quiesce(engine)  # so the device is idle on return; errors of updates are not raised here
    finally:  # the device may have failed for good
        _release(engine, running)


def _release(engine: EngineState, running: Running) -> None:
    """Free the boundaries and leases of the running pass, but none of other forward passes. No pass is running afterwards."""
    for each in (running.backward, running.forward):
        if each is not None and each.state is not None:
            each.state.consumed = True  # so it holds no lease any more (`BufferLease.holder`)
            engine.boundaries.release(each.state)
    running.backward = running.forward = None
    engine.between.after_grad = {}


def settle_without_device(engine: EngineState, running: Running) -> None:
    """Bring the host's state to the end of the last step that counts, after the device has failed.

    A step counts once the optimizer's ``step`` has all gradients in host memory (`AdamW.num_steps`): its updates need
    nothing else, and are completed in host threads. Everything else is dropped. The device is not touched. Afterwards
    weights and optimizer state can be read and saved; every further pass raises StreamingError.

    Raises:
        PartialUpdateError: an update is half done, so that some weights are new and some old.
    """
    save, partial_update = engine.saves.running, engine.updates.partial_update
    partial_update.require_complete()
    if engine.device_lost:
        return
    # Rejected: weights of two steps, or of half an update.
    if _may_have_unrecorded_updates(engine, running):
        reason = "the device failed before all gradients had landed, and others were applied already"
        partial_update.fail(StreamingError(reason))
    if engine.updates.need_device():
        partial_update.fail(StreamingError("the device failed while it computed a part of an update"))
    # Completed in host threads: the updates of the last step that counts.
    engine.device_lost = True
    if save is not None:
        # Updates that it delays are completed now.
        save.abandon(StreamingError("the device has failed meanwhile"))
    try:
        engine.updates.complete_without_device()
    finally:  # a kernel's error is recorded, and reported as what it means
        partial_update.require_complete()
    # Dropped: everything else.
    if save is not None:
        save.discard()
    engine.saves.drop()
    engine.cursor.drop()
    _release(engine, running)
    engine.grads.track_landings([])
    engine.grads.invalidate()


def _may_have_unrecorded_updates(engine: EngineState, running: Running) -> bool:
    """Return whether a step with ``update_in_backward`` has begun and not ended, and may have applied updates that are not recorded."""
    optimizer = engine.updates.optimizer_in_backward
    if optimizer is None or not optimizer.pending:
        return False
    if running.backward is not None:
        return engine.cursor.update_begun()
    # The backward pass has ended, so it has issued all updates; or it has failed, so gradients are invalid, and `abandon` has recorded
    # a partial update if one had begun.
    return not engine.grads.invalid


def _quiesce(engine: EngineState) -> None:
    """Wait until the device is idle, without raising errors of updates. An update that could not begin stays pending."""
    for _ in range(len(engine.store.units)):  # at most one failed update for each
        # Each call raises the error of one failed update, and clears it. One that failed inside a kernel is already recorded as a
        # partial update.
        with suppress(Exception):
            engine.device.synchronize()
            return
    engine.device.synchronize()  # an error that is raised now is not an update's
