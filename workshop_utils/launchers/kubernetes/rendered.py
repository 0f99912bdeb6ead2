"""Writes `kubernetes.yaml` beside the job.yaml of every job that Kubernetes can run.

A program: `python -m workshop_utils.launchers.kubernetes.rendered [FOLDER]`, where FOLDER is `jobs` by default.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import files, manifest
from workshop_utils.launchers.kubernetes.settings import KINDS, Settings


def rendered(folder: Path) -> dict[Path, str]:
    """The text of each file, by path, for the jobs below `folder`."""
    jobs = [TrainingJob.load(path) for path in sorted(folder.glob("*/job.yaml"))]
    return {
        job.folder / files.RENDERED: str(manifest.build(job, Settings()))
        for job in jobs
        if job.strategy in KINDS
    }


def main() -> None:
    """Write the files, and say which have changed."""
    for path, text in rendered(Path(sys.argv[1] if len(sys.argv) > 1 else "jobs")).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
