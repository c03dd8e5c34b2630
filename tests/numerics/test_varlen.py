"""attn_implementation="varlen": packed documents do not see each other, padding changes nothing, and no mask exists."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import DoesNotFitError, ModelNotSupportedError
from horizon_lm.model import attention, attention_kernels
from horizon_lm.model.attention import find_segments
from horizon_lm.model.attention_kernels import kernel_of_segments
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

REJECTED = ("gemma2", "qwen3_next", "falcon")
CPU = torch.device("cpu")
ONE_BY_ONE = "torch's scaled dot-product attention, one segment at a time, because its flash kernel does not support "
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def models(family: str, **settings: Any) -> tuple[Any, Any]:
    """Return a plain model with Hugging Face's masks, and the same model streamed with varlen; without dropout."""
    plain = tiny_models.build(family).eval()
    settings = {"precision": "float32", "head": "whole", "check_recompute": True} | settings
    return plain, horizon_lm.stream(copy.deepcopy(plain), attn_implementation="varlen", **settings)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, tiny_models.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def same_gradients(a: Any, b: Any) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("family", sorted(set(tiny_models.FAMILIES) - set(REJECTED)))
def test_packed_documents_are_independent(family: str) -> None:
    plain, streamed = models(family, device_micro_batch_size=2)
    first, second = tokens(3, 7), tokens(3, 5, seed=1)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(3, -1)
    packed = streamed(input_ids=torch.cat([first, second], 1), position_ids=positions).logits
    alone = torch.cat([plain(input_ids=first).logits, plain(input_ids=second).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    # The test would find a leak: without position ids, the second document reads the first.
    leaking = streamed(input_ids=torch.cat([first, second], 1)).logits
    assert (leaking - alone)[:, 7:].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "family"),
    thinned(
        itertools.product(
            [{}, {"device_micro_batch_size": 2}, {"resident_blocks": 2, "resident_graphs": 1}],
            sorted(set(tiny_models.FAMILIES) - set(REJECTED)),
        )
    ),
)
def test_padded_rows_equal_masked_rows(family: str, settings: dict[str, Any]) -> None:
    plain, streamed = models(family, **settings)
    ids = tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, 9:], mask[1, :3] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 3] = -100  # this token is predicted only from padding
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss for m in (plain, streamed)]
    torch.testing.assert_close(losses[1], losses[0])
    sum(losses).backward()
    same_gradients(streamed, plain)


def test_no_mask_is_made() -> None:
    _, streamed = models("llama")
    seen = []
    for module in streamed.model.layers:
        module.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    streamed(input_ids=tokens(2, 6), attention_mask=mask)
    assert seen == [None] * 3


def test_given_4d_masks_are_unchanged() -> None:
    config = tiny_models.build("gemma3_text").config
    for mask in ({"full_attention": torch.ones(1, 1, 9, 9)}, torch.ones(1, 1, 9, 9)):
        attention.reject_large_mask(config, {"attention_mask": mask}, 2**20, 2**20, 4)
    with pytest.raises(DoesNotFitError):  # negative control: the model would make a mask of the same size
        attention.reject_large_mask(config, {}, 2**20, 2**20, 4)


@pytest.mark.parametrize("limit", [2 * 12 * 12, 2 * 12 * 12 - 1], ids=["fits", "too large"])
@pytest.mark.parametrize(
    ("family", "implementation", "batch", "has_mask"),
    [
        ("llama", "sdpa", {}, False),
        ("llama", "sdpa", {"attention_mask": torch.ones(2, 12)}, False),
        ("llama", "sdpa", {"attention_mask": torch.ones(2, 12).tril(10)}, True),
        ("llama", "sdpa", {"position_ids": torch.arange(12)[None] % 7}, True),
        ("llama", "varlen", {"attention_mask": torch.ones(2, 12).tril(10)}, False),
        ("mistral", "sdpa", {}, True),  # a window
    ],
)
def test_a_large_mask_is_rejected_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, limit: int, family: str, implementation: str, batch: Any, has_mask: bool
) -> None:
    monkeypatch.setattr(attention, "LARGEST_MASK", limit)
    settings = {"sliding_window": 6} if family == "mistral" else {}
    model = horizon_lm.stream(
        tiny_models.build(family, **settings), attn_implementation=implementation, precision="float32"
    )
    call = {"input_ids": tokens(2, 12), **batch}
    if has_mask and limit < 2 * 12 * 12:
        with pytest.raises(DoesNotFitError, match="'varlen'"):
            model(**call)
    else:
        model(**call)


@pytest.mark.parametrize("family", REJECTED)
def test_unsupported_models_are_rejected(family: str) -> None:
    with pytest.raises(ModelNotSupportedError, match="varlen"):
        horizon_lm.stream(tiny_models.build(family), attn_implementation="varlen", head="whole")


@pytest.mark.parametrize("form", ["dict", "pairs of tokens"])
def test_another_mask_is_rejected(form: str) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), "cpu", "float32", attn_implementation="varlen")
    batch = tiny_models.batch(padding="none")
    rows, length = batch["input_ids"].shape
    pairs = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length)
    batch["attention_mask"] = {"full_attention": pairs} if form == "dict" else pairs
    with pytest.raises(ModelNotSupportedError, match=r"takes an attention_mask of tokens and padding, \(B, T\)"):
        model(**batch)


def test_generation_with_and_without_padding() -> None:
    plain, streamed = models("mistral")
    ids = tokens(2, 6)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ones = torch.ones_like(ids)
    expected = plain.generate(ids, attention_mask=ones, **settings)
    assert torch.equal(streamed.generate(ids, attention_mask=ones, **settings), expected)
    ones[0, 0] = 0
    with pytest.raises(ModelNotSupportedError, match="padded"):
        streamed.generate(ids, attention_mask=ones, **settings)


def test_segments() -> None:
    assert find_segments(None, None, CPU) is None
    assert find_segments(torch.ones(2, 4), None, CPU) is None
    assert find_segments(None, torch.arange(4)[None], CPU) is None
    padded = find_segments(torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]), torch.arange(4)[None], CPU)
    assert padded is not None
    assert padded.of(0, 2) == [3, 1, 2, 2]
    packed = find_segments(None, torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]), CPU)
    assert packed is not None
    assert packed.of(0, 1) == [2, 2]
    for offsets in packed.offsets(0, 2):  # on the device, and on the host
        assert (offsets.tolist(), offsets.dtype) == ([0, 2, 4, 8], torch.int32)


@pytest.mark.parametrize(("activated", "taken"), [(None, True), ("FA3", False)])
def test_a_kernel_that_was_activated_in_torch_goes_before_flash_attn(
    monkeypatch: pytest.MonkeyPatch, activated: str | None, taken: bool
) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: activated, raising=False)
    monkeypatch.setattr(attention, "flash_attn", lambda: print)  # as if it were installed
    query: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert attention._supports_flash_attn(query) == taken


@pytest.mark.parametrize(
    ("setup", "kernel"),
    [
        ({}, "FlashAttention-2 of torch 2.99.1"),
        ({"activated": "FA3"}, "FA3 of torch 2.99.1"),
        ({"installed": True}, "FlashAttention-2 of flash-attn 2.8.3"),
        ({"installed": True, "activated": "FA3"}, "FA3 of torch 2.99.1"),
        ({"installed": True, "compiled": True}, "FlashAttention-2 of torch 2.99.1"),
        ({"dtype": torch.float32}, ONE_BY_ONE + "values in float32"),
        ({"attention_dropout": 0.1}, ONE_BY_ONE + "dropout"),
        ({"head_dim": 264}, ONE_BY_ONE + "head dimensions 264 and 264"),
        (LATENT, ONE_BY_ONE + "head dimensions 192 and 128"),
        ({"installed": True, "sinks": True}, "FlashAttention-2 of torch 2.99.1"),
        (LATENT | {"sinks": True}, "FlashAttention-2 of torch 2.99.1"),
        ({"implementation": "sinks"}, "torch's fused attention with a mask"),
        ({"capability": (7, 5)}, ONE_BY_ONE + "compute capability 7.5"),
        ({"implementation": "sdpa"}, "torch's scaled dot-product attention with a mask"),
        ({"implementation": "flash_attention_3"}, "flash_attention_3"),
    ],
)
def test_kernel_of_packed_rows_is_named(setup: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {
        "installed": False, "activated": None, "compiled": False, "dtype": torch.bfloat16, "capability": (9, 0),
        "implementation": "varlen", "head_dim": 128, "sinks": False, **setup,
    }  # fmt: skip
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu130")
    monkeypatch.setattr(attention_kernels, "version", lambda name: {"flash-attn": "2.8.3"}[name])
    monkeypatch.setattr(attention_kernels, "activated_kernel", lambda: known["activated"])
    monkeypatch.setattr(attention_kernels, "flash_attn", lambda: print if known["installed"] else None)
    named = kernel_of_segments(
        SimpleNamespace(**known), known["implementation"], known["dtype"], known["compiled"], known["capability"],
        known["sinks"],
    )  # fmt: skip
    assert named == kernel
