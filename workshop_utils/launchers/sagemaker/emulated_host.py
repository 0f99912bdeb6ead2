"""One emulated instance: lays out the folders of a container, then becomes the workshop's driver.

    python emulated_host.py ROOT MODEL DATA CODE SOURCE...

ROOT stands for /opt/ml. MODEL is where the model is to stay, or empty; DATA becomes the channel `training`; and CODE,
a folder below ROOT, gets what each SOURCE holds. Standard library alone.
"""

import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Lay out the folders; the driver takes over."""
    root, model, data, code, *sources = map(Path, sys.argv[1:])
    for folder in ("output/data", "output/intermediate", "input/data", "checkpoints"):
        (root / folder).mkdir(parents=True)
    if sys.argv[2]:  # what is written there outlives the run
        (root / "model").symlink_to(model, target_is_directory=True)
    else:
        (root / "model").mkdir()
    (root / "input" / "data" / "training").symlink_to(data, target_is_directory=True)
    for source in sources:
        shutil.copytree(source, root / code, dirs_exist_ok=True)
    os.chdir(root / code)
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("driver.py"))])


if __name__ == "__main__":
    main()
