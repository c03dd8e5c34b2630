"""The optimizer equals torch.optim.AdamW, in each precision as far as that precision allows."""

import copy
import itertools
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ConfigError, NonFiniteError, PartialUpdateError, StreamingError
from horizon_lm.optim import update_tasks
from horizon_lm.optim.grad_norm import sum_squares
from tests.support import tiny_models
from tests.support.thinned_cases import thinned
from tests.support.training_steps import feed, masters

HYPER = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def run(model: Any, optimizer: Any, num_steps: int, clip: float | None = None, backwards: int = 1) -> None:
    for step in range(num_steps):
        for part in range(backwards):
            model(**tiny_models.batch(seed=10 * step + part), use_cache=False).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("clip", "backwards", "tied"), thinned(itertools.product((None, 0.3), (4, 1), (False, True))))
def test_equals_torch_in_float32(clip: float | None, backwards: int, tied: bool) -> None:
    reference = tiny_models.build("llama", tie_word_embeddings=tied)
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")
    run(reference, torch.optim.AdamW(reference.parameters(), **HYPER), 5, clip, backwards)
    run(model, horizon_lm.AdamW(model, max_grad_norm=clip, **HYPER), 5, None, backwards)
    for name, theirs in reference.named_parameters():
        movement = (theirs - start[name]).norm()
        assert (masters(model)[name] - theirs).norm() < 1e-5 * movement, name


def test_schedulers_and_param_groups() -> None:
    reference = tiny_models.build("llama")
    model = horizon_lm.stream(copy.deepcopy(reference), precision="float32", head="whole")

    def groups(m: Any) -> list[dict[str, Any]]:
        decay = [p for n, p in m.named_parameters() if p.ndim > 1]
        rest = [p for n, p in m.named_parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]

    theirs = torch.optim.AdamW(groups(reference), **HYPER)
    ours = horizon_lm.AdamW(model, params=groups(model), **HYPER)
    for each, optimizer in ((reference, theirs), (model, ours)):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
        for step in range(4):
            each(**tiny_models.batch(seed=step), use_cache=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(masters(model)[name], param.detach(), rtol=1e-5, atol=1e-6)


# The optimizer with given gradients


def real_shapes() -> Any:
    """Return shapes of one block of SmolLM2-135M, and of part of its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=1024, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def rms(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(a[n] - b[n]).double().square().sum() for n in a]).sum().sqrt())


def test_fifty_steps_on_real_shapes_equal_torch() -> None:
    hyper = {"lr": 1e-4, "weight_decay": 0.1}
    start = {n: p.detach().clone() for n, p in real_shapes().named_parameters()}
    ends = {}
    for name, options in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
        model = real_shapes()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        feed(model, [torch.optim.AdamW(model.parameters(), **hyper, **options)], 50)
        ends[name] = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = horizon_lm.stream(real_shapes(), precision="float32", head="whole")
    optimizer = horizon_lm.AdamW(model, **hyper)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()  # allocates the gradients
    feed(model, [optimizer], 50)
    ours = masters(model)
    movement = rms(ends["foreach"], start)
    print(f"ours to foreach {rms(ours, ends['foreach']) / movement:.1e}, to fused {rms(ours, ends['fused']) / movement:.1e}; "
          f"fused to foreach {rms(ends['fused'], ends['foreach']) / movement:.1e}")  # fmt: skip
    assert rms(ours, ends["foreach"]) <= 1e-5 * movement
    assert rms(ours, ends["foreach"]) <= 1.05 * rms(ends["fused"], ends["foreach"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backwards", [1, 4])
@pytest.mark.parametrize("precision", ["float32", "fp32_master"])
def test_the_norm_is_that_of_clip_grad_norm(precision: str, backwards: int, tied: bool) -> None:
    model = horizon_lm.stream(tiny_models.build("llama", tie_word_embeddings=tied), precision=precision)
    optimizer = horizon_lm.AdamW(model, max_grad_norm=0.1)
    for part in range(backwards):
        model(**tiny_models.batch(seed=part)).loss.backward()
    engine = model._horizon.engine
    present = {unit: list(slabs.grad_layout) for unit, slabs in engine.store.units.items()}
    known = sum_squares(engine, present)  # as summed during landing
    assert all(engine.grads.squared_norms.of(slab) is not None for slab in engine.store.slabs if slab.grad_layout.numel)
    grads = [p.grad.float().clone().requires_grad_() for p in model.parameters()]
    for grad in grads:
        grad.grad = grad.detach()
    expected = torch.nn.utils.clip_grad_norm_(grads, 0.1)
    assert sum(known.values()) ** 0.5 == pytest.approx(expected.item(), rel=1e-6)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-6)


def test_a_changed_gradient_is_squared_again() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    optimizer = horizon_lm.AdamW(model, max_grad_norm=1e9)
    model(**tiny_models.batch()).loss.backward()
    for param in model.parameters():
        param.grad.mul_(3)
    optimizer.step()
    tripled = optimizer.grad_norm
    model.zero_grad()
    other = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    plain = horizon_lm.AdamW(other)
    other(**tiny_models.batch()).loss.backward()
    plain.step()
    assert tripled == pytest.approx(3 * plain.grad_norm, rel=1e-6)


# Modes


@pytest.mark.parametrize(
    ("precision", "options", "per_param"),
    thinned([
        ("fp32_master", {}, 14), ("bf16", {}, 12), ("float32", {}, 16),
        ("fp32_master", {"update_in_backward": True}, 12), ("bf16", {"update_in_backward": True}, 10),
        ("fp32_master", {"moments": "bfloat16"}, 10), ("bf16", {"moments": "bfloat16"}, 8),
        ("fp32_master", {"moments": "8bit"}, 8), ("bf16", {"moments": "8bit"}, 6),
        ("fp32_master", {"grad_dtype": torch.float32}, 16), ("bf16", {"grad_dtype": torch.float32}, 14),
        ("bf16", {"moments": "8bit", "update_in_backward": True}, 4),
    ], keep=[("float32", {}, 16), ("bf16", {"moments": "8bit", "update_in_backward": True}, 4)]),
)  # fmt: skip
def test_host_bytes_per_trainable_parameter(precision: str, options: dict[str, Any], per_param: int) -> None:
    options = dict(options)
    streamed = {"grad_dtype": options.pop("grad_dtype")} if "grad_dtype" in options else {}
    config = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 6}
    model = horizon_lm.stream(tiny_models.build("llama", **config), precision=precision, **streamed)
    optimizer = horizon_lm.AdamW(model, **options)
    for _ in range(2):
        model(**tiny_models.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(model)
    num_params = sum(p.numel() for p in model.parameters())
    by_kind = horizon_lm.stats(model)["host_bytes_by_kind"]
    slots = by_kind.pop("landing", 0)
    scales = 2 * 4 * num_params / 256 if options.get("moments") == "8bit" else 0
    padding = 4096 * 4 * len(model._horizon.engine.store.units)  # slabs are aligned to pages
    print(f"{precision} {options}: {(sum(by_kind.values()) - scales) / num_params:.3f}, slots {slots}")
    assert per_param * num_params <= sum(by_kind.values()) - scales <= per_param * num_params + 2 * padding
    if options.get("update_in_backward"):
        largest, head = (sum(p.numel() for p in m.parameters()) for m in (model.model.layers[0], model.lm_head))
        rows = (len(tiny_models.batch()["input_ids"].unique()) + 1) * 256
        assert 0 < slots <= 2 * (2 * largest + head + rows + 4096)
    else:
        assert slots == 0


def losses(model: Any, optimizer: Any, num_steps: int = 8) -> list[float]:
    got = []
    for step in range(num_steps):
        loss = model(**tiny_models.batch(seed=step % 3)).loss
        got.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return got


def test_accumulation_in_fp32_rounds_less() -> None:
    def error(grad_dtype: torch.dtype | None) -> float:
        model = horizon_lm.stream(tiny_models.build("llama"), precision="fp32_master", grad_dtype=grad_dtype)
        exact: dict[str, torch.Tensor] = {}
        for part in range(8):
            other = horizon_lm.stream(tiny_models.build("llama"), precision="fp32_master", grad_dtype=torch.float32)
            other(**tiny_models.batch(seed=part)).loss.backward()
            for name, param in other.named_parameters():
                exact[name] = exact.get(name, 0) + param.grad.double()
            model(**tiny_models.batch(seed=part)).loss.backward()
        name = "model.layers.1.mlp.up_proj.weight"
        return float((model.get_parameter(name).grad.double() - exact[name]).norm() / exact[name].norm())

    assert error(torch.float32) < 1e-6
    assert error(None) > 1e-3


# Updates in threads, and in the backward pass


def test_step_returns_before_the_updates_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from horizon_lm.optim import update_tasks

    model = horizon_lm.stream(tiny_models.build("llama"))
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    gate, original = threading.Event(), update_tasks._Piece.run

    def slow(work: Any, link: Any) -> None:
        gate.wait(30)
        original(work, link)

    model(**tiny_models.batch()).loss.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(update_tasks._Piece, "run", slow)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e9  # a change by a scheduler; the running step keeps its learning rate
    store = model._horizon.engine.store  # reading a parameter would wait for its update
    assert all(torch.equal(store.weight(name), value) for name, value in before.items())
    gate.set()
    after = model.state_dict()  # waits for the updates it needs
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert all(p.isfinite().all() for p in after.values())


def test_reading_a_gradient_after_the_step_waits_for_the_update() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    other = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    for each in (model, other):
        optimizer = horizon_lm.AdamW(each, lr=1e-2)
        each(**tiny_models.batch()).loss.backward()
        optimizer.step()
        if each is model:
            for param in model.parameters():
                param.grad.fill_(float("nan"))
    assert all(torch.equal(masters(model)[n], value) for n, value in masters(other).items())


def test_update_in_backward_rejects_unsupported_uses() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"))
    for options in ({"max_grad_norm": 1.0}, {"non_finite": "skip"}):
        with pytest.raises(ConfigError, match="update_in_backward"):
            horizon_lm.AdamW(model, update_in_backward=True, **options)
    optimizer = horizon_lm.AdamW(model, update_in_backward=True)
    first, second = model(**tiny_models.batch()).loss, model(**tiny_models.batch(seed=1)).loss
    first.backward()
    with pytest.raises(StreamingError, match="changed between"):
        second.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(**tiny_models.batch()).loss.backward()
    with pytest.raises(StreamingError, match=r"optimizer\.step\(\) after each backward"):
        model(**tiny_models.batch()).loss.backward()

    trained = horizon_lm.stream(tiny_models.build("llama"))
    trained(**tiny_models.batch()).loss.backward()
    with pytest.raises(ConfigError, match="before the first training step"):
        horizon_lm.AdamW(trained, update_in_backward=True)


def test_a_unit_with_non_finite_gradients_is_not_updated_in_backward() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=True)
    before = masters(model)
    model.model.layers[1].register_forward_hook(lambda module, args, output: _poison_gradient(output))
    model(**tiny_models.batch()).loss.backward()
    with pytest.raises(NonFiniteError, match="the gradient of block1"):
        optimizer.step()
    with pytest.raises(PartialUpdateError):
        model(**tiny_models.batch())
    now = {name: model._horizon.engine.store.master(name) for name in before}
    assert all(value.isfinite().all() for value in now.values())
    assert not torch.equal(now["lm_head.weight"], before["lm_head.weight"])  # it was updated before the fault
    assert torch.equal(now["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def _poison_gradient(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    return hidden


def skipping(**options: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    return model, horizon_lm.AdamW(model, lr=1e-2, non_finite="skip", **options)


def spoiled_step(model: Any, optimizer: Any) -> None:
    model(**tiny_models.batch()).loss.backward()
    model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("inf")
    optimizer.step()


@pytest.mark.filterwarnings("ignore::horizon_lm.errors.NonFiniteWarning")
@pytest.mark.parametrize(("options", "limit"), [({}, 3), ({"max_consecutive_skips": 1}, 1)])
def test_too_many_skipped_steps_in_a_row_raise(options: dict[str, int], limit: int) -> None:
    model, optimizer = skipping(**options)
    before = masters(model)
    for _ in range(limit):
        spoiled_step(model, optimizer)
        optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match=f"{limit} .*max_consecutive_skips"):
        spoiled_step(model, optimizer)
    assert optimizer.num_skipped == limit
    assert all(torch.equal(before[name], after) for name, after in masters(model).items())


@pytest.mark.filterwarnings("ignore::horizon_lm.errors.NonFiniteWarning")
def test_skips_are_counted_from_the_last_good_step() -> None:
    model, optimizer = skipping(max_consecutive_skips=2)
    for spoiled in (True, True, False, True, True, False):
        if spoiled:
            spoiled_step(model, optimizer)
            optimizer.zero_grad()
        else:
            losses(model, optimizer, 1)
    assert optimizer.num_skipped == 4
    model, optimizer = skipping(max_consecutive_skips=None)
    for _ in range(8):
        spoiled_step(model, optimizer)
        optimizer.zero_grad()
    assert optimizer.num_skipped == 8
    with pytest.raises(ConfigError, match="max_consecutive_skips is 0"):
        skipping(max_consecutive_skips=0)


def test_frozen_parameters_take_no_memory_and_do_not_change() -> None:
    for in_backward in (False, True):
        plain = tiny_models.build("llama")
        plain.model.layers[0].requires_grad_(False)
        plain.model.embed_tokens.requires_grad_(False)
        model = horizon_lm.stream(plain, precision="fp32_master")
        optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=in_backward)
        before = masters(model)
        losses(model, optimizer, 2)
        after = masters(model)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {n for n, p in model.named_parameters() if p.requires_grad}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        moments = horizon_lm.stats(model)["host_bytes_by_kind"]["moments"]
        assert moments <= 8 * trained + 8 * 4096 * len(model._horizon.engine.store.units)


@pytest.mark.parametrize(
    ("parameters", "pieces"), [(3_540_000, 7), (46_800_000, 90), (233_057_792, 112), (10_000_000_000, 4769)]
)
def test_large_units_have_few_pieces(parameters: int, pieces: int) -> None:
    """The interpreter takes its time for each, but all threads must have work: blocks of 135M, 1.5B and 7B, and experts."""
    assert -(-parameters // update_tasks.piece_elements(parameters)) == pieces
