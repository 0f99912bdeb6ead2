"""Classic script mode: the hyperparameters by which the toolkit inside AWS's images starts a script and a strategy.

The toolkit tells its own settings from the script's arguments by the prefix `sagemaker_`, and decodes each value as
JSON. Sources: sagemaker-training-toolkit, params.py and runner.py; sagemaker-tensorflow-training-toolkit, training.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import StrategyName

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Plan

PARAMETER_SERVER = "sagemaker_parameter_server_enabled"
MPI = "sagemaker_mpi_enabled"
MULTI_WORKER_MIRRORED = "sagemaker_multi_worker_mirrored_strategy_enabled"
TORCH_DISTRIBUTED = "sagemaker_torch_distributed_enabled"
PROCESSES_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"  # read for torchrun, too

# What the toolkit can start, and the switch for it; none for a script on its own.
SWITCHES: dict[StrategyName, str | None] = {
    "single": None,
    "parameter_server": PARAMETER_SERVER,
    "horovod": MPI,
    "mpi": MPI,
    "multi_worker_mirrored": MULTI_WORKER_MIRRORED,
    "torch_ddp": TORCH_DISTRIBUTED,
}


def hyperparameters(plan: Plan) -> dict[str, str]:
    """HyperParameters of a CreateTrainingJob request: the script's arguments and the toolkit's settings.

    There is no `model_dir` among them: the toolkit would hand it on to the script as an argument, and the workshop's
    scripts take their folder from SM_MODEL_DIR, so that they run unmodified.
    """
    values: dict[str, Any] = {**plan.job.arguments, "sagemaker_program": plan.job.script}
    if plan.settings.mode == "toolkit":
        values |= {
            "sagemaker_submit_directory": plan.source_uri,
            "sagemaker_job_name": plan.name,
            "sagemaker_region": plan.settings.region_name,
            "sagemaker_container_log_level": 20,
        }
        if switch := SWITCHES[plan.job.strategy]:
            values[switch] = True
        if switch in (MPI, TORCH_DISTRIBUTED):
            values[PROCESSES_PER_HOST] = plan.settings.processes_per_host
        if switch == TORCH_DISTRIBUTED:
            values["sagemaker_instance_type"] = plan.settings.instance_type
    # As the SDK's version 2 sends it, so that a number comes out of it as a number.
    return {name: json.dumps(value) for name, value in sorted(values.items())}
