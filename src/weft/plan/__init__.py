"""What a training step costs at scale: models, parallelism, network, overlap. Simulated, and labelled so.

Where to look, from the question to the answer:

- the job: `models`, `network`, `config` (TrainingJob, and what it refuses), `request` (a TrainingJob from what a user types)
- what a rank does: `compute` (kernels), `memory`, `pipeline` (stages and bubble)
- what it sends: `traffic` (which collectives, beside which compute), `compression`, `collectives` (seconds
  alone), `overlap` (what both take from each other, from the block-level simulator)
- the step: `step` puts these together (Prediction)
- the answers: `answer` (documents), `changes`, `sweep`, `scaling`; `execution_trace`, `chakra` (its format)
- the figures: `figures` (data/figures.json), `published` and `fit` (where they come from), `accuracy` (their
  error), `calibrate` (others, by a trace)
"""

from weft.plan.compression import Method
from weft.plan.config import TrainingJob
from weft.plan.figures import Figures
from weft.plan.models import Model
from weft.plan.network import Network
from weft.plan.step import Collective, Prediction, predict

__all__ = ["Collective", "Figures", "TrainingJob", "Method", "Model", "Network", "Prediction", "predict"]
