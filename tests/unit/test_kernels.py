"""Communication kernels by their names in traces and in the driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.kernels import COMM_KERNELS, comm_globs, glob_regex, is_comm

COMM = [
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "void ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclSymDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)",
    "_Z40ncclDevKernel_AllReduce_Sum_bf16_RING_LL24ncclDevKernelArgsStorageILm4096EE",
    "mscclKernel_Sum_half_Simple_true(ncclDevComm*, mscclAlgo*, mscclWork*)",
    "nvshmemi_signal_op_kernel",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)",
    "void deep_ep::internode_ll::combine<true, 3, 7168, 9>(void*)",
    "_ZN7deep_ep9intranode8dispatchILi8ELi768EEEvP4int4",
    "void c10d::symmetric_memory::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, 16, 8>(float**)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16>(...)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(...)",
]
COMPUTE = [
    "void cub::DispatchReduce<float>::Kernel(float*)",
    "void cub::CUB_200200_NS::DeviceReduceKernel<at::native::dispatch>(int)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp<float>)",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<float>(float*)",
    "triton_red_fused__to_copy_add_broadcast_mul_sum_3",
    "void at::native::index_put_with_sort_kernel<combine>(float*)",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
    "",
]


@pytest.mark.parametrize("name", COMM)
def test_communication(name):
    assert is_comm(name)
    assert is_comm(name.upper())


@pytest.mark.parametrize("name", COMPUTE)
def test_compute(name):
    assert not is_comm(name)


def test_globs_match_whole_names_and_nothing_else_is_special():
    pattern = glob_regex(["a?c*", "x.y"])
    assert pattern.fullmatch("ABC\nd")
    assert not pattern.fullmatch("zabc")
    assert pattern.fullmatch("x.y")
    assert not pattern.fullmatch("xzy")
    assert not glob_regex([]).fullmatch("")


def test_the_shim_gets_the_same_table():
    assert comm_globs() == tuple(g for globs in COMM_KERNELS.values() for g in globs)
    assert len(set(comm_globs())) == len(comm_globs())


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*a*b*c*", "xaxbxc", True),
        ("*a*b*c*", "xcxbxa", False),
        ("a*b*b*c", "abbbc", True),
        ("a*b*b*c", "abc", False),
        ("*1*1?*1", "121x1", True),
        ("a*a", "a", False),
        ("**", "", True),
    ],
)
def test_text_between_stars_is_matched_in_its_order(glob, name, matches):
    assert (glob_regex(["never", glob]).fullmatch(name) is not None) == matches


def test_a_hostile_pattern_is_decided_and_does_not_try_every_split():
    """The stars can split this name in more ways than a computer can try."""
    code = "from weft.kernels import glob_regex; print(glob_regex(['*?' * 63 + 'z']).fullmatch('a' * 200))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "None\n"
