"""The callbacks for Lightning and the Hugging Face Trainer, in the real packages, in a job under `weft run`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from weft.errors import UnavailableError
from weft.integrations.callback import Training
from weft.policy import Policy

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

COMMON = """
import json, sys, torch
from weft.policy import Policy
from weft.shim import binding, layout

def in_force():
    policy = binding.read_process(binding.attach()).control.policy
    return bool(policy.flags & layout.POLICY_SET), policy.head_start_ns
"""
LIGHTNING = """
import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from weft.integrations.lightning import WeftCallback

class Log(DummyLogger):
    def log_metrics(self, *args, **kwargs):
        print("logged", json.dumps(args[0] if args else kwargs["metrics"]))

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        print("during", *in_force())
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=Log(), enable_checkpointing=False, callbacks=[CALLBACK],
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=4))
"""
HUGGINGFACE = """
import tempfile
from transformers import Trainer, TrainingArguments
from weft.integrations.huggingface import WeftCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        print("during", *in_force())
        return {"loss": self.layer(x).mean()}

with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(folder, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model=Model(), args=settings, train_dataset=[{"x": torch.ones(4)}] * 8, callbacks=[CALLBACK])
    trainer.train()
for line in trainer.state.log_history:
    if "weft/gain_pct" in line:
        print("logged", json.dumps(line))
"""
PROGRAMS = {"lightning": LIGHTNING, "transformers": HUGGINGFACE}


@pytest.fixture(params=PROGRAMS)
def run(request, tmp_path):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}")

    def start(callback: str, *options: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "train.py"
        body = PROGRAMS[request.param].replace("CALLBACK]", f"{callback}]")
        program.write_text(textwrap.dedent(COMMON) + body + '\nprint("after", *in_force())\n')
        command = [sys.executable, "-m", "weft", "run", *options, "--", sys.executable, str(program)]
        env = {
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "WEFT_STORE": str(tmp_path / "store"),
        }
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)

    return start


def test_a_policy_holds_while_training_lasts(run, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "comm": {"head_start_us": 7}}))
    done = run(f"WeftCallback({str(path)!r})")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "during True 7000" in done.stdout
    assert "after False" in done.stdout
    assert "logged" not in done.stdout


def test_under_tune_the_tuner_chooses_and_its_verdict_is_logged(run):
    done = run("WeftCallback(Policy(head_start_us=7))", "--tune")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "during False" in done.stdout
    (logged,) = (line for line in done.stdout.splitlines() if line.startswith("logged"))
    assert json.loads(logged.removeprefix("logged"))["weft/gain_pct"] == 0.0
    assert "chooses its own" in done.stderr


def test_a_process_that_weft_did_not_start_is_told_how():
    with pytest.raises(UnavailableError, match="start it with `weft run"):
        Training(Policy(head_start_us=7)).begin()
