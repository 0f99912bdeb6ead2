"""Starts a script as Python would, with what only this process knows filled in: `python start.py SCRIPT --rank={rank}`.

It travels with jobs whose arguments hold such words, or whose words a target cannot hand over as they are: these are in
`start.json` beside it, which takes the place of its arguments. It needs the standard library and `place` alone.
"""

import json
import os
import re
import sys
from pathlib import Path

# Attributes of `place.here()`.
WORDS = ("role", "index", "rank", "world_size", "local_rank", "local_world_size", "node_rank")
# And variables, which launchers set.
VARIABLES = {
    "data": "WORKSHOP_DATA",
    "model": "WORKSHOP_MODEL",
    "checkpoints": "WORKSHOP_CHECKPOINTS",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
# What is to be filled in is the first group; it is empty for a word in two pairs of braces, which stays.
PATTERN = re.compile(rf"\{{\{{\w+\}}\}}|\{{({'|'.join((*WORDS, *VARIABLES))})\}}")


def main() -> None:
    """Become `python ARGUMENT...`, with the words filled in."""
    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # what this file's own folder holds are not modules

    from workshop_utils import place

    here = place.from_environment(os.environ)
    if folder := place.checkpoint_folder():  # of SageMaker, too
        os.environ["WORKSHOP_CHECKPOINTS"] = str(folder)

    def fill(match: re.Match[str]) -> str:
        word = match[1]
        if word is None:
            return match[0]
        value = os.environ.get(VARIABLES[word]) if word in VARIABLES else getattr(here, word)
        if value is None:
            without = f"argument {match.string!r}: {here.name} has no {word}"
            sys.exit(f"{without}; leave {match[0]} out, or launch the job with it")
        return str(value)

    words = Path(__file__).with_name("start.json")
    arguments = json.loads(words.read_text()) if words.exists() else sys.argv[1:]
    os.execv(sys.executable, [sys.executable, *(PATTERN.sub(fill, argument) for argument in arguments)])


if __name__ == "__main__":
    main()
