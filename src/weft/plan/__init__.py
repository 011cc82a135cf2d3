"""What a training step costs at scale: models, parallelism, network, overlap. Simulated, and labelled so."""

from weft.plan.compression import Method
from weft.plan.config import Job
from weft.plan.figures import Figures
from weft.plan.models import Model
from weft.plan.network import Network
from weft.plan.step import Collective, Prediction, predict

__all__ = ["Collective", "Figures", "Job", "Method", "Model", "Network", "Prediction", "predict"]
