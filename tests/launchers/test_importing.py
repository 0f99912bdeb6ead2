"""What people have becomes a job: manifests and shell files, and what was dropped is named."""

import pytest

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.importing import import_file, read
from workshop_utils.launchers.slurm import Slurm


@pytest.fixture
def described_by(tmp_path):
    """`described_by(name, text, script)` is what is read from a file of that name, beside `script` as train.py."""

    def describe(name, text, script=None):
        file = tmp_path / name
        file.write_text(text)
        if script is not None:
            (tmp_path / "train.py").write_text(script)
        return read(file, tmp_path)

    return describe


# Shell files

WORKERS = ("strategy", "workers", "nodes", "processes_per_node")
LINES = {
    "torchrun --standalone --nproc_per_node=4 train.py --lr 0.1": ("torch_ddp", 4, None, None),
    "torchrun --nnodes=1:3 --nproc-per-node 2 -m package.train": ("torch_ddp", None, 3, 2),
    "python -m torch.distributed.run --nproc_per_node 2 train.py": ("torch_ddp", 2, None, None),
    "mpirun -np 4 -H a:2,b:2 -x A=1 -mca btl ^openib python3 -u train.py": ("mpi", 4, None, None),
    "horovodrun -np 4 -H localhost:4 python train.py": ("horovod", 4, None, None),
    "horovodrun -np 2 --min-np 1 --host-discovery-script d.sh python train.py": ("horovod_elastic", 2, None, None),
    "accelerate launch --num_machines 2 --num_processes 8 train.py": ("torch_ddp", None, 2, 4),
    "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py": ("torch_ddp", 2, None, None),
    "srun -N2 --ntasks-per-node=2 python train.py": ("torch_ddp", None, 2, 2),
    "singularity exec --nv image.sif python train.py": ("single", 1, None, None),
    "EMPTY=\n$EMPTY\n$MAYBE torchrun --nproc_per_node=2 $X/train.py": ("torch_ddp", 2, None, None),
    'declare -a A=(\n --nproc_per_node=2\n)\nsrun -l torchrun "${A[@]}" $X/train.py': ("torch_ddp", 2, None, None),
    'CODE="\n torchrun --nproc_per_node=2 train.py"\nsrun bash -c "${CODE}"': ("torch_ddp", 2, None, None),
    'D="--nproc_per_node 4 \\\n --nnodes 2"\ntorchrun $D train.py': ("torch_ddp", None, 2, 4),
    'L="accelerate launch \\\n --num_processes 8"\nsrun -N 2 $L train.py': ("torch_ddp", None, 2, 4),
    "if [ -d x ]; then torchrun --nproc_per_node=2 train.py; fi": ("torch_ddp", 2, None, None),
    'bash -lc "cd x && torchrun --nproc_per_node ${GPUS:-2} train.py > log 2>&1"': ("torch_ddp", 2, None, None),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_says_which_workers_there_are(line, described_by):
    job = described_by("run.sh", line).job
    assert tuple(job.get(name) for name in WORKERS) == LINES[line]


def test_an_option_of_one_letter_is_left_out_with_its_value(described_by):
    result = described_by("run.sh", 'python train.py --a 1 --b "$(date)"')
    assert result.job["arguments"] == ["--a", 1]


def test_what_looks_like_a_secret_is_left_out(described_by):
    names = "DB_PASS=abc DATABASE_URL=postgres://u:abc@h/db OPENAI=sk-abcdef KEPT=1 AUTHOR=me"
    words = "--wandb_key=abc --wandb-key abc --auth abc --pw abc --x $K --url https://u:abc@h/x db.password=abc postgres://u:abc@h"
    text = f"K_TOKEN=abc\nexport {names}\npython train.py {words.replace('$K', '$K_TOKEN')} --max-tokens 4 --key a"
    result = described_by("run.sh", text)
    assert result.job["environment"] == {"KEPT": "1", "AUTHOR": "me"}
    assert result.job["arguments"] == {"max-tokens": 4, "key": "a"}
    assert "abc" not in str(result.notes)


def test_a_secret_is_known_by_its_form_and_shown_nowhere(described_by):
    hub, gitlab, web = "hf_abcDEF1234567890xyz", "glpat-abcdefghijkl", "eyJhbGciOi.eyJzdWIi.sig"
    text = f"""#SBATCH --comment="wandb_token=hidden1" --account=$A -p gpu
source login.sh --token hidden2
[ -n x ] && A="--api-key hidden5"
export X={gitlab} Y={web}
python train.py --key {hub} --api-key=hidden*3 --api_key hidden*4 $A $X {hub}/x --max_token_len 512 --image_key jpg"""
    result = described_by("job.sbatch", text)
    assert result.job["arguments"] == {"max_token_len": 512, "image_key": "jpg"}
    assert (result.place, result.job.get("environment")) == ({"options": ["-p gpu"]}, None)
    assert not any(each in f"{result}" for each in ("hidden", hub, gitlab[6:], "sig"))
    assert "--comment: left out" in str(result.notes)


WITH_SECRETS = {
    "shell": (
        """export A="--hub_token abc --lr 1" B='{"api_key": "abc"}' C="Authorization: Bearer abc" D="a: 1"
        export E="{api-key: abc}" F='["--token", "abc"]' G='{"a": "{\\"api_key\\": \\"abc\\"}"}'
        export H="Authorization=Basic abc"
        python train.py --cfg '{"api_key": "abc"}' --header "bearer abc" --extra="--token abc" --lr 1""",
        {"D": "a: 1"},
        {"lr": 1},
    ),
    "manifest": (
        "kind: Job\nspec: {template: {spec: {containers: [{command: [python, train.py, $(A)], env: "
        "[{name: A, value: --hub_token abc}, {name: D, value: --max_tokens 4}]}]}}}",
        {"D": "--max_tokens 4"},
        {},
    ),
}


@pytest.mark.parametrize("name", WITH_SECRETS)
def test_a_secret_inside_a_value_leaves_the_value_out(name, described_by):
    text, environment, arguments = WITH_SECRETS[name]
    suffix = {"shell": "sh", "manifest": "yaml"}[name]
    result = described_by(f"file.{suffix}", text)
    assert (result.job["environment"], result.job["arguments"]) == (environment, arguments)
    assert "abc" not in str(result)


def test_only_what_is_known_of_an_expansion_becomes_an_argument(described_by):
    text = "M=bert\npython train.py --a $M-large --b=$M=1 --c ${N:-$M} --d ${M%t} --e ${#M} --in ~/x *.txt {1..3}"
    result = described_by("run.sh", text)
    words = ["--a", "bert-large", "--b=bert=1", "--c", "bert", "--in", "~/x", "*.txt", "{1..3}"]
    assert result.job["arguments"] == words
    for said in ("--d: left out", "--e: left out", "~/x: kept", "*.txt: kept", "{1..3}: kept"):
        assert said in "\n".join(result.notes), result.notes


QUOTED = {
    'NAME="my run"\npython train.py --name "$NAME" --names $NAME': ["--name", "my run", "--names", "my", "run"],
    """JSON='{"lr": 0.1}'\npython train.py --json "$JSON" --empty "" """: {"json": '{"lr": 0.1}', "empty": ""},
    'A=(--name "my run"  # a name\n --a "")\nA+=(b)\npython train.py "${A[@]}"': ["--name", "my run", "--a", "", "b"],
    'A=()\npython train.py "${A[@]}" "$@"': {},
    'python train.py --filter "len > 5 and x" --fn "f=(x+1)"': {"filter": "len > 5 and x", "fn": "f=(x+1)"},
    r"""python train.py --pattern '^loss=(\d+)$' --home '$HOME/x'""": {"pattern": r"^loss=(\d+)$", "home": "$HOME/x"},
    """python train.py --tag "run #3" --of "it's" # isn't it""": {"tag": "run #3", "of": "it's"},
    r"""python train.py --a\ b "c\"d" "*.txt">log""": ["--a b", 'c"d', "*.txt"],
    'python train.py "${X:-"a b"}" "${Y:-$(echo ")" \'(\')}c"\\\n "e\\\nf" ${Z:-"g h"}': ["a b", "ef", "g h"],
    'B="--b 2"\nB+=" --c 3"\npython train.py $B': ["--b", 2, "--c", 3],
    'B="\n --b 2 \\\n --c "\npython train.py $B --d 3': ["--b", 2, "--c", "--d", 3],
    "cat > a <<-EOF\n\tit's\n\tEOF\npython train.py 1": [1],
}  # fmt: skip


@pytest.mark.parametrize("text", QUOTED)
def test_what_is_quoted_stays_one_word_as_it_is_written(text, described_by):
    result = described_by("run.sh", text)
    assert result.job["arguments"] == QUOTED[text]
    assert "kept as it is" not in str(result.notes)


# What a file says, what becomes of it, and a line that says so; no line where that starts with "-".
SAID = {
    "python prepare.py --out d\nsrun python train.py": ({}, "line 1: python prepare.py: dropped, since line 2"),
    "srun python train.py\npython -m after": ({}, "line 2: python -m after: dropped, since line 1 starts"),
    "python -m torch.distributed.launch train.py 1": ({"arguments": ["--local-rank={local_rank}", 1]}, "is given --lo"),
    "python -m torch.distributed.launch --use_env train.py 1": ({"arguments": [1]}, "-is given"),
    "deepspeed --num_gpus=2 train.py": ({"arguments": ["--local_rank={local_rank}"], "workers": 2}, "-gpu: 2 are"),
    "deepspeed --no_local_rank train.py": ({"arguments": {}}, "-local-rank"),
    "accelerate launch --mixed_precision bf16 train.py": (
        {"environment": {"ACCELERATE_MIXED_PRECISION": "bf16"}},
        "changed: ACCELERATE_MIXED_PRECISION in environment",
    ),
    "accelerate launch --use_fsdp train.py": ({}, "use-fsdp: dropped: the script trains without"),
    "mpirun -np 2 python train.py --no horovod": ({"strategy": "mpi"}, "-guess"),
    "srun apptainer exec --nv a.sif torchrun train.py": ({}, "changed: runs in the host's Python, not in a.sif"),
    "python - <<E\nprint(1)\nE\npython train.py 1": ({"arguments": [1]}, "python: dropped"),
    "python $1": ({"script": "train.py"}, "changed: the script's name is computed"),
    "python other/train.py": ({"script": "train.py"}, "other/train.py: changed: it is train.py"),
    "E=3\nif a; then\nE=1\nfi\npython train.py $E": ({"arguments": [1]}, "line 5: E: changed: it is set in a branch"),
    "E=3\ncase $E in\n3) F=$E;;\nesac\nG=$F\npython train.py $G": ({"arguments": [3]}, "line 6: G: changed"),
    "[ -n x ] &&\nE=\npython train.py --e=$E": ({"arguments": ["--e="]}, "the last value, empty, is taken"),
    "[ -n x ] && E=1\nE=3\npython train.py $E": ({"arguments": [3]}, "-branch"),
    "#SBATCH -N 2\necho\n#SBATCH -N 3\nsrun python train.py": ({"workers": 2}, "line 3: #SBATCH: dropped"),
    "#SBATCH -C a&b --mail-user=<I>@x -x 'a b' -A [a|b];c # it's\n#SBATCH -N 2\nsrun python train.py": (
        {"workers": 2},
        "-dropped",
    ),
    "#SBATCH -N 2 --tasks-per-node=2\nsrun python train.py": ({"nodes": 2, "processes_per_node": 2}, "-tasks"),
    "#SBATCH -c 4\nsrun -c $((N / 4)) --mem=$M python train.py": (
        {"resources": {"cpu": 4}},
        "line 2: srun c: not read, since it is computed",
    ),
    "#SBATCH -n 4\nmpirun -np $N python train.py": ({"processes_per_node": 4}, "mpirun np: not read, since it"),
    "#SBATCH --time=1h\npython train.py": ({}, "time: 1h cannot be read as a time of Slurm: 1440 min"),
    "srun -W 60 -n 2 python train.py": ({"workers": 2}, "srun W: dropped"),
    "#SBATCH --export=ALL,A=1\nsrun --export=B=2 python train.py": ({"environment": {"A": "1", "B": "2"}}, "ALL: dr"),
    "docker ps --format '{{.Names}}'\r\npython train.py \\\r\n 1\r\n": ({"arguments": [1]}, "docker: dropped"),
    "#SBATCH -N 1\nconda run -n env python train.py": ({"script": "train.py"}, "conda n: dropped"),
    "srun timeout 3h torchrun --nproc_per_node=2 train.py": ({"workers": 2}, "timeout 3h: dropped"),
    "numactl -N 0 -l taskset -c 0-3 python train.py 1": ({"arguments": [1]}, "taskset 0-3: dropped"),
    "#SBATCH -N 2 --gpus-per-node=4 --ntasks-per-gpu=1 --cpus-per-gpu=8 --mem-per-gpu=16G\nsrun python train.py": (
        {"nodes": 2, "processes_per_node": 4, "resources": {"cpu": 8, "memory": "16Gi", "gpu": 1}},
        "-GPU",
    ),
    "#SBATCH -n 8 --ntasks-per-gpu=2\nsrun python train.py": ({"resources": {"gpu": 1}}, "-GPU"),
    "#SBATCH -N 2 --cpus-per-gpu=8\nsrun python train.py": ({"resources": {}}, "options for each GPU are not read"),
    "#SBATCH --gres=gpu:4,tmpfs:100G\nsrun torchrun --nproc_per_node=gpu train.py": (
        {"processes_per_node": 4, "resources": {"gpu": 1}},
        "-gpu",
    ),
    "mpirun -H a:4,b:4 python train.py": ({"nodes": 2, "processes_per_node": 4}, "mpirun H: dropped"),
    "mpirun -N 2 -H a,b python train.py": ({"nodes": 2, "processes_per_node": 2}, "mpirun H: dropped"),
    "mpirun --hostfile hosts python train.py": ({"workers": 1}, "how many hosts there are is not known: 1 is taken"),
    "mpirun --hostfile hosts -np 4 python train.py": ({"workers": 4}, "-not known"),
    "srun --container-image=i --export=A=1 bash -c 'torchrun train.py --lr $A'": (
        {"environment": {"A": "1"}, "arguments": {"lr": 1}},
        "line 1: srun container-image: dropped",
    ),
    "A=1 srun singularity exec i.sif env B=2 bash -c 'export B=3; python train.py'\nC=1 bash -c ls": (
        {"environment": {"A": "1", "B": "3"}},
        "changed: runs in the host's Python, not in i.sif",
    ),
    "A=1 bash -c 'python a.py'\neval export B=2\ntorchrun train.py": ({"environment": {"B": "2"}}, "python a.py: dr"),
    "deepspeed --include localhost:0,2 train.py": ({"workers": 2, "resources": {"gpu": 1}}, "-include"),
    "deepspeed --include a:0@b:0 train.py": ({"workers": 1}, "deepspeed include: dropped"),
    "#PBS -l select=4\n#PBS -N a\npython train.py": ({"workers": 1}, "line 1: #PBS: options of PBS and LSF are not"),
    "srun -n 2 nsys profile -o a -t cuda python train.py": ({"workers": 2}, "nsys o: dropped"),
    "singularity run --nv a.sif python train.py 1": ({"arguments": [1]}, "the host's Python, not in a.sif"),
    "uv run train.py 1": ({"script": "train.py", "arguments": [1]}, "-1"),
    "C='python train.py \"a b\"'\neval \"$C\"": ({"arguments": ["a b"]}, "-dropped"),
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_what_a_line_is_read_as_is_said_where_it_is_not_plain(text, described_by):
    result, (fields, said) = described_by("run.sh", text, "import mpi4py"), SAID[text]
    assert fields.items() <= {"arguments": {}, **result.job}.items()
    assert (said.lstrip("-") in "\n".join(result.notes)) != said.startswith("-"), result.notes


@pytest.mark.parametrize(
    "text", ["python train.py --n {{ n }}", "#SBATCH -N {{ n }}", "N={{ n }}", "{% if n %}"]
)
def test_a_template_is_refused_where_what_it_stands_for_is_used(text, described_by):
    with pytest.raises(JobError, match="line 1: it is a template"):
        described_by("run.sh", text)


def test_a_refusal_names_the_programs_that_are_not_known(described_by):
    with pytest.raises(JobError, match=r"no training.*unknown: docker in line 2, \./all\.sh in line 3$"):
        described_by("run.sh", "echo\ndocker run x python train.py\n./all.sh")
    with pytest.raises(JobError, match=r"unknown: perf in line 1, run\.sh in line 2, make in line 3$"):
        described_by(
            "run.sh", "srun -l perf stat python train.py\nsrun bash -l run.sh\nA=1 make\nsrun hostname"
        )


def test_a_variable_that_the_file_exports_is_the_scripts_though_the_file_uses_it(described_by):
    result = described_by("run.sh", "export DATA=/d\nexport OUT=$DATA/out\nA=1\nexport A\npython train.py")
    assert result.job["environment"] == {"DATA": "/d", "OUT": "/d/out", "A": "1"}


def test_lines_of_setup_keep_their_quotes_and_know_the_files_variables(described_by):
    text = """#SBATCH -p gpu
ENV=/envs/a
module load "my mod" cuda/$V
source $ENV/bin/activate
source "$HOME/my env/x.sh" ~/y 'a b'
source "$(conda info --base)/etc/profile.d/conda.sh"
eval "$($ENV/bin/conda 'shell.bash' hook)"
conda activate $1
python train.py"""
    result = described_by("job.sbatch", text)
    assert result.place["setup"] == [
        "module load 'my mod' cuda/$V",
        "source /envs/a/bin/activate",
        r"source $HOME/my\ env/x.sh ~/y 'a b'",
        """eval "$(/envs/a/bin/conda 'shell.bash' hook)\"""",
        "conda activate $1",
    ]
    assert "line 3: module $V: in setup as it is written, though the file does not set it" in result.notes
    assert "line 8: conda $1: in setup" in str(result.notes)
    assert "HOME" not in str(result.notes)
    assert "line 6: source: not read, since it is computed" in str(result.notes)


def test_an_sbatch_file_becomes_a_job_and_a_place(described_by, tmp_path):
    text = r"""#!/bin/bash
#SBATCH --job-name=My_Run   # a name
#SBATCH -N 2 --ntasks-per-node=1 --gres=gpu:a100:4
#SBATCH --cpus-per-task=32
#SBATCH --mem=64G
#SBATCH --time=1-02:30:00
#SBATCH -p gpu
#SBATCH --output=%x.out
module load cuda
conda activate env
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NCCL_DEBUG=INFO WANDB_API_KEY=abc
DATA=/scratch/data
args=(--epochs 3
      --data "$DATA")
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 \
  --rdzv_endpoint $MASTER_ADDR:29500 train.py "${args[@]}" --run $SLURM_JOB_ID
"""
    result = described_by("job.sbatch", text, "import torch")
    assert result.job == {
        "strategy": "torch_ddp",
        "nodes": 2,
        "processes_per_node": 4,
        "script": "train.py",
        "arguments": {"epochs": 3, "data": "/scratch/data"},
        "resources": {"cpu": 8, "memory": "16Gi", "gpu": 1},
        "environment": {"NCCL_DEBUG": "INFO"},
        "timeout": "1590min",
        "name": "my-run",
    }
    assert TrainingJob(folder=tmp_path, **result.job).resources.gpu == 1
    assert result.place == {
        "options": ["--gres=gpu:a100:4", "-p gpu"],
        "setup": ["module load cuda", "conda activate env"],
    }
    assert Slurm(**result.place)
    notes = "\n".join(result.notes)
    assert "abc" not in notes
    for said in (
        "line 8: --output",
        "line 11: MASTER_ADDR",
        "line 12: WANDB_API_KEY",
        "line 16: --run",
    ):
        assert said in notes, notes


def test_what_becomes_one_run_is_said_and_gpus_and_memory_are_counted(described_by):
    options = "#SBATCH --array=0-3 --signal=USR1@9 --dependency=afterok:1 --mem-per-cpu=2G -c 4\n"
    loop = "for lr in 1 2; do\nCUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 train.py\ndone"
    result = described_by("run.sh", options + loop)
    assert result.job["resources"] == {"cpu": 2, "memory": "4Gi", "gpu": 1}
    assert result.place == {}
    for said in (
        "--array: dropped",
        "--signal",
        "--dependency",
        "for: changed: what it repeats is run once",
    ):
        assert said in "\n".join(result.notes), result.notes
    deepspeed = described_by("run.sh", "deepspeed --num_gpus=4 train.py").job
    assert (deepspeed["workers"], deepspeed["resources"]) == (4, {"gpu": 1})


def test_a_script_is_found_in_the_folder_to_which_a_shell_changes(described_by, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    result = described_by("run.sh", "cd sub && python ./train.py", script="")
    assert result.job["script"] == "sub/train.py"
    assert result.notes == ["line 1: cd: changed: the job runs in its own folder, not in sub"]


def test_words_of_each_process_stay_words_and_several_processes_without_a_program_are_a_guess(described_by):
    url = "--url tcp://$MASTER_ADDR:$MASTER_PORT"
    text = f"#SBATCH --ntasks=2\nsrun python train.py --rank $SLURM_PROCID {url} --world $SLURM_NTASKS"
    result = described_by("run.sh", text, "import tensorflow")
    assert result.job["arguments"] == {
        "rank": "{rank}",
        "url": "tcp://{master_addr}:{master_port}",
        "world": 2,
    }
    assert result.job["strategy"] == "multi_worker_mirrored"
    assert any("guess" in note for note in result.notes)


SRUN = "#SBATCH -n 4 --ntasks-per-node=2\nN=$(wc -l hosts)\nsrun torchrun --nnodes $N --nproc_per_node=4 t.py"
NODES = {
    "#SBATCH -p gpu\ntorchrun --nnodes=1:2 --nproc_per_node=4 t.py": (
        1,
        "nnodes 1:2: changed: Slurm gives 1",
    ),
    "#SBATCH -N 2-3\nsrun --time=30 torchrun --nproc_per_node=4 t.py": (3, "of 2-3 nodes, 3 are taken"),
    "torchrun --nnodes=$N --nproc_per_node=4 t.py": (1, "is computed: 1 is taken"),
    SRUN: (2, "changed: Slurm gives 2"),
}


@pytest.mark.parametrize("text", NODES)
def test_a_number_of_nodes_that_is_no_number_is_named(text, described_by):
    result, (nodes, said) = described_by("run.sh", text), NODES[text]
    assert result.job.get("nodes", 1) == nodes
    assert said in "\n".join(result.notes)


POD = "kind: Job\nspec: {template: {spec: {containers: [{command: [python, train.py], resources: %s}]}}}"
LIMITS = {
    "job.yaml": (POD % "{}", "resources.cpu: 1 for|resources.memory: 2Gi for"),
    "asks.yaml": (POD % "{requests: {cpu: 2, memory: 3Gi}}", "requests: changed: they are the limits"),
    "job.sbatch": ("#SBATCH -t UNLIMITED\npython train.py $@", "resources.memory: 2Gi|timeout: 24h|after --"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_that_a_file_leaves_to_others_are_named(name, described_by):
    text, said = LIMITS[name]
    notes = "\n".join(described_by(name, text).notes)
    assert all(each in notes for each in said.split("|")), notes


# Manifests

CLUSTER = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: mine, namespace: team, annotations: {a: b}}
spec:
  nprocPerNode: auto
  runPolicy: {schedulingPolicy: {queue: mine}}
  pytorchReplicaSpecs:
    Master: &pods
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          tolerations: [{operator: Exists}]
          containers:
          - name: pytorch
            image: example.com/torch:1
            command: [sh, -c]
            args: ["pip install x; torchrun --nproc_per_node=2 /app/train.py --data=/mnt/in/x --epochs $EPOCHS"]
            env:
            - {name: EPOCHS, value: "3"}
            - {name: HF_TOKEN, value: hf_abc}
            - {name: PASS, valueFrom: {secretKeyRef: {name: a, key: b}}}
            resources: {limits: {nvidia.com/gpu: "2", memory: 10Gi, cpu: 500m}}
            volumeMounts: [{name: d, mountPath: /mnt/in}]
          - {name: beside, image: b}
          volumes: [{name: d, persistentVolumeClaim: {claimName: claimed}}, {name: e, emptyDir: {}}]
    Worker: {<<: *pods, replicas: 2}
"""


def test_a_manifest_becomes_a_job_and_a_place_and_each_thing_dropped_has_its_path(described_by):
    result = described_by("cluster.yaml", CLUSTER)
    assert result.job == {
        "name": "mine",
        "timeout": "24h",
        "script": "train.py",
        "strategy": "torch_ddp",
        "nodes": 3,
        "processes_per_node": 2,
        "arguments": ["--data={data}/x", "--epochs", 3],
        "resources": {"cpu": 0.25, "memory": "5Gi", "gpu": 1},
        "environment": {"EPOCHS": "3"},
    }
    assert result.place == {"namespace": "team", "image": "example.com/torch:1", "data_claim": "claimed"}
    notes = "\n".join(result.notes)
    assert "hf_abc" not in notes
    pods = "spec.pytorchReplicaSpecs.Worker.template.spec"
    for path in (
        "metadata.annotations",
        f"{pods}.tolerations",
        f"{pods}.volumes[1]",
        f"{pods}.containers[1]",
        "queue: dropped, since the pods name no gang scheduler",
        f"{pods}.containers[0].env.HF_TOKEN: left out, since it may be a secret",
        f"{pods}.containers[0].env.PASS: left out, since it may be a secret",
        "spec.pytorchReplicaSpecs.Worker.restartPolicy",
    ):
        assert path in notes, notes


def test_of_several_claims_the_one_that_the_arguments_name_is_kept(described_by):
    text = CLUSTER.replace("{name: e, emptyDir: {}}", "{name: e, persistentVolumeClaim: {claimName: other}}")
    mounts = "[{name: e, mountPath: /mnt/first}, {name: d, mountPath: /mnt/in, subPath: sets/a}]"
    result = described_by("cluster.yaml", text.replace("[{name: d, mountPath: /mnt/in}]", mounts))
    assert result.place["data_claim"] == "claimed"
    assert result.job["arguments"][0] == "--data={data}/sets/a/x"
    assert "volumes[1]: dropped, since data_claim is claimed" in "\n".join(result.notes)


TENSORFLOW = "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: t}\nspec: {tfReplicaSpecs: %s}"
MPI = (
    "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: m}\nspec:\n  slotsPerWorker: 2\n"
    "  mpiReplicaSpecs:\n    Worker: {replicas: 2}\n"
    "    Launcher: {template: {spec: {containers: [{command: [mpirun, -np, '4', python, train.py]}]}}}\n"
)
TRAINER = "{runtimeRef: {name: torch}, trainer: {numNodes: 2, command: [torchrun, train.py]}}"
ALONE = "kind: Job\nspec: {template: {spec: {containers: [{command: [python, train.py]}]}}}"
WITHOUT_COMMAND = ALONE.replace("command: [python, train.py]", "args: [--epochs, '3', --api_key, abc]")
INDEX = ALONE.replace("train.py", "train.py, --rank, $(JOB_COMPLETION_INDEX)")
# What a manifest, beside such a script, says, and a line of its import.
MANIFESTS = {
    "servers": (
        TENSORFLOW % "{Chief: {replicas: 1}, PS: {replicas: 2}, Worker: {replicas: 4}}",
        None,
        {"strategy": "parameter_server", "workers": 4, "parameter_servers": 2},
        "",
    ),
    "mirrored": (TENSORFLOW % "{Worker: {replicas: 2}}", None, {"strategy": "multi_worker_mirrored", "workers": 2}, ""),
    "evaluator": (
        TENSORFLOW % "{Worker: {replicas: 2, template: &t {spec: {hostIPC: true}}}, Evaluator: {template: *t}}",
        None,
        {"strategy": "multi_worker_mirrored", "workers": 2},
        "spec.tfReplicaSpecs.Evaluator: dropped",
    ),
    "horovod": (MPI, "import horovod.torch", {"strategy": "horovod", "nodes": 2, "processes_per_node": 2}, ""),
    "mpi": (MPI, "import mpi4py", {"strategy": "mpi", "nodes": 2, "processes_per_node": 2}, ""),
    "fewer": (MPI.replace("'4'", "'3'"), "import mpi4py", {"workers": 3}, ""),
    "alone": (ALONE, None, {"strategy": "single"}, ""),
    "four": (
        ALONE.replace("{template", "{completions: 4, template"),
        None,
        {"workers": 1},
        "4 pods, which nothing joins, are one worker",
    ),
    "trainer": (
        f"kind: TrainJob\nspec: {TRAINER}",
        None,
        {"strategy": "torch_ddp", "workers": 2},
        "spec.runtimeRef: not read, since the runtime is not in the file",
    ),
    "index": (INDEX, None, {"arguments": {"rank": "{node_rank}"}}, ""),
    "images": (
        MPI.replace("[{command", "[{image: a, command").replace("replicas: 2}", "replicas: 2, template: %s}")
        % "{spec: {containers: [{image: b}]}}",
        None,
        {"script": "train.py"},
        "Launcher.template.spec.containers[0].image: a: dropped, since the workers' is b",
    ),
    "code": (
        ALONE.replace("python, train.py", 'bash, -c, "echo \'{{x}}\'\\necho \\"Rank: $R\\"\\npython train.py 1"')
        + "\n---\nkind: ConfigMap\ndata:\n  a.py: |\n    f'{{x}}'\n    a: $B",
        None,
        {"arguments": [1]},
        "ConfigMap",
    ),
    "arguments": (WITHOUT_COMMAND, None, {"arguments": {"epochs": 3}}, "the image's ENTRYPOINT starts"),
}  # fmt: skip


ELASTIC = """
kind: PyTorchJob
metadata: {name: grows}
spec:
  elasticPolicy: {minReplicas: 1, maxReplicas: 3, maxRestarts: 5}
  runPolicy: {schedulingPolicy: {queue: mine}}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          schedulerName: volcano
          nodeSelector: {disk: ssd}
          containers:
          - command: [torchrun, train.py]
            resources: {limits: {cpu: 1, memory: 2Gi, vpc.amazonaws.com/efa: 4}}
"""
RUNTIME = """
kind: TrainingRuntime
metadata: {name: torch}
spec:
  mlPolicy: {numNodes: 4, torch: {}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template: {spec: {template: {spec: {containers: [{image: "a/b:1", env: [{name: A, value: "1"}]}]}}}}
"""


def test_how_far_a_job_grows_and_what_schedules_it_go_to_the_place(described_by):
    assert described_by("grows.yaml", ELASTIC).place == {
        "elastic": {"min_workers": 1, "max_workers": 3, "max_restarts": 5},
        "gang": "volcano",
        "queue": "mine",
        "node_selector": {"disk": "ssd"},
        "pod_resources": {"vpc.amazonaws.com/efa": 4},
    }


def test_what_a_train_job_leaves_to_the_runtime_in_its_file_is_read_there(described_by):
    trainer = TRAINER.replace("numNodes: 2, ", "env: [{name: B, value: '2'}], ")
    result = described_by("trainer.yaml", f"kind: TrainJob\nspec: {trainer}\n---{RUNTIME}")
    assert result.place == {"kind": "TrainJob", "image": "a/b:1"}
    assert (result.job["workers"], result.job["environment"]) == (4, {"A": "1", "B": "2"})


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_kind_and_the_command_decide_the_strategy(name, described_by):
    text, script, fields, said = MANIFESTS[name]
    result = described_by(f"{name}.yaml", text, script)
    assert {each: result.job[each] for each in fields} == fields
    assert said in str(result.notes)
    assert "abc" not in str(result)


def test_an_api_whose_jobs_have_other_fields_is_refused(described_by):
    with pytest.raises(JobError, match="v1alpha1 is not read"):
        described_by("old.yaml", "apiVersion: kubeflow.org/v1alpha1\nkind: MPIJob\nspec: {replicas: 2}")


REFUSED = {
    "other.yaml": (
        f"apiVersion: batch.volcano.sh/v1alpha1\n{ALONE}",
        "holds Job of batch.volcano.sh/v1alpha1; it",
    ),
    "helm.yaml": (
        "kind: Job\nmetadata: {a: b}\n{{- if x }}\n",
        r"line 3: it is a template, with \{\{; import",
    ),
    "tag.yaml": (
        ALONE.replace("{command", "{image: 'a:{{ tag }}', command"),
        r"\[0\].image: it is a template",
    ),
    "word.yaml": (ALONE.replace("train.py]", "train.py, '--lr={{lr}}']"), r"command\[2\]: it is a template"),
    "subst.yaml": (
        ALONE.replace("{template", "{completions: $N, template"),
        "spec.completions: it is a template",
    ),
    "time.yaml": (
        ALONE.replace("{template", "{activeDeadlineSeconds: 1h, template"),
        "1h, is no whole number",
    ),
    "deep.sh": ("A='bash -c \"$A\"'\nexport A\nbash -c '$A'\neval $A", "nested too deeply"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name, described_by):
    text, said = REFUSED[name]
    with pytest.raises(JobError, match=said):
        described_by(name, text)


# Both files


def test_secrets_are_in_no_file_and_nothing_is_overwritten(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    said = import_file(file)
    assert "to do: " in said
    assert "there is no such file" in said
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path != file}
    assert sorted(written) == ["job.yaml", "place.yaml"]
    assert "hf_abc" not in "".join(written.values())
    with pytest.raises(JobError, match=r"job\.yaml is there already"):
        import_file(file)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path != file} == written
    (tmp_path / "train.py").write_text("import torch")
    assert TrainingJob.load(tmp_path).script == "train.py"


def test_a_script_of_the_working_folder_is_found_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    file = tmp_path / "scripts" / "run.sh"
    file.write_text("torchrun --nproc_per_node 1 train.py")
    monkeypatch.chdir(tmp_path)
    assert "name the folder that has it by --output" in import_file(file)
    (file.parent / "job.yaml").unlink()
    (tmp_path / "train.py").touch()
    assert import_file(file).startswith("wrote job.yaml")
    assert TrainingJob.load(tmp_path).strategy == "torch_ddp"
