"""Emulated instances, field by field as SageMaker documents real ones, and the exceptions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeJob, Watch

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import driver
from workshop_utils.launchers.sagemaker.instances import Instances
from workshop_utils.network import Network, availability
from workshop_utils.runs import RunFailed, RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# What a script finds: arguments, variables, folders, configuration.
LOOK = """
    import json, os, sys
    from pathlib import Path
    from workshop_utils import place
    here = place.here()
    root = Path(os.environ["SM_MODEL_DIR"]).parent
    names = ("SM_", "TF_CONFIG", "TRAINING_JOB_NAME", "CURRENT_HOST", "MASTER_", "RANK", "WORLD_SIZE")
    config = root / "input" / "config"
    found = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "root": str(root),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(names)},
        "config": {path.name: json.loads(path.read_text()) for path in config.iterdir()},
        "folders": sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()),
        "code": sorted(str(path.relative_to(root / "code")) for path in (root / "code").rglob("*.py")),
        "images": place.load("test").count,
        "place": [here.role, here.index, here.rank, here.world_size],
    }
    print("FOUND " + json.dumps(found), flush=True)
"""

# A master that listens, as TensorFlow's does, until it has reached all servers and trained for a while.
MASTER = """
    import socket, threading, time

    def accept(listener):
        while True:
            listener.accept()[0].close()

    def reach(address):
        host, port = address.split(":")
        while True:
            try:
                return socket.create_connection((host, int(port))).close()
            except OSError:
                time.sleep(0.1)

    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["type"] == "master":
        host, port = config["cluster"]["master"][0].split(":")
        listener = socket.create_server((host, int(port)))
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        for server in config["cluster"]["ps"]:
            reach(server)
        time.sleep(1)
"""


def looked(job: TrainingJob, **options: Any) -> dict[str, dict[str, Any]]:
    """What the script found, by host; MPI ranks by worker."""
    run = Instances(**options).launch(job).wait(300)
    return {
        line.worker: json.loads(line.text.removeprefix("FOUND "))
        for line in run.logs()
        if line.text.startswith("FOUND ")
    }


def test_every_variable_file_folder_and_argument_is_the_documented_one(make_job: MakeJob) -> None:
    arguments = {"epochs": 3, "batch-size": 8, "mode": "fast", "x": True}
    job = make_job(LOOK, strategy="multi_worker_mirrored", workers=2, arguments=arguments)
    seen = looked(job, instance_type="ml.m5.xlarge")["algo-2"]
    found = json.loads(json.dumps(seen).replace(seen["root"], "/opt/ml"))  # the exception "root"

    hosts = ["algo-1", "algo-2"]
    group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.m5.xlarge", "hosts": hosts}
    resources = {
        "current_host": "algo-2",
        "current_instance_type": "ml.m5.xlarge",
        "current_group_name": "homogeneousCluster",
        "hosts": hosts,
        "instance_groups": [group],
        "network_interface_name": "lo",  # the exception "interface"
    }
    how = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    inputs = {"training": how}
    assert found["config"]["resourceconfig.json"] == resources
    assert found["config"]["inputdataconfig.json"] == inputs
    hyperparameters = found["config"]["hyperparameters.json"]
    assert hyperparameters["epochs"] == "3"
    assert hyperparameters["sagemaker_program"] == '"train.py"'
    assert found["arguments"] == ["--batch-size", "8", "--epochs", "3", "--mode", "fast", "-x", "True"]
    assert found["folder"] == "/opt/ml/code"
    assert {"train.py", "workshop_utils/checkpoints.py", "workshop_utils/place.py"} < set(found["code"])
    assert {"input/data/training", "model", "output/data"} < set(found["folders"])

    variables = found["variables"]
    config = json.loads(variables.pop("TF_CONFIG"))
    flag = {"sagemaker_multi_worker_mirrored_strategy_enabled": True}
    cores = str(os.cpu_count())  # the exception "processors"
    texts = {
        "TRAINING_JOB_NAME": json.loads(hyperparameters["sagemaker_job_name"]),
        "CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST": "algo-2",
        "SM_CURRENT_INSTANCE_TYPE": "ml.m5.xlarge",
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_NUM_CPUS": cores,
        "SM_NUM_GPUS": variables["SM_NUM_GPUS"],
        "SM_NUM_NEURONS": variables["SM_NUM_NEURONS"],
        "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_INPUT_DIR": "/opt/ml/input",
        "SM_INPUT_CONFIG_DIR": "/opt/ml/input/config",
        "SM_OUTPUT_DIR": "/opt/ml/output",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_OUTPUT_INTERMEDIATE_DIR": "/opt/ml/output/intermediate",
        "SM_LOG_LEVEL": "20",
        "SM_MODULE_NAME": "train",
        "SM_MODULE_DIR": json.loads(hyperparameters["sagemaker_submit_directory"]),
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_HP_BATCH-SIZE": "8",
        "SM_HP_EPOCHS": "3",
        "SM_HP_MODE": "fast",
        "SM_HP_X": "true",
    }
    encoded: dict[str, Any] = {
        "SM_HOSTS": hosts,
        "SM_CHANNELS": ["training"],
        "SM_HPS": arguments,
        "SM_FRAMEWORK_PARAMS": flag,
        "SM_RESOURCE_CONFIG": resources,
        "SM_INPUT_DATA_CONFIG": inputs,
        "SM_USER_ARGS": found["arguments"],
    }
    repeated = json.loads(variables.pop("SM_TRAINING_ENV"))
    assert {name: text for name, text in variables.items() if name not in encoded} == texts
    assert {name: json.loads(variables[name]) for name in encoded} == encoded
    # As SageMaker writes it: without spaces, sorted.
    assert variables["SM_RESOURCE_CONFIG"] == json.dumps(resources, sort_keys=True, separators=(",", ":"))
    own = {
        "additional_framework_parameters": flag,
        "channel_input_dirs": {"training": "/opt/ml/input/data/training"},
        "hyperparameters": arguments,
        "is_master": False,
        "job_name": texts["TRAINING_JOB_NAME"],
        "master_hostname": "algo-1",
    }
    assert {name: repeated.pop(name) for name in own} == own
    for name, value in repeated.items():  # the rest says again what the variables say
        text = variables[f"SM_{name.upper()}"]
        assert value == (text if isinstance(value, str) else json.loads(text)), name
    # The exception "addresses": each a loopback port of its own, in the place of algo-N:8890.
    addresses = config["cluster"].pop("worker")
    assert config == {"cluster": {}, "environment": "cloud", "task": {"index": 1, "type": "worker"}}
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert len(set(addresses)) == 2
    assert found["place"] == ["worker", 1, 1, 2]
    assert found["images"] == 2


@pytest.mark.slow
def test_the_classic_mode_runs_a_server_beside_the_script_on_every_host(make_job: MakeJob) -> None:
    found = looked(make_job(LOOK, MASTER, strategy="parameter_server", workers=2, timeout="5min"))
    configs = {host: json.loads(each["variables"]["TF_CONFIG"]) for host, each in found.items()}
    # The script sees itself as master or worker; the servers are the toolkit's, and the master could reach both.
    assert {host: config["task"] for host, config in configs.items()} == {
        "algo-1": {"index": 0, "type": "master"},
        "algo-2": {"index": 0, "type": "worker"},
        "algo-3": {"index": 1, "type": "worker"},
    }
    cluster = configs["algo-1"]["cluster"]
    assert {role: len(addresses) for role, addresses in cluster.items()} == {
        "master": 1,
        "ps": 3,
        "worker": 2,
    }
    # `place` knows the classic mode's master for what TensorFlow 2 calls a chief.
    assert found["algo-1"]["place"] == ["chief", 0, 0, 3]
    assert found["algo-3"]["place"] == ["worker", 1, 2, 3]


def test_every_mpi_rank_believes_that_it_is_on_the_first_host(make_job: MakeJob) -> None:
    found = looked(make_job(LOOK, strategy="mpi", workers=4), processes_per_host=2)
    assert set(found) == {f"worker-{rank}" for rank in range(4)}
    assert {each["variables"]["SM_CURRENT_HOST"] for each in found.values()} == {"algo-1"}
    # Only MPI's own variables tell them apart, and `place` reads them first.
    assert [found[f"worker-{rank}"]["place"] for rank in range(4)] == [
        ["worker", rank, rank, 4] for rank in range(4)
    ]


def test_own_drivers_start_the_members_with_the_variables_of_their_strategy(make_job: MakeJob) -> None:
    job = make_job(LOOK, strategy="ring", workers=3)
    found = looked(job, mode="drivers")
    assert {host: each["variables"]["RANK"] for host, each in found.items()} == {
        "algo-1": "0",
        "algo-2": "1",
        "algo-3": "2",
    }
    ports = {each["variables"]["MASTER_PORT"] for each in found.values()}
    assert len(ports) == 1
    assert {each["variables"]["MASTER_ADDR"] for each in found.values()} == {"127.0.0.1"}
    assert found["algo-2"]["arguments"] == []


def test_a_script_that_fails_is_reported_with_its_host_its_exit_code_and_its_last_lines(
    make_job: MakeJob,
) -> None:
    job = make_job(
        LOOK, """
    if here.rank == 1:
        print("out of patience", file=sys.stderr)
        sys.exit(3)
    import time
    time.sleep(1000)
    """, strategy="multi_worker_mirrored", workers=2,
    )  # fmt: skip
    with pytest.raises(
        RunFailed, match=r"AlgorithmError: ExecuteUserScriptError on algo-2, exit code: 3"
    ) as failed:
        Instances().launch(job).wait(60)
    assert "out of patience" in str(failed.value)


def test_a_host_that_a_signal_has_ended_is_said_to_be_killed_by_it(make_job: MakeJob) -> None:
    job = make_job("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    message = "ExecuteUserScriptError on algo-1, which was killed by SIGKILL. It had printed nothing."
    with pytest.raises(RunFailed, match=message):
        Instances().launch(job).wait(60)


def test_mpi_without_an_mpirun_is_refused_before_anything_starts(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    message = "hyperparameter sagemaker_mpi_enabled is true, but there is no mpirun here"
    with pytest.raises(JobError, match=message):
        Instances().launch(make_job(LOOK, strategy="mpi", workers=2))


def test_a_job_that_meets_its_time_limit_fails_as_sagemaker_says_it(make_job: MakeJob) -> None:
    with pytest.raises(RunFailed, match="MaxRuntimeExceeded"):
        Instances().launch(make_job("import time\ntime.sleep(1000)", timeout="2s")).wait(60)


def test_leaving_ends_all_processes_of_all_hosts(make_job: MakeJob, watch: Watch) -> None:
    script = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    job = make_job(
        script + "print('up', flush=True)\ntime.sleep(1000)", strategy="multi_worker_mirrored", workers=2
    )
    with Instances().launch(job) as run:
        lines = run.logs(follow=True)
        assert [next(lines).text for _ in range(2)] == ["up", "up"]
    assert run.state is RunState.STOPPED


def test_a_model_outlives_the_run_where_it_is_asked_for(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(
        "from workshop_utils import place\n(place.here().model_folder / 'weights').write_text('1')"
    )
    Instances(output=tmp_path / "models").launch(job).wait(60)
    assert (tmp_path / "models" / "weights").read_text() == "1"


# In network namespaces


@pytest.mark.skipif(availability() == "none", reason="this machine makes no network namespaces")
def test_in_namespaces_names_and_ports_are_sagemaker_s_own_and_the_names_are_known(make_job: MakeJob) -> None:
    resolve = """
    import socket
    print("KNOWN " + json.dumps([socket.gethostbyname(name) for name in json.loads(os.environ["SM_HOSTS"])]))
    """
    job = make_job(LOOK, resolve, strategy="multi_worker_mirrored", workers=2)
    run = Instances(network=Network(bandwidth="1Gbit")).launch(job).wait(60)
    assert run.network is not None
    assert "network namespaces" in run.network
    found = {line.worker: line.text for line in run.logs() if line.text.startswith("FOUND")}
    first = json.loads(found["algo-1"].removeprefix("FOUND "))
    config = json.loads(first["variables"]["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["algo-1:8890", "algo-2:8890"]
    assert first["variables"]["SM_NETWORK_INTERFACE_NAME"] == "eth0"
    known = [line.text for line in run.logs() if line.text.startswith("KNOWN")]
    assert known == ['KNOWN ["10.77.0.1", "10.77.0.2"]'] * 2
    # Outside, nothing of it is seen.
    assert "algo-1" not in Path("/etc/hosts").read_text()


def test_a_network_that_cannot_be_is_refused(make_job: MakeJob) -> None:
    with pytest.raises(JobError, match=r"no algo-3 in this job|no network namespaces"):
        Instances(network=Network(bandwidth="1Gbit", exceptions={"algo-3": "1Mbit"})).launch(make_job("1"))


# On a real instance


def test_the_driver_starts_what_is_listed_for_its_host_and_says_why_it_failed(tmp_path: Path) -> None:
    shutil.copy(driver.__file__, tmp_path)
    say = "import os, sys; print(*(os.environ[name] for name in ('WHERE', 'WORKSHOP_SUBNET'))); sys.exit(3)"
    worker = {"name": "worker-0", "command": ["{python}", "-c", say], "environment": {"WHERE": "{interface}"}}
    (tmp_path / "members.json").write_text(json.dumps({"localhost": [{**worker, "awaited": True}]}))
    given = {
        "SM_CURRENT_HOST": "localhost",
        "SM_HOSTS": '["localhost"]',
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_OUTPUT_DIR": str(tmp_path),
    }
    command = [sys.executable, str(tmp_path / "driver.py")]
    ended = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "eth0 127.0.0.0/16\n"), ended.stderr
    assert (tmp_path / "failure").read_text() == "ExecuteUserScriptError on localhost: exit code 3"
