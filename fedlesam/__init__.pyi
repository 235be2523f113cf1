__version__: str

from fedlesam import algorithms as algorithms
from fedlesam import data as data
from fedlesam import models as models
from fedlesam import probes as probes
from fedlesam import rules as rules
from fedlesam.core.checks import NotFinite as NotFinite
from fedlesam.core.local import LocalTraining as LocalTraining
from fedlesam.core.metrics import Metric as Metric
from fedlesam.core.record import Record as Record
from fedlesam.core.slots import Algorithm as Algorithm
from fedlesam.core.task import Task as Task
from fedlesam.engines.settings import Execution as Execution
from fedlesam.engines.settings import FailurePolicy as FailurePolicy
from fedlesam.federation import Federation as Federation
from fedlesam.runs.read import load_run as load_run
