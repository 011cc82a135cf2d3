import dataclasses

import pytest

from weft.errors import UsageError
from weft.gpu.presets import ALIASES, GPU_PRESETS
from weft.gpu.specs import spec

EVERY = pytest.mark.parametrize("gpu", GPU_PRESETS.values(), ids=GPU_PRESETS.keys())


def test_all_documented_presets_exist():
    assert set(GPU_PRESETS) == {
        *("v100", "a40", "a100-40gb", "a100-80gb", "h20", "h800", "h100", "h200"),
        *("b200", "gb200", "b300", "gb300", "mi250x", "mi300x", "mi355x"),
    }


@pytest.mark.parametrize(
    ("asked", "found"),
    [("H200", "h200"), (" a100 ", "a100-40gb"), ("A100_80GB", "a100-80gb"), ("H100 SXM", "h100")],
)
def test_lookup_ignores_case_and_knows_aliases(asked, found):
    assert spec(asked).name == found


@pytest.mark.parametrize(("asked", "near"), [("h2000", "h200"), ("mi300", "mi300x"), ("a10", "a100")])
def test_unknown_name_gets_the_nearest_one(asked, near):
    with pytest.raises(UsageError, match=f"did you mean '{near}'"):
        spec(asked)


def test_a_name_unlike_any_preset_gets_a_suggestion():
    with pytest.raises(UsageError, match="h100"):
        spec("")


def test_aliases_name_presets_and_shadow_none():
    assert set(ALIASES.values()) <= set(GPU_PRESETS)
    assert not set(ALIASES) & set(GPU_PRESETS)


@EVERY
def test_a_spec_is_hashable_data(gpu):
    assert hash(gpu) == hash(dataclasses.replace(gpu))
    assert gpu.vendor in ("nvidia", "amd")


@EVERY
def test_vector_rate_agrees_with_clock_and_lanes(gpu):
    # 2 operations x lanes x clock; CDNA 2 issues packed fp32 on 64 lanes, CDNA 3 on 128 (dual issue).
    lanes = {"sm_70": 64, "sm_80": 64, "gfx90a": 64, "gfx942": 128}.get(gpu.arch, 128)
    expected = 2 * lanes * gpu.sms * gpu.boost_mhz * 1e6
    assert gpu.flops("fp32") == pytest.approx(expected, rel=0.02)


@EVERY
def test_memory_and_registers_are_consistent(gpu):
    assert gpu.shared_bytes_per_block_optin + gpu.shared_reserve_bytes_per_block <= gpu.shared_bytes_per_sm
    assert gpu.registers_per_sm % (gpu.sub_partitions_per_sm * gpu.register_unit_per_warp) == 0
    assert gpu.max_threads_per_sm % gpu.max_threads_per_block in (0, 512)
    assert gpu.pcie_bytes_per_s < gpu.fabric_bytes_per_s < gpu.memory_bytes_per_s


@pytest.mark.parametrize(
    ("name", "gb_s"), [("a100", 300), ("h100", 450), ("h200", 450), ("b200", 900), ("mi300x", 448)]
)
def test_fabric_bandwidth_is_per_direction(name, gb_s):
    assert spec(name).fabric_bytes_per_s == pytest.approx(gb_s * 1e9)


def test_an_unsupported_dtype_is_rejected_with_the_supported_ones():
    with pytest.raises(UsageError, match=r"A100.* no fp8 rate.*bf16"):
        spec("a100").flops("fp8")
    with pytest.raises(UsageError, match="no int4 rate"):
        spec("h100").flops("int4")
