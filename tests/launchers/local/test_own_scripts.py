"""Scripts as other people write them: their arguments, their data, their packages."""

import json
import sys
from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

from workshop_utils import cli, start
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local, environment

# Prints what it was told, as JSON, from each rank.
TELLS = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("WORKSHOP_DATA", "WORKSHOP_MODEL", "SM_"))]
print(json.dumps({"words": sys.argv[1:], "main": __name__, "package": __package__,
                  "folder": os.getcwd(), **{name: os.environ[name] for name in names}}))
"""


def told(job):
    """What each worker of a job that runs TELLS has printed."""
    with Local().launch(job) as run:
        run.wait()
        return {line.worker: json.loads(line.text) for line in run.logs() if line.text.startswith("{")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": 2, "b": 8}, ["-b", "8", "--epochs", "2"]),
        ({"amp": None, "layers": [1, 2]}, ["--amp", "--layers", "1", "2"]),
        ([3, "--amp", "--lr=0.1", "trainer.epochs=1"], ["3", "--amp", "--lr=0.1", "trainer.epochs=1"]),
        (["{x}", '{"rank": 1}', "{port}", "{{rank}}"], ["{x}", '{"rank": 1}', "{port}", "{{rank}}"]),
    ],
)
def test_arguments_are_the_words_that_a_script_wants(make_job, arguments, words):
    job = make_job("", arguments=arguments)
    assert job.command_line_arguments == words
    assert not job.needs_start


def test_words_of_a_list_are_as_they_are_written(make_job):
    folder = make_job("").folder
    (folder / "job.yaml").write_text("name: j\narguments: [--v, 1.10, --on, yes, 12:30, 007]")
    assert TrainingJob.load(folder).command_line_arguments == [
        "--v",
        "1.10",
        "--on",
        "yes",
        "12:30",
        "007",
    ]


def test_named_arguments_are_merged_and_follow_a_list(make_job):
    assert make_job("", arguments={"a-b": 1}).replace(arguments={"c-d": None}).arguments == {
        "a-b": 1,
        "c-d": None,
    }
    assert make_job("", arguments=[1]).replace(arguments={"c-d": 2}).command_line_arguments == [
        "1",
        "--c-d",
        "2",
    ]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["torch_ddp", "mpi"])
def test_each_process_fills_in_its_own_rank(make_job, strategy, tmp_path):
    job = make_job(
        TELLS,
        strategy=strategy,
        workers=2,
        arguments=["--at={rank}/{world_size}", "{a:{rank}}", "{{rank}}", "{checkpoints}"],
        checkpoints=str(tmp_path),
    )
    found = told(job)
    assert [found[f"worker-{n}"]["words"] for n in range(2)] == [
        [f"--at={n}/2", f"{{a:{n}}}", "{{rank}}", str(tmp_path)] for n in range(2)
    ]


@pytest.mark.processes
def test_jax_finds_all_processes_by_the_words_that_they_fill_in(make_job):
    pytest.importorskip("jax")
    script = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(jax.process_index(), jax.device_count())
jax.distributed.shutdown()
"""
    words = ["{master_addr}:{master_port}", "{world_size}", "{rank}"]
    with Local().launch(make_job(script, strategy="torch_ddp", workers=2, arguments=words)) as run:
        lines = run.wait().logs()
    assert sorted(line.text for line in lines if line.stream == "stdout") == ["0 2", "1 2"]


def test_a_word_that_stands_for_nothing_ends_the_process(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["start.py", "train.py", "--in={data}"])
    monkeypatch.delenv("WORKSHOP_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"'--in=\{data\}': worker-0 has no data; leave \{data\} out"):
        start.main()


@pytest.mark.processes
def test_a_module_runs_as_pythons_m_runs_it(make_job, monkeypatch):
    folder = make_job("").folder / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(f"from . import names\n{TELLS}")
    (folder / "names.py").touch()
    monkeypatch.chdir(folder.parent)
    job = TrainingJob.of_script(module="package.train", arguments=["--rank", "{rank}"])
    assert (job.name, job.script_path.name) == ("package-train", "train.py")
    (found,) = told(job).values()
    assert (found["words"], found["package"], found["main"]) == (["--rank", "0"], "package", "__main__")


def test_a_script_without_a_job_runs_where_it_is_called(make_job, monkeypatch, tmp_path):
    folder = make_job("").folder
    monkeypatch.chdir(folder.parent)
    job = TrainingJob.of_script(f"{folder.name}/train.py", workers=2, strategy="mpi")
    assert (job.name, job.folder, job.script) == ("train", Path(), f"{folder.name}/train.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (folder / "train.py", Path("..", folder.name, "train.py")):
        job = TrainingJob.of_script(path)
        assert (job.folder, job.script) == (path.parent, "train.py")


def test_a_shell_file_is_answered_with_its_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.sh").write_text("torchrun train.py\n")
    done = CliRunner().invoke(cli.app, ["launch", "scripts/train.sh"])
    with pytest.raises(
        JobError, match=r"must be Python's: `workshop import scripts/train\.sh` makes a job of"
    ):
        raise done.exception
    with pytest.raises(JobError, match="no such file"):
        TrainingJob.of_script("train.sh")


@pytest.mark.processes
def test_a_bar_s_last_state_keeps_the_rank_that_mpirun_named(make_job):
    script = """
    import time
    for step in range(300):
        print(f"{step:05} |{'#' * 10_000}", end="\\r", flush=True)
    print("b")
    """
    run = Local().launch(make_job(script, strategy="mpi", workers=2)).wait(60)
    assert sorted(map(str, run.logs())) == ["[worker-0] b", "[worker-1] b"]


@pytest.mark.processes
def test_channels_are_named_as_on_sagemaker(make_job, tmp_path):
    (tmp_path / "corpus.txt").write_text("to be")
    (found,) = told(make_job(TELLS, data={"train": str(tmp_path / "corpus.txt"), "test": "digits"})).values()
    assert found["SM_CHANNEL_TRAIN"] == f"{found['WORKSHOP_DATA']}/train"
    assert found["SM_CHANNEL_TEST"] == f"{found['WORKSHOP_DATA']}/test"


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("numpy\n# a comment\n--index-url https://example.com\nPyYAML >= 5 ; python_version > '3'\n", None),
        ("git+https://example.com/x.git@main#egg=numpy\nnumpy @ https://example.com/numpy.whl\n", None),
        (
            "\ufeffhttps://example.com/numpy-2.0.0-cp311-cp311-any.whl#sha256=0a\n./own\n-r requirements.txt",
            None,
        ),
        ("numpy-gpu\nnumpy-headless", None),  # other builds of the same modules
        ("nothing-of-this-name; python_version < '3'", None),
        (
            "numpy\nnothing-of-this-name==1.0",
            "nothing-of-this-name==1.0, which this environment lacks: `uv pip",
        ),
        ("wheels/own.whl\nown-1.0.whl\n./own ; python_version > '3'", None),
        ("numpy --config-settings=fast=1\npandas -C fast=1", None),
        ("numpy==1.0.0", f"numpy==1.0.0, but {numpy.__version__} is installed; with requirements: false"),
        (
            "numpy==1.0\npandas==1.0",
            f"numpy==1.0, but {numpy.__version__} is installed; and for pandas==1.0, but ",
        ),
        (
            "\n".join(f"nothing-{n}" for n in range(9)),
            "nothing-0, nothing-1, nothing-2, nothing-3, nothing-4 and 4",
        ),
        ("-r more.txt", "-r more.txt"),
        ("git+https://example.com/nothing-of-this-name", "git+https://example.com/nothing-of-this-name"),
    ],
)
def test_requirements_are_met_or_refused_with_the_command_that_installs_them(make_job, text, lacking):
    job = make_job("")
    (job.folder / "requirements.txt").write_text(text)
    if lacking is None:
        assert Local().render(job)
        return
    with pytest.raises(JobError) as refusal:
        Local().render(job)
    assert f"requirements.txt asks for {lacking}" in str(refusal.value)
    assert Local().render(job.replace(requirements=False))


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("git+https://user:ghp_x@example.com/zzz", "git+https://****@example.com/zzz"),
        ("git+https://ghp_0123456789@example.com/zzz", "git+https://****@example.com/zzz"),
        ("zzz @ https://user:p@ss@example.com/zzz.whl", "zzz @ https://****@example.com/zzz.whl"),
        ("zzz @ https://example.com/ghp_0123456789/zzz.whl", "zzz @ https://example.com/****"),
    ],
)
def test_a_secret_in_a_requirement_is_not_shown(make_job, secret, shown):
    job = make_job("")
    (job.folder / "requirements.txt").write_text(f"{secret}\nyyy")
    with pytest.raises(JobError) as refusal:
        Local().render(job)
    said = str(refusal.value)
    assert said.startswith(f"requirements.txt asks for {shown}, yyy, which this environment lacks: `uv pip ")
    assert f"-r {job.folder}/requirements.txt` installs them; " in said
    assert not any(word in said for word in ("ghp_", "user", "p@ss"))


def test_of_two_copies_of_a_package_the_first_counts_and_one_without_a_name_does_not(
    make_job, tmp_path, monkeypatch
):
    for folder, version in (("first", "1.0"), ("second", "2.0")):
        monkeypatch.syspath_prepend(tmp_path / folder)
        info = tmp_path / folder / f"zzz-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zzz\nVersion: {version}\n")
        (tmp_path / folder / "without_a_name-1.0.dist-info").mkdir()
    job = make_job("")
    (job.folder / "requirements.txt").write_text("zzz==2.0")  # now the first on the path
    assert Local().render(job)


def test_what_this_machine_cannot_give_is_refused_by_name(make_job, monkeypatch):
    memory = type("Memory", (), {"total": 8 * 2**30})
    monkeypatch.setattr(environment.psutil, "virtual_memory", memory)
    job = make_job("", strategy="torch_ddp", workers=4)
    assert Local().render(job)
    assert Local().render(job.replace(resources={"memory": "2Gi"}))
    with pytest.raises(
        JobError, match=r"resources.memory is '3Gi'; 4 worker\(s\) need 12.0 GiB, and .* has 8.0 GiB"
    ):
        Local().render(job.replace(resources={"memory": "3Gi"}))
    with pytest.raises(JobError, match="image is 'mine:1'; processes of this machine run in no container"):
        Local().render(job.replace(image="mine:1"))
    # A name with an address that is another machine's (192.0.2.0/24 is nobody's), where hosts cannot be renamed.
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "192.0.2.7")
    monkeypatch.setattr(environment.network, "availability", lambda: "none")
    with pytest.raises(
        JobError, match=r"Horovod meets at .* name, '192.0.2.7', .*`127.0.0.1 192.0.2.7` to /etc/hosts"
    ):
        Local().render(job.replace(strategy="horovod"))


@pytest.mark.parametrize(
    ("words", "is_for_the_script"), [("--lr 1", True), ("epochs=3", True), ("--workers two", False)]
)
def test_an_argument_before_the_dashes_is_answered_with_where_it_belongs(words, is_for_the_script, make_job):
    done = CliRunner().invoke(cli.app, ["launch", str(make_job("").folder), *words.split()])
    assert ("The script's own arguments follow --" in done.output) == is_for_the_script


def test_words_that_are_merged_into_a_job_yaml_are_refused(make_job):
    folder = make_job("").folder
    (folder / "job.yaml").write_text("name: a\nstrategy: single\n<<: {arguments: [a, 1.10]}\n")
    with pytest.raises(JobError, match="arguments: a list that << merges is not read"):
        TrainingJob.load(folder)


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_is_left")
def test_mpi_without_mpirun_is_warned_of_and_leaves_no_shared_memory(make_job):
    job = make_job("from mpi4py import MPI\nprint(MPI.COMM_WORLD.size)", strategy="torch_ddp", workers=2)
    run = Local().launch(job).wait(60)
    assert (
        run.warning
        == "train.py imports mpi4py, and under torch_ddp each worker is rank 0 of 1: take --strategy mpi"
    )
    assert [line.text for line in run.logs()] == ["1", "1"]


@pytest.mark.parametrize(("nodes", "warned"), [([], True), (["--nodes", "1"], False)])
def test_an_address_of_one_host_is_warned_of_on_targets_with_several(nodes, warned, make_job):
    (script := make_job("").folder / "train.py").write_text(
        "init_process_group(init_method='tcp://127.0.0.1:29511')"
    )
    words = [
        "launch",
        str(script),
        "--strategy",
        "torch_ddp",
        "--workers",
        "2",
        "--on",
        "kubernetes",
        "--render",
    ]
    done = CliRunner().invoke(cli.app, [*words, *nodes])
    assert ("warning: train.py, line 1: an address of a process's own host" in done.stderr) == warned
