"""The cost of a training step at scale: models, parallelism, network, overlap. Simulated, and labelled so.

The modules, from the question to the answer:

- the question: `options` (the command's options), `user_files` (torchtitan and Megatron files, and the models
  of `hugging_face`), `cluster` (cluster files), `request` (builds a TrainingJob from them)
- the job: `models`, `model_presets`, `config` (TrainingJob and its checks); networks: `weft.gpu.network`
- what a rank computes: `compute` (kernels), `memory`, `pipeline` (stages and bubble), `schedule` (pass order)
- what it sends: `traffic` (the collectives, and the compute each can overlap with), `compression`, `overlap`
  (how compute and collectives slow each other, from the block-level simulator); the time of a collective
  alone: `weft.gpu.collectives`
- the step: `step` combines these (Prediction)
- the answers: `answer` (documents), `changes`, `sweep`, `scaling`, `launch` (files that start the job);
  `execution_trace`, `chakra` (its format)
- the figures: `figures` (data/figures.json), `published` and `fit` (their sources and the fit), `accuracy`
  (their error by family), `calibrate` (figures from a user's trace)
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
