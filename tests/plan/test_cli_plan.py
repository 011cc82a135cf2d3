"""`weft plan` as a user runs it: the JSON contract, the answers, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import main

TRACE = Path(__file__).parent.parent / "data" / "traces" / "h200_ddp_2ranks" / "rank0.json.gz"
HIDES = ("none", "grads", "grads,params", "grads params tp tp_backward")
SMALL = ("--model", "llama3-8b", "--gpu", "h100", "--gpus", "16", "--tp", "2")
BLOCKS = ("--layers", "8", "--hidden", "4096", "--heads", "32", "--vocab", "64", "--seq", "2048")


def weft(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    return int(end.value.code or 0)


def document(capsys, *arguments: str) -> dict:
    assert weft(*arguments, "--json") == 0
    out = capsys.readouterr()
    assert out.err == ""
    return json.loads(out.out)


def test_the_contract_of_one_configuration(capsys):
    found = document(
        capsys, "--model", "llama3-70b", "--gpu", "h100", "--gpus", "1024", "--tp", "8", "--pp", "4"
    )
    for key in ("step_time_s", "tflops_per_gpu", "mfu_pct", "exposed_comm_s", "breakdown", "policy"):
        assert key in found
    assert found["simulated"] is True
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_time_s"])
    assert 0 < found["mfu_pct"] < 100
    assert found["job"]["dp"] == 32
    assert found["memory_bytes"] <= found["memory_limit_bytes"]
    assert found["memory_bytes"] == pytest.approx(sum(found["memory"].values()))
    assert sum(c["exposed_s"] for c in found["collectives"]) == pytest.approx(found["exposed_comm_s"])
    without = found["without_weft"]["step_time_s"]
    assert found["step_time_s"] <= without * 1.0001
    assert found["gain_pct"] == pytest.approx(100 * (1 - found["step_time_s"] / without))
    assert [c["gain_pct"] for c in found["changes"]] == sorted(
        (c["gain_pct"] for c in found["changes"]), reverse=True
    )


def test_a_person_reads_what_is_simulated_exposed_and_hidden(capsys):
    assert weft(*SMALL) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for words in (
        "Simulated, not measured",
        "Where the step goes",
        "tp all-gather",
        "What weft changes",
        "Memory of",
    ):
        assert words in out


def test_without_controls_it_says_so(capsys):
    assert weft(*SMALL, "--policy", "none") == 0
    assert "Planned without weft's controls" in capsys.readouterr().out


def test_a_policy_file_is_used(capsys, tmp_path):
    from weft.policy import Policy

    Policy(priority="high", max_ctas=8).save(tmp_path / "p.json")
    found = document(capsys, *SMALL, "--policy", str(tmp_path / "p.json"))
    assert found["controls"] == "given"
    assert any((one["policy"] or {}).get("comm", {}).get("max_ctas") == 8 for one in found["collectives"])


def test_dimensions_instead_of_a_name(capsys):
    named = document(capsys, "--model", "gpt-22b", "--gpus", "8", "--tp", "8", "--gpu", "a100-80gb")
    spelled = document(
        capsys,
        "--layers",
        "48",
        "--hidden",
        "6144",
        "--heads",
        "64",
        "--gpus",
        "8",
        "--tp",
        "8",
        "--gpu",
        "a100-80gb",
    )
    assert spelled["job"]["model"] == "custom"
    assert spelled["step_time_s"] == pytest.approx(named["step_time_s"], rel=0.03)


def test_what_overlaps_can_be_said(capsys):
    exposed = [
        document(capsys, *SMALL, "--policy", "none", "--hide", names)["exposed_comm_s"] for names in HIDES
    ]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > exposed[-1]


def test_gpus_follow_from_the_ranks(capsys):
    assert document(capsys, "--model", "llama3-8b", "--tp", "2", "--dp", "4")["job"]["gpus"] == 8


def test_compression_changes_the_wire(capsys):
    slow = ("--model", "llama3-8b", "--gpus", "32", "--tp", "4", "--sharding", "none", "--rail-gbit", "25")
    plain, packed = (document(capsys, *slow, "--compression", name) for name in ("none", "powersgd:4"))
    assert packed["step_time_s"] < plain["step_time_s"]
    assert packed["breakdown"]["compression"] > 0 == plain["breakdown"]["compression"]
    assert packed["memory"]["compression"] > 0
    assert any(change["kind"] == "compression" for change in plain["changes"])


def test_a_slower_network_is_never_faster(capsys):
    steps = [
        document(capsys, *SMALL, "--rail-gbit", rate)["step_time_s"] for rate in ("400", "100", "10", "1")
    ]
    assert steps == sorted(steps)


def test_a_sweep(capsys, tmp_path):
    page = tmp_path / "sweep.html"
    found = document(
        capsys,
        "--model",
        "llama3-8b",
        "--gpus",
        "16",
        "--tp",
        "2",
        "--sweep",
        "--limit",
        "12",
        "--html",
        str(page),
    )
    for key in ("step_time_s", "tflops_per_gpu", "mfu_pct", "exposed_comm_s", "breakdown", "policy"):
        assert key in found
    assert 2 <= len(found["rows"]) <= 12
    assert {row["job"]["tp"] for row in found["rows"]} == {2}
    assert found["rows"][0]["pareto"] is True
    assert "Step time against memory" in page.read_text()
    assert weft("--model", "llama3-8b", "--gpus", "16", "--sweep", "--limit", "4") == 0
    assert "nothing is faster with less memory" in capsys.readouterr().out


def test_scaling(capsys, tmp_path):
    page = tmp_path / "scale.html"
    found = document(capsys, "--model", "llama3-8b", "--tp", "2", "--scale", "8..64", "--html", str(page))
    weak, strong = found["curves"]
    assert [point["gpus"] for point in weak["points"]] == [8, 16, 32, 64]
    assert weak["points"][0]["without"]["efficiency_pct"] == pytest.approx(100)
    assert {point["global_batch"] for point in strong["points"]} == {32}
    assert "Weak scaling" in page.read_text()
    assert weft("--model", "llama3-8b", "--tp", "2", "--scale", "8..32") == 0
    assert "Strong scaling" in capsys.readouterr().out


def test_a_trace_calibrates(capsys):
    options = (*BLOCKS, "--gpu", "h200", "--gpus", "64", "--sharding", "none")
    plain = document(capsys, *options)
    found = document(capsys, *options, "--calibrate", str(TRACE), "--traced", "layers=4 gpus=2")
    figures = {entry["name"]: entry for entry in found["calibration"]["figures"]}
    assert figures["speed"]["after"] != figures["speed"]["before"]
    assert found["calibration"]["trace"]["steps"] == 2
    # Eight layers take what the trace's four took, twice.
    traced = found["calibration"]["trace"]["gemm_s"]
    assert found["breakdown"]["gemm"] == pytest.approx(2 * traced, rel=0.02)
    assert found["step_time_s"] != plain["step_time_s"]
    assert weft(*options, "--calibrate", str(TRACE), "--traced", "layers=4 gpus=2") == 0
    assert "calibrated by a trace" in " ".join(capsys.readouterr().out.split())


def test_execution_traces(capsys, tmp_path):
    folder = tmp_path / "et"
    found = document(
        capsys, *SMALL, "--global-batch", "8", "--chakra", str(folder), "--html", str(tmp_path / "p.html")
    )
    assert found["step_time_s"] > 0
    assert len(list(folder.glob("weft.*.et"))) == 16
    assert weft(*SMALL, "--chakra", str(folder)) == 2
    assert "not an empty folder" in capsys.readouterr().err


WRONG = [
    ("--model lama3-70b --gpus 8", "'llama3-70b'"),
    ("--model llama3-70b --gpu h1000 --gpus 8", "'h100'"),
    ("--model llama3-70b --gpus 1024 --tp 7", "64 heads of llama3-70b; nearest is --tp 8"),
    ("--model llama3-70b --gpus 1024 --tp 8 --pp 128", "80 layers of llama3-70b; nearest is pp 80"),
    ("--model llama3-70b --gpus 64 --pp 4 --interleave 30", "80 layers"),
    ("--model llama3-70b --gpus 60 --pp 5 --schedule dualpipe", "even number of stages"),
    ("--model llama3-70b --gpus 1020 --tp 8 --pp 4", "nearest is 1024"),
    ("--model llama3-70b", "--gpus 1024"),
    ("--gpus 8", "--model NAME"),
    ("--model llama3-8b --layers 4 --gpus 8", "both --model llama3-8b and --layers"),
    ("--layers 4 --hidden 1024 --gpus 8", "--heads is missing"),
    ("--layers 4 --hidden 1024 --heads 7 --gpus 8", "nearest is 8"),
    ("--model llama3-8b --gpus 8 --sweep --scale 8..64", "cannot be combined"),
    ("--model llama3-8b --gpus 8 --scale 64..8", "8..64"),
    ("--model llama3-8b --gpus 8 --scale abc", "8..16384"),
    ("--model llama3-8b --gpus 8 --scale 8..16 --policy none", "--policy"),
    ("--model llama3-8b --scale 8..16 --dp 2", "--dp"),
    ("--model llama3-8b --gpus 0", "nearest is 1"),
    ("--model llama3-8b --gpus -8", "nearest is 1"),
    ("--model llama3-8b --gpus 99999999999999999999", "nearest is 262144"),
    ("--model llama3-8b --gpus eight", "--gpus"),
    ("--model llama3-8b --gpus 8 --seq 99999999999", "67108864"),
    ("--model llama3-8b --gpus 8 --dp 3", "dp is 8"),
    ("--model llama3-8b --gpus 64 --compression zip", "use one of"),
    ("--model llama3-8b --gpus 64 --compression powersgd", "--sharding none"),
    ("--model llama3-8b --gpus 8 --tp 8 --compression int8", "--compression none"),
    ("--model llama3-8b --gpus 8 --precision fp4", "nvfp4"),
    ("--model llama3-8b --gpus 8 --gpu a100 --precision fp8", "bf16"),
    ("--model llama3-8b --gpus 8 --sharding zero4", "zero3"),
    ("--model llama3-8b --gpus 8 --recompute some", "selective"),
    ("--model llama3-8b --gpus 8 --schedule zigzag", "1f1b"),
    ("--model llama3-8b --gpus 8 --interleave 2", "pp to 2"),
    ("--model llama3-8b --gpus 8 --pp 2 --schedule gpipe --interleave 2", "interleaved"),
    ("--model llama3-8b --gpus 8 --sequence-parallel", "tp to 2"),
    ("--model llama3-8b --gpus 8 --ep 8", "no experts"),
    ("--model mixtral-8x7b --gpus 64 --ep 3", "nearest is 4"),
    ("--model llama3-8b --gpus 8 --expert-tp 2", "no experts"),
    ("--model mixtral-8x7b --gpus 64 --tp 4 --ep 2 --expert-tp 3", "nearest is --expert-tp 4"),
    ("--model llama3-8b --gpus 8 --global-batch 7", "nearest is 8"),
    ("--model llama3-405b --gpus 8 --tp 8", "GiB on its fullest GPU"),
    ("--model llama3-8b --gpus 8 --network wifi", "use one of"),
    ("--model llama3-8b --gpus 8 --rail-gbit nan", "0.001 to 1000000"),
    ("--model llama3-8b --gpus 8 --oversubscription 0.5", "nearest is 1"),
    ("--model llama3-8b --gpus 8 --policy nonsense", "auto, none"),
    ("--model llama3-8b --gpus 8 --software windows", "use one of"),
    ("--model llama3-8b --gpus 8 --html /nowhere/x.html", "existing folder"),
    ("--model llama3-8b --gpus 8 --calibrate /nowhere.json", "cannot be read"),
    ("--model llama3-8b --gpus 8 --traced layers=4", "--calibrate"),
    ("--model llama3-8b --gpus 8 --limit 5", "--sweep"),
    ("--model llama3-8b --gpus 8 --sweep --chakra x", "leave out --sweep"),
    ("--model llama3-8b --gpus 8 --nonsense", "--nonsense"),
    ("--layers 4 --hidden 1024 --heads 8 --kv-heads 16 --gpus 8", "kv_heads 16 does not divide"),
    ("--layers 4 --hidden 1024 --heads 8 --kv-heads 3 --gpus 8", "nearest is"),
    ("--layers 4 --hidden 1024 --heads 8 --experts-per-token 2 --gpus 8", "add --experts"),
    ("--layers 4 --hidden 1024 --heads 8 --expert-ffn 512 --gpus 8", "add --experts"),
    ("--layers 4 --hidden 1024 --heads 8 --experts 4 --experts-per-token 8 --gpus 8", "use 1 to 4"),
    ("--model llama3-8b --gpus 8 --expert-ffn 512", "use the name or the dimensions"),
    ("--model llama3-8b --gpus 8 --sharding none --shard-ranks 4", "nothing is sharded"),
    ("--model llama3-8b --gpus 16 --sharding zero3 --shard-ranks 3", "nearest is"),
    ("--model llama3-8b --gpus 8 --config x.json", "describe the model"),
    ("--config /nowhere/config.json --gpus 8", "cannot read"),
    ("--model llama3-8b --gpus 8 --cluster /nowhere.toml", "cannot read"),
    ("--model llama3-8b --gpus 8 --cluster x.toml --network ndr400", "describe the network"),
    ("--model llama3-8b --gpus 8 --launch job.yaml", ".toml for torchtitan"),
    ("--model llama3-8b --gpus 8 --price 0", "0.001"),
    ("--model llama3-8b --gpus 8 --hide everything", "grads, params"),
    ("--model llama3-8b --gpus 8 --precision nvfp4", "nearest is bf16"),
    ("--model llama3-8b --gpu v100 --gpus 8 --precision bf16", "nearest is fp16"),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_a_mistake_is_one_line_with_the_way_out(line, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = line.split()
    if "--html" not in arguments:
        arguments += ["--html", "page.html"]
    assert weft(*arguments, "--json") == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("weft: ")
    assert len(out.err.splitlines()) == 1
    assert said in out.err
    assert list(tmp_path.iterdir()) == []


def test_a_rate_in_fp8_says_of_what(capsys):
    assert weft("--model", "llama3-70b", "--gpus", "512", "--tp", "4", "--pp", "4", "--precision", "fp8") == 0
    assert "% of the bf16 peak" in " ".join(capsys.readouterr().out.split())


def test_a_size_that_does_not_fit_is_left_out_of_the_curve(capsys):
    assert (
        weft("--model", "llama3-8b", "--gpu", "mi300x", "--tp", "1", "--sharding", "none", "--scale", "1..4")
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "no published run of megatron-2025 on mi300x was checked" in said
    assert weft("--model", "llama3-8b", "--scale", "1..8", "--sharding", "zero1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "to 8 GPUs" in said
    assert "Left out: 2 GPUs: llama3-8b on 2 h100 (dp2) needs" in said
