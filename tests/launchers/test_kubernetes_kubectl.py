"""kubectl itself, with the lines that stand beside Python's: what it asks of a server, and what it then says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import MakeJob
from kubernetes_api import ApiServer

from workshop_utils.launchers.kubernetes import Kubernetes, kubectl

JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
PODS = "/api/v1/namespaces/default/pods"

# By step: a request that kubectl makes, and what it then says.
ASKED = {
    "try": ("POST", f"{JOBS}?dryRun=All", "created (server dry run)"),
    "create": ("POST", f"{JOBS}?fieldManager=kubectl-create&fieldValidation=Strict", "ddp created"),
    "get": ("GET", f"{JOBS}/ddp", "ddp"),
    "pods": ("GET", f"{PODS}?labelSelector=training.kubeflow.org/job-name=ddp", "ddp-master-0"),
    "describe": ("GET", f"{JOBS}/ddp", "all is well"),
    "logs": ("GET", f"{PODS}/ddp-master-0/log?container=pytorch&follow=true", "hello"),
    "wait": ("GET", f"{JOBS}?fieldSelector=metadata.name=ddp", "condition met"),
    "delete": ("DELETE", f"{JOBS}/ddp", '"ddp" deleted'),
}  # fmt: skip


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_understands_each_line_and_asks_for_the_job(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("", name="ddp", strategy="torch_ddp", workers=2)
    manifest = Kubernetes().render(job)
    (tmp_path / "kubernetes.yaml").write_text(str(manifest))
    server = ApiServer()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ddp-master-0", "namespace": "default"}}
    containers = {"containers": [{"name": "pytorch"}]}
    server.pods = [{**pod, "spec": containers, "status": {"phase": "Running"}}]
    server.logs["ddp-master-0"] = ["hello"]
    server.job_status = {"conditions": [{"type": "Succeeded", "status": "True", "message": "all is well"}]}
    environment = {**os.environ, "KUBECONFIG": str(server.write_kubeconfig(tmp_path)), "HOME": str(tmp_path)}
    try:
        for step in kubectl.side_by_side(manifest, str(tmp_path)):
            before = len(server.requests)
            words = shlex.split(step.kubectl)
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            method, path, said = ASKED[step.what]
            asked = [(how, unquote(what)) for how, what in server.requests[before:]]
            assert any(how == method and what.startswith(path) for how, what in asked), (step, asked)
            assert done.returncode == 0, done.stderr
            assert said in done.stdout
            assert server.made() == ([] if step.what in ("try", "delete") else ["PyTorchJob ddp"])
    finally:
        server.close()
