"""The Triton GEMM without a GPU: compiled for Hopper, and run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("torch")

INTERPRETED = """
import itertools, torch
from weft.execute.kernels import launch_gemm
torch.manual_seed(0)
for (m, n, k), grid, gelu, vector in itertools.product(
    [(96, 80, 64), (64, 64, 50), (70, 130, 33)], [(1, 1), (2, 3), (8, 8)], [False, True], [False, True]
):
    a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
    c = torch.full((m, n), float("nan")).half()
    launch_gemm(a, b, c, tile=(32, 32, 32), grid=grid, warps=4, stages=2, gelu=gelu, vector=vector)
    wanted = a.double() @ b.double()
    if gelu:
        wanted = torch.nn.functional.gelu(wanted, approximate="tanh")
    error = float((c.double() - wanted).norm() / wanted.norm())
    assert error < 1e-3, (m, n, k, grid, gelu, vector, error)
print("right")
"""


def test_every_grid_computes_the_gemm():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    if "0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy")
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.parametrize(
    ("tile", "warps", "shared", "blocks"),
    [((64, 64, 64), 4, 49152, 4), ((64, 64, 32), 4, 24576, 7), ((128, 128, 64), 8, 98304, 2)],
)
def test_the_resources_of_a_block(tile, warps, shared, blocks, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weft.execute.kernels import weft_gemm
    from weft.kernels import TRITON_GEMM

    names = ["a_ptr", "b_ptr", "c_ptr", "size_m", "size_n", "size_k"]
    constants = dict(zip(("TILE_M", "TILE_N", "TILE_K"), tile, strict=True)) | {
        "EVEN_K": True,
        "GELU": False,
        "VECTOR": False,
    }
    signature = {name: "*bf16" if "ptr" in name else "i32" for name in names} | dict.fromkeys(
        constants, "constexpr"
    )
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    source = ASTSource(fn=weft_gemm, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3}
    )
    assert kernel.metadata.name == TRITON_GEMM
    assert kernel.metadata.shared == shared
    assert "wgmma" in kernel.asm["ptx"]
    # The residency that the suites shape starts from this many blocks; Hopper: 227 KiB and 64 Ki registers.
    registers = _registers(kernel.asm["cubin"], tmp_path)
    by_shared = (228 << 10) // (shared + 1024)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    assert min(by_shared, by_registers) == blocks


def test_the_vector_gemm_uses_no_matrix_unit_and_several_fit_on_an_sm(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weft.execute.kernels import weft_gemm
    from weft.gpu.occupancy import blocks_per_sm
    from weft.gpu.specs import spec
    from weft.workload import named, paper_reading

    compute = paper_reading(named("cb-ar-opt2")).compute
    names = ["a_ptr", "b_ptr", "c_ptr", "size_m", "size_n", "size_k"]
    constants = dict(zip(("TILE_M", "TILE_N", "TILE_K"), compute.tile, strict=True))
    constants |= {"EVEN_K": True, "GELU": False, "VECTOR": True}
    signature = {name: "*bf16" if "ptr" in name else "i32" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    source = ASTSource(fn=weft_gemm, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": compute.warps, "num_stages": 1}
    )
    assert "fma.rn.f32" in kernel.asm["ptx"]
    assert "mma.sync" not in kernel.asm["ptx"]
    assert "wgmma" not in kernel.asm["ptx"]
    # The operands lie in shared memory as fp32; the reading assumes bf16 and four blocks per SM.
    registers, threads = _registers(kernel.asm["cubin"], tmp_path), 32 * compute.warps
    assert blocks_per_sm(spec("h100"), threads, registers, kernel.metadata.shared) >= 3


def _registers(cubin: bytes, tmp_path) -> int:
    from pathlib import Path

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton has no cuobjdump")
    image = tmp_path / "kernel.cubin"
    image.write_bytes(cubin)
    said = subprocess.run([tool, "-res-usage", image], capture_output=True, text=True, check=True).stdout
    return int(said.split("REG:")[1].split()[0])
