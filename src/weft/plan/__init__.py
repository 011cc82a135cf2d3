"""What a training step costs at scale: models, parallelism, network, overlap. Simulated, and labelled so.

Where to look, from the question to the answer:

- the question: `options` (what a user can say), `user_files` (Hugging Face, torchtitan, Megatron and cluster
  files), `request` (a TrainingJob from both)
- the job: `models`, `model_presets`, `network`, `config` (TrainingJob, and what it refuses)
- what a rank does: `compute` (kernels), `memory`, `pipeline` (stages and bubble)
- what it sends: `traffic` (which collectives, overlapping which compute), `compression`, `collectives`
  (seconds alone), `overlap` (what both take from each other, from the block-level simulator)
- the step: `step` puts these together (Prediction)
- the answers: `answer` (documents), `changes`, `sweep`, `scaling`, `launch` (files that start the job);
  `execution_trace`, `chakra` (its format)
- the figures: `figures` (data/figures.json), `published` and `fit` (where they come from), `accuracy` (their
  error by family), `calibrate` (others, by a trace)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

_HOMES = {
    "Collective": "weft.plan.step",
    "Figures": "weft.plan.figures",
    "Method": "weft.plan.compression",
    "Model": "weft.plan.models",
    "Network": "weft.gpu.network",
    "Prediction": "weft.plan.step",
    "TrainingJob": "weft.plan.config",
    "predict": "weft.plan.step",
}

__all__ = ["Collective", "Figures", "Method", "Model", "Network", "Prediction", "TrainingJob", "predict"]

if TYPE_CHECKING:
    from weft.gpu.network import Network
    from weft.plan.compression import Method
    from weft.plan.config import TrainingJob
    from weft.plan.figures import Figures
    from weft.plan.models import Model
    from weft.plan.step import Collective, Prediction, predict


__getattr__ = lazy_names(__name__, _HOMES)
