"""TorchX components for the workshop's jobs: from a few arguments, the description of an application.

They run in TorchX's own environment, through its command line; the launcher calls it as one would by hand:

    torchx run --dryrun -s local_cwd workshop_utils/launchers/torchx/components.py:ddp --script train.py --nodes 2

TorchX's own `dist.ddp` has no choice of rendezvous endpoint and no restarts by torchrun, and its Trainium instance
asks for a device that Neuron has dropped. This component differs in that, and in how variables and arguments are
written: TorchX's own notation has no way to write a value that holds an equals sign, or to repeat a word.
"""

import json
import os
import shlex
from typing import List, Optional  # noqa: UP035  TorchX reads these annotations, and knows no others

from torchx import specs

EFA = "vpc.amazonaws.com/efa"
NEURON = "aws.amazon.com/neuron"  # Neuron 2.20 dropped the older name, neurondevice
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

# Whole instances: processors, memory in GiB, Trainium chips, Elastic Fabric Adapter interfaces.
# Source: AWS, "Amazon EC2 accelerated computing instances".
INSTANCES = {
    "trn1.2xlarge": (8, 32, 1, 0),
    "trn1.32xlarge": (128, 512, 16, 8),
    "trn1n.32xlarge": (128, 512, 16, 16),
    "trn2.48xlarge": (192, 2048, 16, 16),
}
SHARE = 15 / 16  # of an instance, for the pod: the node's own pods, the kubelet and the system need the rest
# What makes the collectives go through the Elastic Fabric Adapter. Source: AWS Neuron, "Distributed training".
OVER_EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
# For the sockets through which the ranks first meet, and for chips that a killed run has left busy.
ON_TRAINIUM = {"CCOM_SOCKET_IFNAME": "eth0", "NEURON_RT_RESET_CORES": "1"}

# How a rank's lines start in the log of its node.
LINE_PREFIX = "[worker-${rank}]: "


def trainium(instance_type: str) -> specs.Resource:
    """A whole instance of this type."""
    cpu, memory_gib, chips, interfaces = INSTANCES[instance_type]
    return specs.Resource(
        cpu=int(cpu * SHARE),
        gpu=0,
        memMB=int(memory_gib * 1024 * SHARE),
        devices={NEURON: chips} | ({EFA: interfaces} if interfaces else {}),
        capabilities={INSTANCE_TYPE: instance_type},
    )


def ddp(
    *script_args: str,
    script: str,
    name: str = "ddp",
    image: str = "workshop-pytorch:cpu",
    nodes: int = 1,
    processes_per_node: int = 1,
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 2048,  # noqa: N803  TorchX's own name
    instance_type: Optional[str] = None,  # noqa: UP045
    rendezvous: str = "c10d",
    rendezvous_endpoint: Optional[str] = None,  # noqa: UP045
    port: int = 29500,
    local_address: Optional[str] = None,  # noqa: UP045
    max_restarts: int = 0,
    wrapper: Optional[str] = None,  # noqa: UP045
    env: str = "{}",
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Data parallel training with PyTorch: on each node a torchrun, which starts the ranks there.

    Args:
        script_args: arguments of the script
        script: the script, as a path in the image or, locally, on this machine; arguments may follow it
        name: the name of the application
        image: the container image; a local run does not use it
        nodes: how many nodes, each with a torchrun of its own
        processes_per_node: how many ranks a torchrun starts
        cpu: processors of a node
        gpu: GPUs of a node
        memMB: memory of a node, in MB
        instance_type: a whole Trainium instance in place of cpu, gpu and memMB, such as trn1.32xlarge
        rendezvous: how the nodes find each other: c10d, etcd or etcd-v2
        rendezvous_endpoint: host:port of the etcd server; with c10d they meet at the first node
        port: where the first node listens, with c10d
        local_address: the address of this node's ranks; by default that of its host name
        max_restarts: how often torchrun restarts all ranks when one fails
        wrapper: a program, with its arguments, that runs torchrun, such as neuron_parallel_compile
        env: variables of the ranks, as a JSON object; or the name of the variable of this process that holds it
        mounts: what is mounted into the container, in TorchX's notation
    """
    if rendezvous_endpoint is None:
        # Only the shell of each node knows where the first one is. Alone, a node takes any free port.
        first = f"$${{{specs.macros.rank0_env}:=localhost}}:{port}"
        endpoint = first if nodes > 1 else "localhost:0"
    else:
        endpoint = shlex.quote(rendezvous_endpoint)
    torchrun = [
        "torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes_per_node}",
        f"--rdzv-backend={rendezvous}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={specs.macros.app_id}",
        f"--max-restarts={max_restarts}",
        "--role=worker",
        "--tee=3",
    ]
    if local_address is not None:
        torchrun.append(f"--local-addr={local_address}")
    variables = {
        # `strategies.TORCHRUN_RESTARTS` says why; this file runs where the workshop is not installed.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": LINE_PREFIX,
        "LOGLEVEL": "WARNING",
    }
    resource = specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB)
    if instance_type is not None:
        resource = trainium(instance_type)
        variables |= ON_TRAINIUM | (OVER_EFA if EFA in resource.devices else {})
    program = [*shlex.split(script), *script_args]
    # Without `exec` the shell would stand between a signal and torchrun.
    command = " ".join(["exec", *shlex.split(wrapper or ""), *torchrun, *map(shlex.quote, program)])
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="worker",
                image=image,
                entrypoint="bash",
                args=["-c", command],
                env={**variables, **json.loads(os.environ.get(env, env))},
                num_replicas=nodes,
                resource=resource,
                port_map={"c10d": port},
                mounts=specs.parse_mounts(mounts) if mounts else [],
            )
        ],
    )
