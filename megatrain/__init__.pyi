"""The types of the Python API, for checkers: the package itself loads these names at their first use."""

from megatrain.inference.loaded_model import LoadedModel as LoadedModel
from megatrain.inference.loaded_model import load as load
from megatrain.reporting.report import EvaluationReport as EvaluationReport
from megatrain.reporting.report import StepReport as StepReport
from megatrain.run_record import RunRecord as RunRecord
from megatrain.run_record import read_run as read_run
from megatrain.trainer import Trainer as Trainer
from megatrain.training.extensions import Callback as Callback

__version__: str
