"""The loss over chunks of tokens, with its gradients made in the forward where there is room for the head's."""

from collections.abc import Sequence
from typing import Any

import torch

from horizon_lm.engine.chunked_head import ChunkedRun, Grads
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.schedule.ops import HEAD, Kind


class LossRun(ChunkedRun):
    """The chunked loss of one forward, and its gradients: made at once where the buffer is free, else recomputed."""

    made: Grads | None = None

    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        handle = self.handle
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            if handle is not None and handle.head_grads:
                loss, self.made = self._loss_and_grads(hidden, outer)
                self.engine.head_buffer.take(handle)
            else:
                loss = self._loss(hidden, outer)
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return (loss,)

    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor]) -> Grads:
        (grad,) = grads
        assert grad is not None
        assert self.handle is not None
        head, engine = self.owner.head, self.engine
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            if self.made is None or not self.handle.head_grads:  # never made, or evicted by another backward
                _, self.made = self.surroundings.run(lambda: self._loss_and_grads(hidden, outer))
                engine.device.poison(engine.memory.head_weights[0])
            (hidden_grad, outer_grads), self.made = self.made, None
            if grad.device.type != "cpu" or grad != 1:  # reading it from an accelerator would cost a wait
                for tensor in (hidden_grad, *outer_grads, *head.grads().values()):
                    tensor.mul_(grad)
            head.landed()
        return hidden_grad, outer_grads

    def _loss(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> torch.Tensor:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                total = total + self._of_chunk(flat[index], index, outer, None, first=False)
        return total if len(self.inputs.trained) else total / self.inputs.num_items

    def _loss_and_grads(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, Grads]:
        """Also the gradients for a loss gradient of one; those of the head go into its buffer."""
        losses = [torch.zeros((), dtype=torch.float32, device=hidden.device)]

        def of_chunk(*chunk: Any) -> None:
            loss = self._of_chunk(*chunk)
            torch.autograd.backward([loss])
            losses[0] = losses[0] + loss.detach()

        grads = self.differentiate(hidden, outer, of_chunk)
        return losses[0] if len(self.inputs.trained) else losses[0] / self.inputs.num_items, grads

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of the tokens at ``index``, whose hidden states (n, H) are given."""
        target = self.inputs.labels.reshape(-1)[index][None]
        return self.call_model(
            hidden, outer, grads, first, labels=target, shift_labels=target, num_items_in_batch=self.inputs.num_items
        ).loss
