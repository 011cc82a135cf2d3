"""`weft run --tune` on real processes over gloo: in step, in order, and never in the program's way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from live_scenarios import BASE, CLEAN, HERE, HOME, Played, Zoo

from weft.tuning.live.proof import BLOCK, USUAL_BLOCKS

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def shared_zoo(tmp_path_factory):
    with Zoo(tmp_path_factory.mktemp("live")) as zoo:
        yield zoo


@pytest.fixture
def zoo(shared_zoo, request):
    """Plays a job by its name, once for all tests. A rerun of a failed test gets its own jobs."""
    return partial(shared_zoo.play, run=getattr(request.node, "execution_count", 1))


pytestmark = pytest.mark.timeout(420)


def test_every_policy_change_is_at_the_same_step_on_all_ranks(zoo):
    played = zoo("tuned")
    assert played.codes == [0] * 4
    steps = played.in_step()
    assert {"ctas6", "ctas16", "ctas24"} <= set(steps)
    assert "ctas16" in played.ends_with()
    result = played.tuning()
    assert result["state"] == "kept"
    assert result["steps"] < 60 + USUAL_BLOCKS * BLOCK
    low, high = result["ci"]
    assert 0 < low <= result["gain_pct"] <= high
    known_after = 4  # steps until weft knows the step of one optimizer
    counted = known_after + result["warm_up_steps"] + result["steps"] + result["watch"]["steps"]
    assert counted == len(steps)
    del result["watch"]
    for rank in (1, 2, 3):
        other = played.tuning(rank)
        assert {name: other[name] for name in result} == result
    assert [rank["released"] for rank in played.ranks] == [True] * 4


def test_tuned_once_nothing_is_left_in_the_program_and_only_the_first_rank_speaks(zoo):
    played = zoo("once")
    for rank in played.ranks:
        assert (rank["hooks"], rank["left"], rank["threads"]) == (0, [], [])
        assert rank["end"] == rank["policies"][-1]
    assert "tuning is over: ctas16" in played.error(0)
    assert "weft" not in played.error(1)
    assert played.tuning()["watch"] is None


def test_a_policy_that_turns_slower_is_taken_back_on_all_ranks_at_the_same_step(zoo):
    played = zoo("drift")
    assert played.codes == [0] * 3
    steps = played.in_step()
    assert "ctas16" in Counter(steps[260:279]).most_common(1)[0][0]
    assert set(steps[335:]) == {"overlap"}
    result = played.tuning()
    assert result["state"] == "left alone"
    assert "was reverted: it took" in result["text"]
    assert result["watch"]["reverted"]
    assert "the job continues with the default" in played.error(0)
    assert [rank["released"] for rank in played.ranks] == [True] * 3


def test_losses_are_the_same_to_the_last_bit(zoo):
    for tuned, without in zip(zoo("tuned").ranks, zoo("without").ranks, strict=True):
        assert len(tuned["losses"]) == 260
        assert tuned["losses"] == without["losses"]


def test_a_restart_takes_the_policy_from_the_store_and_measures_it_again(zoo):
    played = zoo("restarted")
    result = played.tuning()
    assert result["source"] == "an earlier run, measured again"
    assert result["policy"] == zoo("tuned").tuning()["policy"]
    assert len(set(played.in_step())) == 2


def test_a_killed_rank_ends_the_job_as_it_would_without_weft(zoo):
    played, plain = zoo("killed"), zoo("killed without weft")
    assert played.codes == plain.codes
    assert played.codes[2] == 9
    assert all(code not in (0, -9) for code in played.codes)


def test_a_rank_killed_in_the_watch_ends_the_job_as_it_would_without_weft(zoo):
    played, plain = zoo("killed in the watch"), zoo("killed late without weft")
    assert played.codes == plain.codes
    assert played.codes[1] == 9
    assert played.tuning()["state"] == "kept"


@pytest.mark.parametrize("name", ["paused in the watch", "leader paused in the watch"])
def test_a_rank_that_pauses_in_the_watch_delays_the_job_and_nothing_else(zoo, name):
    played = zoo(name)
    assert set(played.codes) == {0}
    assert "ctas16" in played.ends_with()
    assert played.tuning()["state"] == "kept"


def test_a_stalled_trial_is_abandoned_and_the_job_goes_on(zoo):
    played = zoo("stalled")
    assert played.codes == [0] * 4
    steps = played.in_step()
    assert steps.count("ctas24") == 1
    assert "ctas16" in played.ends_with()
    (stalled,) = [one for one in played.tuning()["candidates"] if one["label"] == "ctas24"]
    assert stalled["note"] == "stalled"


def test_what_one_rank_cannot_do_is_tried_on_none(zoo):
    played = zoo("refused")
    assert played.codes == [0] * 3
    assert not any("ctas16" in policy for policy in played.in_step())
    assert "16 CTAs are refused here" in json.dumps(played.tuning())


def test_two_optimizers_make_one_step(zoo):
    played = zoo("two optimizers")
    assert "ctas16" in played.ends_with()
    assert played.tuning()["state"] == "kept"


def test_without_an_optimizer_the_job_is_left_alone_and_told_why(zoo):
    played = zoo("no optimizer")
    assert played.codes == [0, 0]
    assert set(played.in_step()) == {"overlap"}
    assert "no optimizer step" in played.tuning()["text"]


def test_a_job_that_ends_during_tuning_ends_well(zoo):
    played = zoo("short")
    assert played.codes == [0, 0]
    assert "destroyed its process group before tuning finished" in played.tuning()["text"]


def test_a_process_group_made_anew_ends_the_tuning_on_all_ranks_at_once(zoo):
    played = zoo("a new group")
    assert played.codes == [0, 0]
    steps = played.in_step()
    assert set(steps[:26]) != {"overlap"}
    assert set(steps[26:]) == {"overlap"}
    assert [rank["left"] for rank in played.ranks] == [[], []]
    assert all("destroyed its process group" in played.tuning(rank)["reason"] for rank in (0, 1))


def test_a_gain_is_found_where_the_longest_input_of_all_ranks_decides_how_long_a_step_takes(zoo):
    played = zoo("lengths")
    assert "ctas16" in played.ends_with()
    result = played.tuning()
    low, high = result["ci"]
    assert low <= 5 <= high
    assert high - low < 3
    assert result["noise_pct"] < 3  # although the steps themselves scatter by 9%


def test_uneven_steps_lead_to_no_change(zoo):
    played = zoo("uneven")
    assert played.codes == [0, 0]
    played.in_step()
    result = played.tuning()
    assert result["state"] == "left alone"
    assert result["noise_pct"] > 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken store", "earlier results are not used: store "),
        ("broken store", "the result is not saved for the next start: store "),
        ("locked store", "the result is not saved for the next start: store "),  # others may still read
    ],
)
def test_a_store_that_cannot_be_used_costs_a_warning(zoo, name, told):
    played = zoo(name)
    assert played.codes == [0, 0]
    assert [line for line in played.error(0).splitlines() if line.startswith(f"weft: {told}")]
    assert "ctas16" in played.ends_with()  # it is tuned all the same


def test_a_program_without_a_process_group_is_not_touched(zoo):
    played = zoo("no group")
    assert played.codes == [0]
    assert played.error() == ""
    assert not list(played.folder.glob("tuning.*.json"))


# --- the command itself ---------------------------------------------------------------------------------------


def weft_run(
    folder: Path, *options: str, launcher: tuple[str, ...] = (), timeout_s: float = 200, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--tune",
        "--stats",
        str(folder / "stats.json"),
        *options,
        "--",
    ]
    program = launcher or (sys.executable,)
    everything = {**CLEAN, **BASE, "RECORD": str(folder), "OMP_NUM_THREADS": "1", "STEPS": "260", **env}
    everything |= {"PYTHONPATH": f"{HOME}:{HERE}", "WEFT_STORE": str(folder / "store.sqlite")}
    everything.pop("WEFT_TUNE")
    job = [*command, *program, str(HERE / "live_job.py")]
    with (folder / "stderr").open("w+") as said:
        running = subprocess.Popen(job, env=everything, stderr=said)
        try:
            code = running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            running.terminate()  # then torchrun ends its ranks
            running.wait()
            raise
        said.seek(0)
        return subprocess.CompletedProcess(job, code, "", said.read())


def test_torchrun_under_weft_run_is_tuned_without_an_edit(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = weft_run(tmp_path, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["tuning"]["state"] == "kept", done.stderr
    assert stats["tuning"]["policy"]["comm"]["max_ctas"] == 16
    assert done.stderr.splitlines()[-1] == f"weft: {stats['tuning']['text']}"
    assert "ctas16" in Played(tmp_path).ends_with()


@pytest.mark.slow
def test_an_elastic_restart_is_tuned_again_from_the_start(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    unconnected = "gloo does not always connect after a restart, without weft neither"
    try:
        done = weft_run(
            tmp_path, launcher=(*torchrun, "--max-restarts", "1"), timeout_s=90, DIE="40@1", STEPS="110"
        )
    except subprocess.TimeoutExpired:
        assert (tmp_path / "stderr").read_text().count(
            "weft: tuning 2 ranks"
        ) == 1  # in the first start alone
        pytest.skip(unconnected)
    if "Gloo connectFullMesh failed" in done.stderr:
        pytest.skip(unconnected)
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["tuning"]["state"] == "kept", done.stderr
    assert "ctas16" in Played(tmp_path).ends_with()
    assert done.stderr.count("weft: tuning 2 ranks") == 2


@pytest.mark.slow
def test_the_page_and_the_options_of_the_watch(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    page = tmp_path / "page.html"
    done = weft_run(tmp_path, "--html", str(page), "--tune-budget", "0.1", launcher=torchrun, STEPS="420")
    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    watch = stats["tuning"]["watch"]
    assert watch["probes"] >= 0.05 * watch["steps"]
    text = page.read_text()
    assert text.count("<circle") >= 130
    assert 'class="step-proof"' in text


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "no process of this job loaded weft's tuner"),
        ({}, "no process of this job initialised torch.distributed"),
    ],
)
def test_a_job_that_cannot_be_tuned_runs_as_ever_and_the_reason_is_told(tmp_path, env, told):
    done = weft_run(tmp_path, **env, NO_GROUP="1", STEPS="5")
    assert done.returncode == 0, done.stderr
    assert told in done.stderr.splitlines()[-1]
    assert len(done.stderr.splitlines()) == 1
    assert len(Played(tmp_path).ranks) == 1
