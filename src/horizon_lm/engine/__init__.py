"""Stream a model through a device: run the schedule of each pass under autograd and Hugging Face's own forward.

A training step, with the module of this package that does each part:

    model(**batch)                                            model_forward
        plan what stays on the device, per batch size         residency_planner
        build the schedule of the forward and start it        executor, cursor
        prefetch the embedding rows of the batch              embedding
        for each block, when the model's forward calls it:    blocks
            prefetch the next block into the other slot       cursor
            compute its micro-batches, without a graph        micro_batches
            keep its input, the activation checkpoint         forward_state
        norm, head and loss over chunks of tokens             chunked_lm_head, chunked_losses
    loss.backward()                                           autograd calls one node per unit, last to first
        build the schedule of the backward and start it       executor, cursor
        offload the gradients of the head                     lm_head
        for each block, last to first:                        block_autograd
            prefetch the previous block and its checkpoint    cursor
            recompute each micro-batch and differentiate it   recompute, grad_sink
            offload its gradients: copy, or add to the host's host_grads
        offload the gradient rows of the embedding            embedding
    optimizer.step()                                          horizon_lm.optim.adamw
        issue the updates; the next forward waits for each    executor (Engine.run_update)

Shapes in this package: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, D head size, V vocabulary, R
distinct rows of the embedding. ``docs/architecture.md`` has a picture and a glossary.
"""
