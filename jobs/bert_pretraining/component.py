"""BERT as TorchX components: functions that turn the options of `torchx run` into an application.

    torchx run --scheduler local_cwd jobs/bert_pretraining/component.py:train -- --steps 20
    torchx run --scheduler kubernetes --scheduler_args queue=workshop --workspace "" --dryrun \\
        jobs/bert_pretraining/component.py:trainium

`train` runs any script under torchrun, on one or more nodes; `trainium` and `precompile` are the jobs for two
trn1.32xlarge. TorchX reads names, types and descriptions of the options from signature and docstring.
"""

import shlex
import sys

from torchx import specs

# BERT-Large: 200 steps, each of 2 nodes × 32 ranks × 16 × 32 = 32,768 sequences. prepare.yaml writes the corpus.
BERT_LARGE = (
    "--device neuron --dtype bfloat16 --corpus /data/corpus --batch-size 16 --grad-accumulation 32 --sequence 128 "
    "--layers 24 --hidden 1024 --heads 16 --learning-rate 0.0004 --steps 200 --warmup-steps 20"
)
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/workshop-neuron:trn1"
TIME_LIMIT = "timeout --kill-after=60 2h"  # TorchX sets none; frees the machines, but does not stop the bill
TRN1_32XLARGE = specs.Resource(
    cpu=120,  # of 128, and 490 of 550 GB: the node's own pods, the kubelet and the system need the rest
    memMB=490_000,
    gpu=0,
    # TorchX's own resource for Trainium has the older name, neurondevice, which Neuron dropped in version 2.20.
    devices={"aws.amazon.com/neuron": 16, "vpc.amazonaws.com/efa": 8},
    capabilities={"node.kubernetes.io/instance-type": "trn1.32xlarge"},
)
NEURON = {
    "CCOM_SOCKET_IFNAME": "eth0",  # the ranks first meet over the ordinary interface
    "NEURON_RT_RESET_CORES": "1",  # frees cores that a killed run has left busy
    "FI_PROVIDER": "efa",  # collectives go through the Elastic Fabric Adapter (AWS Neuron, "Distributed training")
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "NEURON_CC_FLAGS": "--cache_dir=/data/neuron_cache/bert --model-type=transformer",
    "XLA_TRANSFER_SEED_ASYNC": "1",
}
KEPT = {"WORKSHOP_CHECKPOINTS": "/data/checkpoints/bert", "WORKSHOP_MODEL": "/data/models/bert"}


def train(
    *script_args: str,
    script: str = "jobs/bert_pretraining/train.py",
    name: str = "bert",
    nodes: int = 1,
    processes_per_node: int = 2,
    rendezvous: str = "c10d",
    endpoint: str = "",
    max_restarts: int = 0,
    image: str = "workshop-pytorch:cpu",
    wrapper: str = "",
) -> specs.AppDef:
    """Run a script under torchrun, on each of several nodes.

    Args:
        script_args: the options of the script, after --
        script: path of the script, in the image on a cluster
        name: of the application; TorchX adds random letters
        nodes: how many torchruns there are
        processes_per_node: how many ranks each of them starts
        rendezvous: c10d, at the first node, or etcd-v2, at an etcd server
        endpoint: host:port where the torchruns meet; for c10d the default is the first node
        max_restarts: how often torchrun starts all ranks again when one fails
        image: the container's image, on a cluster
        wrapper: the program that runs torchrun, such as neuron_parallel_compile
    """
    if not endpoint:  # only a shell on each node knows where the first one is; TorchX turns $$ into $
        endpoint = f"$${{{specs.macros.rank0_env}:=localhost}}:29500" if nodes > 1 else "localhost:0"
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "LOGLEVEL": "WARNING"}
    here = ""
    if endpoint.startswith("localhost:"):  # then all ranks are here, and nobody outside can reach them
        here = "--local-addr=127.0.0.1"
        variables["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if max_restarts:  # ranks that are started again meet in a store of their own
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = (
        f"exec {wrapper} torchrun --nnodes={nodes} --nproc-per-node={processes_per_node} "
        f"--rdzv-backend={rendezvous} --rdzv-endpoint={endpoint} --rdzv-id={specs.macros.app_id} "
        f"--max-restarts={max_restarts} --role=worker --tee=3 {here} --"
    )
    command = [*torchrun.split(), shlex.join([script, *script_args])]
    role = specs.Role(
        name="worker",
        image=image,
        entrypoint="bash",
        args=["-c", " ".join(command)],
        env=variables,
        num_replicas=nodes,
        resource=specs.Resource(cpu=processes_per_node, gpu=0, memMB=2000 * processes_per_node),
        port_map={"c10d": 29500},
    )
    return specs.AppDef(name, [role])


def trainium(*script_args: str, image: str = IMAGE) -> specs.AppDef:
    """BERT-Large on two trn1.32xlarge, whose 64 ranks meet at the cluster's etcd.

    Args:
        script_args: further options of train.py, after --
        image: that of jobs/images/neuron.Dockerfile, in your registry
    """
    return _on_trainium("bert-trainium", TIME_LIMIT, ["--checkpoint-steps", "50", *script_args], image, KEPT)


def precompile(*script_args: str, image: str = IMAGE) -> specs.AppDef:
    """Ten steps of `trainium` below neuron_parallel_compile, which fills the cache of compiled graphs.

    The losses mean nothing, so neither checkpoints nor a model are kept.

    Args:
        script_args: further options of train.py, after --
        image: that of jobs/images/neuron.Dockerfile, in your registry
    """
    wrapper = f"{TIME_LIMIT} neuron_parallel_compile"
    return _on_trainium("bert-precompile", wrapper, ["--steps-this-run", "10", *script_args], image, {})


def _on_trainium(
    name: str, wrapper: str, script_args: list[str], image: str, variables: dict[str, str]
) -> specs.AppDef:
    application = train(
        *shlex.split(BERT_LARGE),
        *script_args,
        script="/workshop/job/train.py",
        name=name,
        nodes=2,
        processes_per_node=32,  # one for each NeuronCore, two on a chip
        rendezvous="etcd-v2",
        endpoint="etcd-server:2379",
        max_restarts=3,
        image=image,
        wrapper=wrapper,
    )
    (role,) = application.roles
    role.env |= NEURON | variables
    role.resource = TRN1_32XLARGE
    role.mounts = [specs.VolumeMount(src="training-data", dst_path="/data")]
    return application
