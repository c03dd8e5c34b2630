"""What a block's computation holds, found on the meta device, against the same counted while it really runs."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_lm.model.footprint import block_footprint

MODELS = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 4},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 32, "layer_types": ["full_attention"]},
    "phi3": {"pad_token_id": 0},
}


class Real(TorchDispatchMode):
    """Follows the memory of real tensors by its address."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {t.untyped_storage().data_ptr() for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in {0, *self.known}:
                storage = tensor.untyped_storage()
                self.known.add(storage.data_ptr())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.freed, storage.data_ptr(), storage.nbytes())
        return result

    def freed(self, address: int, num_bytes: int) -> None:
        self.known.discard(address)
        self.live -= num_bytes


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("rows", "length"), [(2, 128), (3, 320)])
def test_a_block_takes_what_was_found(family: str, rows: int, length: int) -> None:
    config = AutoConfig.for_model(
        family, hidden_size=256, intermediate_size=688, num_hidden_layers=1, num_attention_heads=8, vocab_size=128,
        **MODELS[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    calls: list[Any] = []
    decoder = model.get_decoder()
    (block,) = decoder.layers
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    model(input_ids=torch.randint(0, 128, (rows, length)), use_cache=False)
    handle.remove()
    (args, kwargs) = calls[0]
    args = tuple(a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)

    found = block_footprint(block, args, kwargs, torch.bfloat16)
    given = [t for t in tree_leaves((args, kwargs, list(model.parameters()))) if isinstance(t, torch.Tensor)]
    with Real(given) as real:
        output = block(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        graph = real.live
        for param in block.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        output.backward(torch.ones_like(output))
    assert found.graph == pytest.approx(graph, rel=0.05)
    assert found.peak == pytest.approx(real.peak, rel=0.05)
