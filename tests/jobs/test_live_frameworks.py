"""Framework controls in running jobs over gloo: DDP buckets and FSDP2 settings are found, tried, kept and undone."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_scenarios import PATIENT
from rank_processes import run_rank_processes

import weft

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
JOB = HERE / "programs" / "framework_job.py"
HOME = str(Path(weft.__file__).parent.parent)
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("WEFT", "TORCH", "PYTHONPATH"))
}
EFFECTS = {
    "bucket1": 0.8,
    "forward1": 0.97,
    "forward2": 0.9,
    "forward4": 1.05,
    "backward2": 1.1,
    "backward4": 1.1,
    "keep": 0.92,
    "rsgroup": 1.05,
    "dma": 0.9,
}


@dataclass
class Ran:
    """What a job left behind."""

    folder: Path
    ranks: int
    outputs: list[str]

    @property
    def losses(self) -> list[str]:
        return [(self.folder / f"losses.{rank}").read_text() for rank in range(self.ranks)]

    @property
    def policies(self) -> list[dict]:
        """The framework and comm controls of every step, which must be the same on all ranks."""
        first, *others = (
            [
                {**policy.get("framework", {}), **policy.get("comm", {})}
                for policy in json.loads((self.folder / f"rank{rank}.json").read_text())["policies"]
            ]
            for rank in range(self.ranks)
        )
        assert all(other == first for other in others)
        return first

    @property
    def tuning(self) -> dict:
        return json.loads((self.folder / "tuning.0.json").read_text())


def run(folder: Path, kind: str, steps: int = 110, ranks: int = 2, *, tuned: bool = True, **more: str) -> Ran:
    folder.mkdir()
    env = {**CLEAN, "RECORD": str(folder), "PYTHONPATH": f"{HERE}:{HOME}"}
    if tuned:
        env |= {
            "WEFT_TUNE": "1",
            "WEFT_TUNE_HOME": HOME,
            "WEFT_TUNE_CONTROLS": "framework_controls:FrameworkControls",
            "WEFT_JOB": str(folder),
            "WEFT_STORE": str(folder / "store.sqlite"),
            "EFFECTS": json.dumps(EFFECTS),
            "WEFT_LOG": "debug",
            **PATIENT,
            **more,
        }
    codes, outputs = run_rank_processes([JOB, kind, str(steps)], ranks, env, folder)
    assert codes == [0] * ranks, [text[-3000:] for text in outputs]
    return Ran(folder, ranks, outputs)


def both(folder: Path, kind: str, **options) -> Ran:
    """Run a job with and without live tuning: the losses must be bit-identical."""
    options = {"steps": 110, "ranks": 2, **options}
    with_weft = run(folder / "with", kind, **options)
    without = run(folder / "without", kind, options["steps"], options["ranks"], tuned=False)
    assert with_weft.losses == without.losses
    return with_weft


def ends_with(ran: Ran) -> dict:
    return json.loads(Counter(map(json.dumps, ran.policies[-9:])).most_common(1)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ddp views", "ddp accumulated"])
def test_ddp_buckets_are_changed_in_the_running_job(tmp_path, kind):
    ran = both(tmp_path, kind, steps=240)
    assert {json.dumps(policy) for policy in ran.policies} >= {"{}", '{"bucket_mb": 1.0}'}
    assert ran.tuning["state"] == "kept", ran.tuning["text"]
    assert ends_with(ran) == {"bucket_mb": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 irregular", "fsdp2 compiled blocks"])
def test_fsdp2_is_changed_in_the_running_job(tmp_path, kind, ranks):
    if ranks == 4 and kind != "fsdp2":
        pytest.skip("the same code as with two ranks")
    copies = kind == "fsdp2 irregular"
    ran = both(tmp_path, kind, steps=290 if copies else 260, ranks=ranks, COPIES="1" if copies else "")
    assert {name for policy in ran.policies for name in policy} == {
        "forward_prefetch",
        "backward_prefetch",
        "reshard_after_forward",
        "reduce_scatter_group",
        *(["engine"] if copies else []),
    }
    assert ends_with(ran) == {
        "forward_prefetch": 2,
        "reshard_after_forward": False,
        **({"engine": "dma"} if copies else {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ddp unused", "unused parameters"),
        ("ddp static", "static graph"),
        ("ddp hook", "communication hook"),
        ("ddp compiled", "compiled"),
        ("ddp join", "`join`"),
    ],
)
def test_what_is_not_understood_is_left_unchanged_and_the_debug_log_says_why(tmp_path, kind, why):
    ran = both(tmp_path, kind, steps=30)
    assert not any(ran.policies)
    assert "DDP (1 modules) is left unchanged: it" in ran.outputs[0]
    assert why in ran.outputs[0]


@pytest.mark.parametrize(
    ("kind", "part"), [("ddp", "bucket1"), pytest.param("fsdp2", "forward2", marks=pytest.mark.slow)]
)
def test_where_one_rank_fails_all_ranks_undo(tmp_path, kind, part):
    ran = both(tmp_path, kind, steps=240, FAIL=f"{part}@1")
    assert f"{part} is refused here" in json.dumps(ran.tuning["candidates"])
    assert part not in json.dumps(
        [weft.Policy.from_dict({"version": 1, "framework": p}).label for p in ran.policies]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "needs", "ranks"),
    [
        ("resnet", "torchvision", 2),
        ("llama ddp", "transformers", 2),
        ("llama fsdp2", "transformers", 2),
        ("llama fsdp2", "transformers", 4),
        ("accelerate", "accelerate", 2),
        ("lightning", "lightning", 2),
    ],
)
def test_models_and_loops_of_other_projects(tmp_path, kind, needs, ranks):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    ran = both(tmp_path, kind, steps=260, ranks=ranks)
    assert any(ran.policies)
    assert ran.tuning["state"] == "kept"


def test_a_policy_with_framework_controls_is_applied_on_all_ranks(tmp_path):
    policy = weft.Policy(bucket_mb=1.0)
    ran = run(tmp_path / "with", "ddp", 20, WEFT_TUNE="apply", WEFT_TUNE_POLICY=json.dumps(policy.to_dict()))
    assert {json.dumps(p) for p in ran.policies[-10:]} == {'{"bucket_mb": 1.0}'}
    assert ran.losses == run(tmp_path / "without", "ddp", 20, tuned=False).losses
    assert "bucket1 is in force" in ran.outputs[0]


def test_copy_engines_are_applied_on_all_ranks_or_on_none(tmp_path):
    given = json.dumps(weft.Policy(engine="dma", forward_prefetch=1).to_dict())
    copied, refused = (
        run(tmp_path / copies, "fsdp2", 20, WEFT_TUNE="apply", WEFT_TUNE_POLICY=given, COPIES=copies)
        for copies in ("1", "refused")
    )
    assert copied.losses == refused.losses
    for ran in (copied, refused):
        assert ran.policies[-1] == {"forward_prefetch": 1, "engine": "dma"}
        assert "dma+forward1 is in force" in ran.outputs[0]
        assert ("FSDP2 gathers with SM kernels" in ran.outputs[0]) == (ran is refused)
