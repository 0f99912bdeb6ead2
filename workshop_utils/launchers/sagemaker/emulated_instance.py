"""What runs on emulated instances alone: their container, and the toolkit's parameter server. Each is a program:

    python emulated_instance.py container LAYOUT COMMAND...  lays out the folders of a container, then runs the command
    python emulated_instance.py server TF_CONFIG             serves beside the script on every host

It does not import the package, except for the modules that travel with a script.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path


def container(layout: dict[str, str], command: list[str]) -> None:
    """Lay out a container below `root`, start the parameter server that belongs there, and become `command`.

    `layout` names the folders: `channels` is JSON with that of each channel; `model` and `checkpoints` may outlive the
    run; what `source` holds is copied to `code`. `server` is the TF_CONFIG of a parameter server, if any.
    """
    root, code = Path(layout["root"]), Path(layout["code"])
    for folder in ("output/data", "output/intermediate", "input/data"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("model", "checkpoints"):
        Path(layout[name]).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(layout[name], target_is_directory=True)
    for name, folder in json.loads(layout["channels"]).items():
        (root / "input/data" / name).symlink_to(folder, target_is_directory=True)
    shutil.copytree(layout["source"], code, dirs_exist_ok=True)
    os.chdir(code)
    if layout["server"]:
        subprocess.Popen([sys.executable, __file__, "server", layout["server"]])
    os.execvp(command[0], command)


def server(tf_config: str) -> None:
    """Hold variables on the CPU, unknown to the script, until the master's port has answered, and answers no more.

    Source: sagemaker-tensorflow-training-toolkit, training.py (`_run_ps`, `_wait_until_master_is_down`).
    """
    os.environ["TF_CONFIG"] = tf_config
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    from workshop_utils.training.tf_cluster import serve_until_chief_leaves

    config = json.loads(tf_config)  # with a master, as the toolkit hands it over, though scripts need a chief
    # Started first: the master cannot end before this server serves, so the thread sees it while it is there.
    watch = threading.Thread(target=serve_until_chief_leaves)
    watch.start()
    # Keras would import them, which is a third of the time of this import, and this server does not use Keras.
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # type: ignore[arg-type]
    import tensorflow as tf

    # Several threads to run operations in: one that waits for a peer holds its own.
    counts = {"intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 16}
    threads = tf.compat.v1.ConfigProto(device_count={"GPU": 0}, **counts)
    _server = tf.distribute.Server(config["cluster"], "ps", config["task"]["index"], "grpc", threads)
    watch.join()


if __name__ == "__main__":
    if sys.argv[1] == "container":
        container(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        server(sys.argv[2])
