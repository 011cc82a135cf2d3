"""What a training step costs at scale: models, parallelism, network, overlap. Simulated, and labelled so."""

from weft.plan.config import Job
from weft.plan.figures import Figures
from weft.plan.models import Model
from weft.plan.network import Network
from weft.plan.step import Collective, Prediction, predict
from weft.plan.wire import Wire

__all__ = ["Collective", "Figures", "Job", "Model", "Network", "Prediction", "Wire", "predict"]
