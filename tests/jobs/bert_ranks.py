"""A program that imports the BERT job once, and forks its ranks from there: requests and answers are JSON lines.

{"size": 2, "words": ["--steps", "3"], "variables": {...}} → {"codes": [0, 0], "outputs": ["...", "..."]}
{"masks": 500} → {"tokens": [[...]], "labels": [[...]], "rows": [[...]]}
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from workshop_utils.processes.ports import PortReservation

SCRIPT = Path(__file__).parents[2] / "jobs" / "bert_pretraining" / "train.py"


def imported() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bert_pretraining", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def rank_main(module: ModuleType, words: list[str], variables: dict[str, str], output: int) -> None:
    """One rank, in the fork: never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    sys.argv = [str(SCRIPT), *words]
    code = 0
    try:
        module.main()
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(module: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    with PortReservation(1) as port, tempfile.TemporaryDirectory() as folder:
        files, children = [], []
        for rank in range(request["size"]):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": request["size"],
                "MASTER_PORT": port.ports[0],
            }
            variables = {name: str(value) for name, value in place.items()} | request["variables"]
            files.append(Path(folder) / str(rank))
            output = os.open(files[-1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            child = os.fork()
            if child == 0:
                rank_main(module, request["words"], {"MASTER_ADDR": "127.0.0.1", **variables}, output)
            os.close(output)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return {"codes": codes, "outputs": [file.read_text(encoding="utf-8") for file in files]}


def masks(module: ModuleType, count: int) -> dict[str, Any]:
    rows = np.random.default_rng(1).integers(5, 2048, (count, 62))
    pairs = [module.masked(row, 2048, np.random.default_rng((0, index))) for index, row in enumerate(rows)]
    tokens, labels = (np.stack(column).tolist() for column in zip(*pairs, strict=True))
    return {"rows": rows.tolist(), "tokens": tokens, "labels": labels}


def main() -> None:
    module = imported()
    for line in sys.stdin:
        request = json.loads(line)
        answer = masks(module, request["masks"]) if "masks" in request else run(module, request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
