"""Writes the Volcano Jobs for Trainium, in full, beside this file: `python jobs/bert_pretraining/trainium/render.py`.

TorchX draws a new name at each launch; here it is the job's own, so that the file can be read, and sent by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes.manifest import yaml_of
from workshop_utils.launchers.torchx import TorchX

HERE = Path(__file__).parent
JOB = HERE.parent
# The file that is written: the job, and where it runs.
RENDERED = {
    "volcano.yaml": ("trainium.yaml", "place.yaml"),
    "volcano-precompile.yaml": ("precompile.yaml", "place-precompile.yaml"),
}


def rendered(file: str) -> str:
    """The text of one of RENDERED."""
    name, place = RENDERED[file]
    job = TrainingJob.load(JOB / name)
    request = TorchX.load(HERE / place).render(job).request
    drawn = request["metadata"]["name"]
    described = json.loads(json.dumps(request).replace(drawn, job.name))
    return by_hand(name, file, described) + yaml_of([described])


def by_hand(name: str, file: str, described: dict[str, Any]) -> str:
    """A comment: how to send `described` with kubectl, and before it the files that its pods mount."""
    pod = described["spec"]["tasks"][0]["template"]["spec"]
    (mounted,) = [volume["configMap"] for volume in pod["volumes"] if "configMap" in volume]
    paths = [item["path"] for item in mounted["items"]]
    paths = [
        path if path.startswith("workshop_utils/") else f"jobs/bert_pretraining/{path}" for path in paths
    ]
    lines = [
        f"{name}, as `--on torchx` sends it. By hand, from the repository's root:",
        f"    kubectl create configmap {mounted['name']} \\",
        *(f"      --from-file={path} \\" for path in paths[:-1]),
        f"      --from-file={paths[-1]}",
        f"    kubectl create -f jobs/bert_pretraining/trainium/{file}",
        "Its image is of an example's account, 123456789012: first put in yours, as README.md says.",
    ]
    return "".join(f"# {line}\n" for line in lines)


if __name__ == "__main__":
    for file in RENDERED:
        (HERE / file).write_text(rendered(file), encoding="utf-8")
        print(file)
