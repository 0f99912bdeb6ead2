"""Starts a script as Python would, with what only this process knows filled in: `python start.py SCRIPT --rank={rank}`.

It travels with jobs whose arguments hold such words, or whose words a target cannot hand over as they are: without
arguments it reads them from `start.json` beside it. It needs the standard library and `place` alone.
"""

import json
import os
import sys
from pathlib import Path

# By word: the attribute of `place.here()`.
WORDS = {
    **{
        name: name
        for name in ("role", "index", "rank", "world_size", "local_rank", "local_world_size", "node_rank")
    },
    **{"data": "data_folder", "model": "model_folder"},
}
# And variables, which PyTorch's launchers set.
VARIABLES = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}


def main() -> None:
    """Become `python ARGUMENT...`, with the words filled in."""
    sys.path[0] = str(
        Path(__file__).resolve().parents[1]
    )  # what this file's own folder holds are not modules

    from workshop_utils import place

    here = place.from_environment(os.environ)
    known = {f"{{{word}}}": getattr(here, name) for word, name in WORDS.items()}
    known |= {f"{{{word}}}": os.environ.get(name) for word, name in VARIABLES.items()}
    filled = []
    for argument in sys.argv[1:] or json.loads(Path(__file__).with_name("start.json").read_text()):
        for word, value in known.items():
            if word in argument and value is None:
                sys.exit(
                    f"argument {argument!r}: {word} is not known to {here.name}, which has no such place"
                )
            argument = argument.replace(word, str(value))
        filled.append(argument)
    os.execv(sys.executable, [sys.executable, *filled])


if __name__ == "__main__":
    main()
