"""`weft tune` on a made-up GPU: ranking, the store, the written policy; and `weft store`."""

from __future__ import annotations

import json

import pytest

from weft.execute.base import PipelineSample
from weft.gpu.specs import spec
from weft.policy import Policy, Rule
from weft.tuning.candidates import GEMM, PLAIN, SEQUENTIAL, Candidate, candidates, for_kernel, promising
from weft.tuning.store import Store
from weft.workload import named

WORDS = ("tune", "cb-ar", "--iterations", 2, "--ranks", 2)


class Gpu:
    """An H200 on which fewer resident blocks help, and priority too."""

    device, simulated = "cuda:made up", False
    opened = 0

    def __init__(self):
        self.measured = 0

    def info(self):
        return {
            "gpu": "NVIDIA H200",
            "sm_count": 132,
            "torch": "2.11",
            "nccl": "2.32.3",
            "ranks": "ghost ranks",
        }

    def measure(self, workload, policy, mode="overlap"):
        self.measured += 1
        fixed = {"sequential": 20.0, "compute": 9.0, "comm": 9.0}
        gain = 2.0 * bool(policy.rules) + 1.0 * (policy.priority == "high") - 0.5 * bool(policy.head_start_us)
        return PipelineSample(fixed.get(mode, 15.0 - gain))

    def close(self):
        pass


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made = Gpu()
    monkeypatch.setattr("weft.execute.devices.open_executor", lambda device, node="": made)
    return made


def test_the_simulator_rules_out_what_is_not_promising_and_says_so(weft, gpu):
    code, out, _ = weft(*WORDS, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["ranked_out"] > 0
    labels = [row["candidate"] for row in document["candidates"]]
    assert labels[:2] == ["sequential", "overlap"]
    assert {"priority", "head5", "ctas4"} <= set(labels)  # each control is tried alone
    assert sum(label.removeprefix("res").isdecimal() for label in labels) >= 2
    assert "res" in document["verdict"]["candidate"]
    _, out, _ = weft(*WORDS, "--fresh")
    assert f"{document['ranked_out']} more ruled out by simulation" in " ".join(out.split())
    _, out, _ = weft(*WORDS, "--fresh", "--every", "--json")
    whole = json.loads(out)
    assert whole["ranked_out"] == 0
    assert len(whole["candidates"]) == len(labels) + document["ranked_out"]


def test_a_verdict_is_kept_and_shown_at_once(weft, gpu, tmp_path):
    _, out, _ = weft(*WORDS, "--json")
    first, known = json.loads(out), gpu.measured
    code, out, err = weft(*WORDS, "--json", "--out", tmp_path / "p.json")
    second = json.loads(out)
    assert (code, err) == (0, "")
    assert gpu.measured == known
    assert second.pop("stored")
    assert second == first
    assert Policy.load(tmp_path / "p.json") == Policy.from_dict(first["policy"])
    _, out, _ = weft(*WORDS)
    assert "`--fresh` measures again" in out
    weft(*WORDS, "--fresh")
    assert gpu.measured > known
    known = gpu.measured
    weft("tune", "cb-ar", "--iterations", 3, "--ranks", 2)  # another workload
    assert gpu.measured > known


def test_a_stale_verdict_is_measured_again_with_its_winner(weft, gpu, monkeypatch):
    weft(*WORDS)
    (entry,) = Store().entries()
    odd = Policy(priority="high", head_start_us=9.0)
    Store().put(entry.key, odd, {"text": "of another time"})
    monkeypatch.setattr("weft.tuning.entry.MAX_AGE_S", -1.0)
    _, out, _ = weft(*WORDS, "--json")
    assert odd.to_dict() in [row["policy"] for row in json.loads(out)["candidates"]]


def test_simulated_verdicts_are_not_kept(weft, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    code, _, _ = weft(*WORDS, "--device", "sim:a100", "--json")
    assert code == 0
    assert not (tmp_path / "verdicts.sqlite").exists()


def test_a_broken_store_costs_a_line_and_not_the_verdict(weft, gpu, tmp_path):
    (tmp_path / "verdicts.sqlite").write_bytes(b"no database" * 100)
    code, out, err = weft(*WORDS, "--json")
    assert code == 0
    assert json.loads(out)["verdict"]["choice"] == "apply"
    assert "damaged" in err
    assert all(line.startswith("weft: store ") for line in err.splitlines())


def test_the_policy_for_a_kernel_of_ones_own(weft, gpu, tmp_path):
    path = tmp_path / "p.json"
    _, out, _ = weft(*WORDS, "--out", path)
    assert "`--kernel PATTERN` names that of your program" in out
    assert Policy.load(path).rules[0].kernel == GEMM
    _, out, _ = weft(*WORDS, "--out", path, "--kernel", "*my_matmul*")
    mine = Policy.load(path)
    assert [rule.kernel for rule in mine.rules] == ["*my_matmul*"]
    assert mine.when == "overlap"
    assert "names that of your program" not in out
    assert for_kernel(Policy(priority="high"), "*x*") == Policy(priority="high")
    code, _, err = weft(*WORDS, "--kernel", "x" * 200)
    assert code == 2
    assert "too long" in err


def test_promising_keeps_the_safety_set_and_the_first_by_the_model():
    tried = candidates(named("cb-ar"), spec("h200"), 8, 32)
    chosen = promising(tried, lambda c: {"priority+res3": 1.0}.get(c.label, 2.0), most=4)
    labels = [c.label for c in chosen]
    assert chosen[:2] == [SEQUENTIAL, PLAIN]
    assert "priority+res3" in labels
    assert {c.label for c in tried if "+" not in c.label} <= set(labels)
    assert len(labels) == len({c.label for c in tried if "+" not in c.label}) + 2
    few = [SEQUENTIAL, PLAIN, Candidate("priority", Policy(priority="high"))]
    assert promising(few, lambda c: 1.0) == few


def fill(path):
    store = Store(path)
    from weft.tuning.store import Key

    for workload, policy in (("one", Policy(priority="high")), ("two", Policy(rules=(Rule("*gemm*", 3),)))):
        store.put(
            Key("NVIDIA H200", "580", "2.32", "2.11", workload), policy, {"verdict": {"gain_pct": 12.34}}
        )
    return store


def test_store_lists_exports_imports_and_forgets(weft, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "a.sqlite"))
    _, out, _ = weft("store")
    assert "no verdicts yet" in out
    fill(tmp_path / "a.sqlite")
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = weft("store", "list")
    assert "priority high" in out
    assert "12.3%" in out
    _, out, _ = weft("store", "list", "--json")
    assert [entry["stale"] for entry in json.loads(out)["entries"]] == [False, False]
    _, out, _ = weft("store", "export", tmp_path / "x.json")
    assert out == "exported: 2 verdicts\n"
    _, out, _ = weft("store", "import", tmp_path / "x.json", "--store", tmp_path / "b.sqlite", "--json")
    assert json.loads(out)["imported"] == 2
    _, out, _ = weft("store", "forget", "--workload", "one")
    assert out == "forgot: 1 verdict\n"
    weft("store", "forget", "--all")
    assert Store().entries() == []
    assert len(Store(tmp_path / "b.sqlite").entries()) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("store", "dance"), "store 'dance' is not known"),
        (("store", "export"), "needs a FILE"),
        (("store", "list", "x.json"), "takes no FILE"),
        (("store", "import", "/no/such/file"), "cannot read /no/such/file"),
        (("store", "forget"), "--workload TEXT or --all"),
        (("store", "forget", "--all", "--workload", "x"), "--workload TEXT or --all"),
        (("store", "list", "--store", "/"), "this is a folder"),
        (("store", "export", "/no/such/folder/x.json"), "cannot write"),
    ],
)
def test_wrong_words_are_one_line(weft, monkeypatch, tmp_path, words, said):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    code, out, err = weft(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["no json", "[]", "{" * 100_000, '{"kind": "weft verdicts", "version": 1, "entries": [{}]}']
)
def test_a_file_that_is_no_export(weft, monkeypatch, tmp_path, text):
    monkeypatch.setenv("WEFT_STORE", str(tmp_path / "verdicts.sqlite"))
    (tmp_path / "x.json").write_text(text)
    code, _, err = weft("store", "import", tmp_path / "x.json")
    assert code == 2
    assert err.startswith(f"weft: {tmp_path / 'x.json'}")
    assert not (tmp_path / "verdicts.sqlite").exists()
