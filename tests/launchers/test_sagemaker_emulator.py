"""Emulated instances, compared field by field with what SageMaker documents for real ones."""

import json
import os
from pathlib import Path

import pytest
import yaml

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.sagemaker import EmulatedSageMaker
from workshop_utils.runs import RunFailed

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

DOCUMENTED = Path(__file__).with_name("sagemaker_container.yaml")
ROLE = "arn:aws:iam::123456789012:role/workshop"
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


def looked(job, **options):
    """What the script found, by host; MPI ranks by worker."""
    run = EmulatedSageMaker(**options).launch(job).wait(300)
    return {
        line.worker: json.loads(line.text.removeprefix("FOUND "))
        for line in run.logs()
        if line.text.startswith("FOUND ")
    }


def test_every_variable_file_folder_and_argument_is_the_documented_one(make_job):
    arguments = {"epochs": 3, "batch-size": 8, "mode": "fast", "x": True}
    job = make_job(LOOK, strategy="multi_worker_mirrored", workers=2, arguments=arguments)
    seen = looked(job, instance_type="ml.m5.xlarge")["algo-2"]
    text = json.dumps(seen).replace(seen["variables"]["TRAINING_JOB_NAME"], "NAME")
    found = json.loads(text.replace(seen["root"], "/opt/ml"))  # the exception "root"
    documented = yaml.safe_load(DOCUMENTED.read_text())
    assert {name: found[name] for name in ("config", "arguments", "folder")} == {
        name: documented[name] for name in ("config", "arguments", "folder")
    }
    assert {"train.py", "workshop_utils/training/checkpoints.py", "workshop_utils/place.py"} < set(
        found["code"]
    )
    assert {"input/data/training", "model", "output/data"} < set(found["folders"])
    assert found["images"] == 2

    # As SageMaker writes it: without spaces, sorted.
    variables = found["variables"]
    resources = documented["variables"]["SM_RESOURCE_CONFIG"]
    assert variables["SM_RESOURCE_CONFIG"] == json.dumps(resources, sort_keys=True, separators=(",", ":"))
    values = {
        name: text if isinstance(documented["variables"].get(name), str) else json.loads(text)
        for name, text in variables.items()
    }
    config, training_env = values.pop("TF_CONFIG"), values.pop("SM_TRAINING_ENV")
    own = {name: training_env.pop(name) for name in documented["training_env"]}
    assert own == documented["training_env"]
    for name, value in training_env.items():  # the rest says again what the variables say
        text = variables[f"SM_{name.upper()}"]
        assert value == (text if isinstance(value, str) else json.loads(text)), name
    machine = {name: values.pop(f"SM_NUM_{name}") for name in ("CPUS", "GPUS", "NEURONS")}
    assert machine["CPUS"] == os.cpu_count()  # the exception "processors"
    assert values == documented["variables"]
    # The exception "addresses": each a loopback port of its own, in the place of algo-N:8890.
    addresses = config["cluster"].pop("worker")
    assert config == {"cluster": {}, "environment": "cloud", "task": {"index": 1, "type": "worker"}}
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert len(set(addresses)) == 2
    assert found["place"] == ["worker", 1, 1, 2]


def test_every_mpi_rank_believes_that_it_is_on_the_first_host(make_job):
    found = looked(make_job(LOOK, strategy="mpi", nodes=2, processes_per_node=2))
    assert set(found) == {f"worker-{rank}" for rank in range(4)}
    assert {each["variables"]["SM_CURRENT_HOST"] for each in found.values()} == {"algo-1"}
    # Only MPI's own variables tell them apart, and `place` reads them first.
    assert [found[f"worker-{rank}"]["place"] for rank in range(4)] == [
        ["worker", rank, rank, 4] for rank in range(4)
    ]


def test_torchrun_starts_the_ranks_of_each_host_as_the_sdk_s_driver_has_it(make_job):
    look = """
    import json, os, sys
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    from workshop_utils import place
    here = place.here()
    assert "/mine" in sys.path
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["SM_NETWORK_INTERFACE_NAME"] == "lo"
    import torch
    torch.distributed.init_process_group("gloo")
    met = torch.ones(1)
    torch.distributed.all_reduce(met)
    assert met == 4
    torch.distributed.destroy_process_group()
    channels, host = json.loads(os.environ["SM_CHANNELS"]), os.environ["SM_CURRENT_HOST"]
    folders = [str(here.model_folder), os.environ["TMPDIR"]]
    found = [here.rank, here.world_size, here.local_world_size, host, channels, sys.argv[1:], *folders]
    sys.stdout.write(f"FOUND {json.dumps(found)}\\n")  # whole: two ranks share a pipe
    """
    fields = {"arguments": {"flag": True, "text": 'it\'s "one"'}, "environment": {"PYTHONPATH": "/mine"}}
    job = make_job(look, strategy="torch_ddp", nodes=2, processes_per_node=2, **fields)
    lines = [line.text for line in EmulatedSageMaker().launch(job).wait(300).logs()]
    command = "Executing command: torchrun --nnodes=2 --nproc_per_node=2 "
    assert len([text for text in lines if text.startswith(command)]) == 2
    found = sorted(json.loads(text.removeprefix("FOUND ")) for text in lines if text.startswith("FOUND "))
    assert [each[:4] for each in found] == [[rank, 4, 2, f"algo-{1 + rank // 2}"] for rank in range(4)]
    assert len({each[-1] for each in found}) == 2  # hosts share no temporary folder
    for *_, channels, words, model, _ in found:
        assert channels == ["training", "code", "sm_drivers"]
        assert words == ["--flag", "True", "--text", 'it\'s "one"']
        assert model.endswith("/opt/ml/model")


@pytest.mark.parametrize("strategy", ["single", "mpi"])
def test_one_unusual_argument_leaves_the_others_in_the_hyperparameters(make_job, strategy):
    script = 'import json, os, sys\nprint([sys.argv[1:], json.loads(os.environ["SM_HPS"]), os.environ["SM_HP_LR"]])'
    job = make_job(script, strategy=strategy, arguments={"lr": 0.5, "note": "two words", "n": 3})
    lines = {line.text for line in EmulatedSageMaker().launch(job).wait(60).logs()}
    words = ["--lr", "0.5", "-n", "3", "--note", "two words"]
    assert str([words, {"lr": 0.5, "n": 3}, "0.5"]) in lines


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit('out of patience')", "exit code: 1.*out of patience"),
        ("os.kill(os.getpid(), 9)", "which was killed by SIGKILL"),
    ],
)
def test_a_host_that_fails_is_reported_with_how_it_ended(make_job, end, message):
    job = make_job(
        LOOK, f"import time\nif here.rank == 1:\n    {end}\ntime.sleep(1000)",
        strategy="multi_worker_mirrored", workers=2,
    )  # fmt: skip
    with pytest.raises(RunFailed, match=rf"(?s)AlgorithmError: ExecuteUserScriptError on algo-2, {message}"):
        EmulatedSageMaker().launch(job).wait(60)


def test_a_job_that_meets_its_time_limit_fails_as_sagemaker_says_it(make_job):
    with pytest.raises(RunFailed, match="MaxRuntimeExceeded"):
        EmulatedSageMaker().launch(make_job("import time\ntime.sleep(1000)", timeout="2s")).wait(60)


def test_model_and_checkpoints_outlive_the_run_in_the_job_s_folders(make_job, tmp_path):
    write = """
    from workshop_utils import place
    (place.here().model_folder / "weights").write_text("1")
    assert place.checkpoint_folder().parent == place.here().model_folder.parent
    (place.checkpoint_folder() / "step-1").write_text("2")
    print("written")
    while not (place.checkpoint_folder() / "seen").exists():
        pass
    """
    job = make_job(write, outputs=str(tmp_path / "models"), checkpoints=str(tmp_path / "kept"))
    run = EmulatedSageMaker().launch(job)
    assert "written" in (line.text for line in run.logs(follow=True))
    for place in (EmulatedSageMaker(), EmulatedSageMaker(spot=True), Local()):
        with pytest.raises(
            JobError, match=rf"checkpoints is .*; {job.name}-.* \(process {os.getpid()}\) writes there"
        ):
            place.launch(job)
    (tmp_path / "kept" / "seen").touch()
    run.wait(60)
    assert (tmp_path / "models" / "weights").is_file()
    assert (tmp_path / "kept" / "step-1").is_file()


# Spot instances

COUNTING = """
    import os, signal, time
    from workshop_utils import place
    signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
    saved = place.checkpoint_folder() / "step"
    step = int(saved.read_text()) if saved.exists() else 0
    while step < 40:
        step += 1
        place.report(step=step)
        if step % 10 == 0 and place.here().rank == 0:
            saved.write_text(str(step))
        time.sleep(0.05)
"""


@pytest.mark.parametrize("fields", [{}, {"strategy": "mpi", "nodes": 2, "processes_per_node": 1}])
def test_on_spot_instances_an_interrupted_job_goes_on_from_its_checkpoint_on_new_ones(
    make_job, watch, fields
):
    job = make_job(COUNTING, **fields)
    with EmulatedSageMaker(spot=True, role=ROLE, region="eu-west-1").launch(job) as run:
        assert watch.eventually(lambda: any(record.get("step", 0) >= 15 for record in run.records))
        run.interrupt()
        run.wait(60)
    assert "told to end" not in str(list(run.logs()))
    steps = run.metrics.query("rank == 0").groupby("attempt")["step"].agg(list)
    last = steps[0][-1]
    assert steps[0] == list(range(1, last + 1))
    assert steps[1] == list(range(last // 10 * 10 + 1, 41))
    first, second = run.attempts
    assert first.process_ids.keys() == second.process_ids.keys()
    assert first.process_ids != second.process_ids


def test_a_script_that_fails_on_spot_instances_is_not_started_again(make_job):
    with pytest.raises(RunFailed, match="AlgorithmError: CalledProcessError on algo-1, exit code: 3"):
        EmulatedSageMaker(spot=True).launch(make_job("raise SystemExit(3)")).wait(60)
