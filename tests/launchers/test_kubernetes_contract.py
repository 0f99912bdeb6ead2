"""What a real API server says of the manifests: it runs where KUBECONFIG names one, and makes nothing there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kubernetes import client

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, calls
from workshop_utils.launchers.kubernetes.calls import KubernetesError, call
from workshop_utils.launchers.kubernetes.cluster import PLURALS
from workshop_utils.launchers.kubernetes.settings import Kind

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG"),
    reason="KUBECONFIG names no API server with the training operators' resources",
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mnist_single", "Job"),
        ("mnist_torch_ddp", "PyTorchJob"),
        ("mnist_torch_ddp", "TrainJob"),
        ("mnist_parameter_server", "TFJob"),
        ("mnist_mpi", "MPIJob"),
    ],
)
def test_a_server_would_take_the_manifest(name: str, kind: Kind) -> None:
    custom = client.CustomObjectsApi(calls.connect())
    for described in Kubernetes(kind=kind).render(TrainingJob.load(JOBS / name)).objects:
        group, _, version = described["apiVersion"].partition("/")
        where = (group, version, "default", PLURALS[described["kind"]])
        try:
            call(
                f"trying {described['kind']}",
                custom.create_namespaced_custom_object,
                *where,
                described,
                dry_run="All",
                field_validation="Strict",
            )
        except KubernetesError as error:
            if error.status == 404:
                pytest.skip(f"the server of KUBECONFIG has no {described['kind']}")
            raise
