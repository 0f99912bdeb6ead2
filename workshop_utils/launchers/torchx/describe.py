"""Asks TorchX what its scheduler would make of an application, in TorchX's own environment.

    WORKSHOP_APPLICATION='{"name": ..., "role": ..., "scheduler": ..., "settings": ...}' python describe.py

prints both as TorchX describes them, as JSON: the application, and the scheduler's request. Nothing is submitted. The
question comes in a variable, since everybody can read a command line.
"""

import json
import os
from dataclasses import asdict

import yaml
from torchx import specs
from torchx.runner import get_runner


def main() -> None:
    """Answer the question in the variable."""
    asked = json.loads(os.environ.pop("WORKSHOP_APPLICATION"))
    role = specs.Role(**asked["role"])
    role.resource = specs.Resource(**asked["role"]["resource"])
    role.mounts = [specs.VolumeMount(**mount) for mount in asked["role"]["mounts"]]
    application = specs.AppDef(asked["name"], [role])
    described = asdict(application)  # before TorchX adds to its variables
    with get_runner("workshop") as runner:
        request = runner.dryrun(application, asked["scheduler"], asked["settings"]).request
    here = asked["scheduler"] == "local_cwd"  # otherwise it is a Volcano Job, which prints as YAML
    print(json.dumps([described, asdict(request) if here else yaml.safe_load(str(request))]))


if __name__ == "__main__":
    main()
