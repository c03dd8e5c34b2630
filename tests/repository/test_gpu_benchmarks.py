"""What the benchmarks for a GPU say of kernels, sensors, plans and memory, as far as a CPU can show it."""

import time
from pathlib import Path
from typing import Any

import gpu_products
import pytest
import torch
from gpu_cases import SUITES, Case, label, make_case
from gpu_kernels import family, profile_step, sums, table
from gpu_losses import batches, read_tokens
from gpu_memory import HostMemory, describe, fill_and_lock, of_process
from gpu_models import MODELS, toy
from gpu_plan import describe as describe_plan
from gpu_plan import plan_case
from gpu_products import Sensors, data_sheet, measure_products, medians_of
from gpu_systems import SYSTEMS, FusedMasters
from gpu_worker import Worker, whole_recompute

from horizon_lm.model.block_template import StreamedBlock
from tests.support.emulated_gpu import emulated_gpu

CPU = torch.device("cpu")
# Names that profilers have shown on a Hopper GPU, and operations of a CPU.
NAMES = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel": "gemm",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal>>": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits>": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)": "attention",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "triton",
    "triton_poi_fused_mul_silu_2": "triton",
    "triton_per_fused__log_softmax_1": "softmax/nll",
    "void (anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float, float>": "softmax/nll",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>": "softmax/nll",
    "Memcpy HtoD (Pinned -> Device)": "link",
    "Memcpy DtoH (Device -> Pinned)": "link",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>": "copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "other",
    "aten::mm": "gemm",
    "aten::addmm": "gemm",
    "aten::bmm": "gemm",
    "aten::_grouped_mm": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::mul": "other",
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_families_of_kernels(name: str, expected: str) -> None:
    assert family(name) == expected


def test_kernels_are_summed_by_family() -> None:
    found = sums(
        [("nvjet_a", 3, 2e6), ("gemm_b", 1, 1e6), ("Memset (Device)", 2, 5e5), ("odd", 1, 1e5), ("launch", 9, 0)]
    )
    assert found["families"]["gemm"] == pytest.approx(3.0)
    assert found["families"]["copy"] == pytest.approx(0.5)
    assert found["other"] == {"odd": pytest.approx(0.1)}
    assert found["kernels"] == 7
    (row,) = [line for line in table({"a step": found | {"wall": 6.0}}) if line.startswith("| a step")]
    assert "3.000 (50.0%)" in row


def test_a_step_is_profiled() -> None:
    a = torch.randn(200, 200)
    found = profile_step(lambda: (a @ a).softmax(0), CPU)
    assert found["families"]["gemm"] > 0
    assert found["families"]["softmax/nll"] > 0
    assert sum(found["families"].values()) < 2 * found["wall"]


def test_products_are_timed_for_as_long_as_asked() -> None:
    for _, found in measure_products(CPU, 0.05):
        assert found["seconds"] >= 0.05
        assert found["rate"] > 0
    assert data_sheet(CPU) is None


def test_sensors_without_their_first_samples() -> None:
    output = "1000, 70.5, 30\n1200, 300, 40\n1980, 700, 55\n1410, 690, [N/A]\n\nError: broken\n"
    assert medians_of(output, ["mhz", "watts", "celsius"], 1 / 2) == {"mhz": 1695, "watts": 695, "celsius": 55}
    assert medians_of("", ["mhz"], 0.0) == {}


def test_sensors_are_read_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter(["1980, 600, 50", "1410, 700, 60", "1410, 700, 60"])
    monkeypatch.setattr(gpu_products, "_reader", lambda uuid: lambda: next(rows))  # which fails at the end
    with emulated_gpu():
        sensors = Sensors(torch.device("cuda", 0))
        with sensors:
            time.sleep(1.0)
    assert sensors.medians() == {"mhz": 1410, "watts": 700, "celsius": 60}
    with Sensors(CPU) as nothing:
        pass
    assert nothing.medians() == {}


def _case(**changes: Any) -> Case:
    settings = {"rows": 4, "length": 32, "rows_at_once": 2, "steps": 1, "warmup": 1, "device": "cuda", "name": "toy"}
    return Case(**{"system": "horizon", "model": toy(MODELS["qwen2.5-7b"])} | settings | changes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at_once", [4, 2, 1])
def test_the_planned_step_is_the_one_that_runs(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan cuts a batch into micro-batches, which the engine does not do by itself."""
    case = _case(options={"compile": False, "precision": "float32"})
    monkeypatch.setattr("horizon_lm.planning.arithmetic.choose._ENOUGH_TOKENS", at_once * case.length)
    with emulated_gpu(free_bytes=10**9):
        plan = describe_plan(plan_case(case, free=10**9))
        worker = Worker(case, None, None)
        worker._system = SYSTEMS[case.system](case)
        worker._step()
        chosen = worker._of_engine()["chosen"]
        worker._system.finish()
    assert plan["micro-batches"] == chosen["micro-batches"] == [at_once] * (4 // at_once)
    assert {name: plan[name] for name in plan if name in chosen} == {
        name: chosen[name] for name in chosen if name in plan
    }
    assert plan["resident graphs"] > 0


def test_a_case_on_a_cpu_is_reported_as_a_whole(tmp_path: Path) -> None:
    case = make_case(SUITES["7b"]()[0], "cpu", 1)
    *_, result = Worker(case, None, str(tmp_path / "trace.json")).run()
    assert {"seconds", "plan", "memory", "tails", "waited", "profile", "chosen", "losses"} <= set(result)
    assert result["profile"]["families"]["gemm"] > 0
    assert len(result["tails"]["left out"]) == len(result["tails"]["computed"]) == 1
    assert (tmp_path / "trace.json").is_file()


def test_whole_recomputes_for_a_while() -> None:
    forward, seen = StreamedBlock.forward, []

    class Block:
        def forward(self, *, unread: bool = False) -> None:
            seen.append(unread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedBlock, "forward", Block.forward)
        with whole_recompute():
            StreamedBlock.forward(None, unread=True)
        StreamedBlock.forward(None, unread=True)
    assert seen == [False, True]
    assert StreamedBlock.forward is forward


def test_masters_move_weights_as_adamw_in_float32_does() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 3).bfloat16() for _ in range(20)]  # more than one group
    exact = [torch.nn.Parameter(each.float()) for each in weights]
    params = [torch.nn.Parameter(each.clone()) for each in weights]
    ours, theirs = FusedMasters(params, lr=0.1), torch.optim.AdamW(exact, lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for param, other in zip(params, exact, strict=True):
            param.grad = torch.randn(5, 3).bfloat16()
            other.grad = param.grad.float()
        ours.step()
        theirs.step()
        ours.zero_grad()
        assert all(param.grad is None for param in params)
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param.float(), other.bfloat16().float())


def test_host_memory_is_found_where_it_is() -> None:
    with HostMemory() as memory:
        held = torch.ones(2**26)
        found = memory.breakdown()
    assert found["process"]["RssAnon"] > held.nbytes
    assert found["now"]["Used"] > 0
    text = "\n".join(describe(found, {"weights": 2**30}, {"weights": 2**30}))
    assert "planned 1.00 GiB" in text
    assert "RssAnon" in text
    assert "beyond what the engine has allocated" in text
    assert of_process()["VmRSS"] > 2**26


def test_memory_is_filled_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fill_and_lock(2**26, on_gpu=False) == (2**26, "")
    monkeypatch.setattr("gpu_memory.available_bytes", lambda: 2**30)
    done, reason = fill_and_lock(2**26, on_gpu=False)
    assert done == 0
    assert "were left" in reason


def test_a_limit_is_part_of_a_label() -> None:
    (case,) = (make_case(each, "cuda", 4) for each in SUITES["8b-24gb"]())
    assert label(case) == "horizon, limit=24 GB"


def test_real_text_in_rows() -> None:
    ids = read_tokens(512)
    rows = batches(ids, 3, 2, 64)
    assert [each.shape for each in rows] == [(2, 64)] * 3
    assert ids.max() < 512
    assert len(ids) > 10_000
    assert torch.equal(torch.cat([each.flatten() for each in rows]), ids[: 3 * 2 * 64])
