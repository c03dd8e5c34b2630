"""The whole idea of Horizon-LM in one file: train a Llama whose weights live in host memory, through two buffers on a GPU.

    python examples/in_one_file.py

Training with AdamW in float32 takes 16 bytes a parameter: the weight, its gradient and two moments. Here all of them stay in
host memory. The device has room for two decoder blocks, however many the model has, and a step passes them all twice:

    forward    blocks 0, 1, ..., L - 1: one computes in its buffer while the weights of the next are copied into the other
    head       compute the loss, and differentiate it at once
    backward   blocks L - 1, ..., 1, 0: compute each again, this time with a graph, and differentiate it; its gradients are
               copied to host memory while the block before it computes
    AdamW      on the host, where weights, gradients and moments are

On a CPU, losses and weights are those of `horizon_lm.stream(model, precision="float32", head="whole")`, bit for bit. A test
checks that its copies do not race. The library has what is left out here: other models and number formats, plans, checkpoints,
faults, several processes. It also lets AdamW run under the next forward pass, and keeps on the device what there is room for.

Shapes: B rows of a batch, T tokens of a row, R distinct tokens of a batch, H hidden size, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

# A stream is a queue of work for the GPU. This thread fills the queues and runs ahead of the GPU. Work in one queue is done in
# order; two queues know nothing of each other, except where one is told to wait. A CPU has no queues: torch.cpu has the same
# names, which do nothing, and that is right, because on a CPU each line is done before the next one begins.
streams: Any = torch.cuda if HAS_GPU else torch.cpu

Weights = dict[str, torch.Tensor]  # by the names that they have in their module


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory that the GPU can copy from and to by itself."""
    # Other memory may be moved by the system at any time: a copy of it makes this thread wait, even with non_blocking=True.
    # torch rounds page-locked memory up to a power of two; the library locks memory where it is instead.
    return tensor.pin_memory() if HAS_GPU else tensor


class Buffer:
    """Device memory for the weights and gradients of one stage: of a block, or of the head.

    Allocated once and kept, because copies and computation are in different streams, and the allocator knows of one only: it
    could give freed memory away while a copy still uses it (`Tensor.record_stream` is the other remedy).

    Args:
        stage: a module with parameters of the shapes that the buffer is for.

    Attributes:
        arrived: the event that the weights have been copied to the device.
        landed: the event that the gradients have been copied to the host. Until it is recorded, waiting for it does nothing.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.weights = {name: torch.empty_like(param, device=DEVICE) for name, param in stage.named_parameters()}
        self.grads = {name: torch.empty_like(param, device=DEVICE) for name, param in stage.named_parameters()}
        self.arrived, self.landed = streams.Event(), streams.Event()


class StreamedLlama:
    """A Llama whose weights and gradients are in host memory.

    Its decoder blocks are stages 0 to L - 1; its final norm and head are stage L. The embedding is no stage: a batch reads
    only some of its rows, and only those are copied.

    Args:
        model: a Llama of transformers. It remains an ordinary model, and can be saved after any step.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        model.set_attn_implementation("sdpa")  # torch's attention, which is causal if it is given no mask
        # `.grad` is allocated here and overwritten by each step, because page-locking is slow. Parameters and gradients are
        # ordinary tensors of the host, so that an ordinary optimizer can update them. A tied weight is one parameter.
        for param in model.parameters():
            param.data = page_locked(param.data)
            param.grad = page_locked(torch.zeros_like(param))
        self.blocks = list(model.model.layers)
        self.head = nn.Sequential(model.model.norm, model.lm_head)
        self.table = model.model.embed_tokens.weight  # (V, H)
        self.rotary = model.model.rotary_emb.to(DEVICE)  # no parameters, only a few frequencies

        # All blocks have the same shapes, so they take turns in two buffers: even ones in the first, odd ones in the second.
        self.stages = [*self.blocks, self.head]
        pair = Buffer(self.blocks[0]), Buffer(self.blocks[0])
        self.buffers = [*(pair[index % 2] for index in range(len(self.blocks))), Buffer(self.head)]
        # One stream in each direction, because the link carries both at once. Computation is in the current stream.
        self.copy_in, self.copy_out = streams.Stream(), streams.Stream()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch of tokens (B, T); write its gradient into every parameter's `.grad`."""
        self.fetch(0)
        self.fetch(1)
        # The embedding. A row that several tokens read is copied once. These copies make the thread wait, but nothing else is
        # in the queue yet.
        rows, positions = torch.unique(ids, return_inverse=True)  # (R,), (B, T)
        table_rows = self.table.detach()[rows].to(DEVICE).requires_grad_()  # (R, H)
        embedded = functional.embedding(positions.to(DEVICE), table_rows)  # (B, T, H)
        labels = ids.to(DEVICE)
        # The cosines and sines of all positions, for each block.
        angles = self.rotary(embedded, torch.arange(ids.shape[1], device=DEVICE)[None])

        inputs = self.forward(embedded, angles)
        loss, grad = self.differentiate_head(inputs.pop(), labels)
        for index in reversed(range(len(self.blocks))):
            grad = self.differentiate_block(index, inputs.pop(), angles, grad)

        (row_grads,) = torch.autograd.grad(embedded, table_rows, grad)  # (R, H), summed over the tokens that read a row
        self.land_rows(rows, row_grads)
        return loss

    def forward(self, hidden: torch.Tensor, angles: Any) -> list[torch.Tensor]:
        """Run all blocks. Return the input (B, T, H) of every stage."""
        inputs = [hidden]
        # Without a graph, which would keep every tensor of every block, and the weights, too. The inputs are all that is kept
        # until the backward pass: activation checkpoints.
        with torch.no_grad():
            for index in range(len(self.blocks)):
                inputs.append(self.run_block(index, self.weights_of(index), inputs[-1], angles))
                # The block is done with its buffer, so the block after next can have it, which is copied while the next block,
                # in the other buffer, computes. The last fetch is the head's. The last two blocks stay where they are, because
                # the backward pass begins with them.
                if index + 2 < len(self.stages):
                    self.fetch(index + 2)
        return inputs

    def differentiate_head(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and its gradient (B, T, H) with respect to the hidden states after the last block."""
        index, hidden = len(self.blocks), hidden.detach().requires_grad_()
        weights = self.weights_of(index)
        logits = functional_call(self.head, weights, hidden)  # (B, T, V): often the largest tensor of a step
        loss = self.model.loss_function(logits, labels, vocab_size=logits.shape[-1])  # compares with the next token
        grad, *weight_grads = torch.autograd.grad(loss, [hidden, *weights.values()])
        self.land(index, weight_grads)
        return loss.detach(), grad

    def differentiate_block(self, index: int, hidden: torch.Tensor, angles: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient (B, T, H) of the loss with respect to a block's input, given that of its output."""
        # One loss.backward() cannot do this: the graph of a whole model would need the weights of all blocks, and the buffers
        # hold two. So each block gets a graph of its own, which lives for a moment, and gradients are handed from block to
        # block. The second computation gives the bits of the first, as long as nothing is random: Llama has no dropout.
        weights, hidden = self.weights_of(index), hidden.detach().requires_grad_()
        output = self.run_block(index, weights, hidden, angles)
        grad, *weight_grads = torch.autograd.grad(output, [hidden, *weights.values()], grad)
        self.land(index, weight_grads)
        if index >= 2:  # as in the forward pass, in the other direction
            self.fetch(index - 2)
        return grad

    def run_block(self, index: int, weights: Weights, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        """Return the output (B, T, H) of a block that computes with these weights instead of its own parameters."""
        # Without a mask, so no row may be padded.
        return functional_call(self.blocks[index], weights, hidden, {"position_embeddings": angles})

    # Copies between host and device. Each waits for as little as possible, and this thread for none of them.

    def fetch(self, index: int) -> None:
        """Begin to copy the weights of a stage into its buffer."""
        buffer = self.buffers[index]
        # The stage that had this buffer must have computed before it is overwritten. Its computation is already in the queue,
        # and that of the stage in the other buffer is not yet: so waiting for all that is in the queue now is just enough.
        self.copy_in.wait_stream(streams.current_stream())
        with streams.stream(self.copy_in):
            for name, param in self.stages[index].named_parameters():
                buffer.weights[name].copy_(param.detach(), non_blocking=True)
            buffer.arrived.record()

    def weights_of(self, index: int) -> Weights:
        """Return the weights of a stage on the device, as leaves of a new graph. What computes with them waits for them."""
        buffer = self.buffers[index]
        # An event, not wait_stream(copy_in): the next stage's copy is in that queue already, and need not be waited for.
        buffer.arrived.wait()
        return {name: weight.detach().requires_grad_() for name, weight in buffer.weights.items()}

    def land(self, index: int, grads: Iterable[torch.Tensor]) -> None:
        """Begin to copy the gradients of a stage's weights into the `.grad` of its parameters."""
        buffer = self.buffers[index]
        # autograd's tensors go back to the allocator when this function returns, maybe before a copy of them would have begun.
        # So they are copied within the device first. What this buffer held before, the gradients of another block, must have left.
        buffer.landed.wait()
        for kept, grad in zip(buffer.grads.values(), grads, strict=True):
            kept.copy_(grad)
        self.copy_out.wait_stream(streams.current_stream())
        with streams.stream(self.copy_out):
            for name, param in self.stages[index].named_parameters():
                param.grad.copy_(buffer.grads[name], non_blocking=True)
            buffer.landed.record()

    def land_rows(self, rows: torch.Tensor, row_grads: torch.Tensor) -> None:
        """Add the gradients (R, H) of some rows (R,) to the embedding's, once every other gradient is in host memory."""
        # From here on this thread reads and writes the host memory itself, here and in the optimizer. Events order streams, not
        # threads: so this is the one place where the thread waits until every copy of the step is over.
        streams.synchronize()
        # The gradient of a head that is tied to the embedding has landed in the same place, and is to be added to.
        if self.model.lm_head.weight is not self.table:
            self.table.grad.zero_()
        self.table.grad.index_add_(0, rows, row_grads.cpu())


def train(model: LlamaForCausalLM, batches: Iterable[torch.Tensor], lr: float = 1e-3) -> Iterator[torch.Tensor]:
    """Train a model in host memory on batches of tokens (B, T); yield the loss of each step."""
    streamed = StreamedLlama(model)
    # torch's own optimizer: parameters and gradients are tensors of the host, so its moments are, too, and the host computes.
    # That takes as long as reading and writing them all, which `fused` does once. Without zero_grad: gradients are overwritten.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    for ids in batches:
        loss = streamed.step(ids)
        optimizer.step()
        yield loss


def random_batches(text: bytes, num_batches: int, num_rows: int = 4, length: int = 64) -> Iterator[torch.Tensor]:
    """Yield batches (B, T) of pieces of a text, of which each byte is a token."""
    tokens = torch.tensor(list(text))
    for _ in range(num_batches):
        starts = torch.randint(len(tokens) - length, (num_rows,)).tolist()
        yield torch.stack([tokens[start : start + length] for start in starts])


def main() -> None:
    """Train a tiny Llama with random weights on the text of this file."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    batches = random_batches(Path(__file__).read_bytes(), num_batches=40)
    for step, loss in enumerate(train(model, batches), start=1):
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
