"""One emulated instance: lays out the folders of a container, then becomes the workshop's driver.

    python emulated_host.py ROOT CONTENTS

ROOT stands for /opt/ml. CONTENTS is JSON: the script's folder below ROOT and the folders that it is copied from, the
folder of each channel, and where the model is to stay, or null. Standard library alone.
"""

import json
import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Lay out the folders; the driver takes over."""
    root, contents = Path(sys.argv[1]), json.loads(sys.argv[2])
    for folder in ("output/data", "output/intermediate", "input/data", "checkpoints"):
        (root / folder).mkdir(parents=True)
    if contents["model"]:  # what is written there outlives the run
        (root / "model").symlink_to(contents["model"], target_is_directory=True)
    else:
        (root / "model").mkdir()
    for name, path in contents["channels"].items():
        (root / "input" / "data" / name).symlink_to(path, target_is_directory=True)
    code = root / contents["code"]
    for source in contents["sources"]:
        shutil.copytree(source, code, dirs_exist_ok=True)
    os.chdir(code)
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("driver.py"))])


if __name__ == "__main__":
    main()
