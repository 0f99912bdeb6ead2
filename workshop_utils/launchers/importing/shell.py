"""Shell files and command lines that start training: sbatch, srun, torchrun, mpirun, horovodrun, accelerate, python."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from workshop_utils.jobs import JobError, Resources
from workshop_utils.jobs.imports import imported, packages
from workshop_utils.jobs.quantities import bytes_of
from workshop_utils.launchers.importing.imported import PLACE, TABLES, UNKNOWN, WORDS, Imported
from workshop_utils.launchers.output import SECRET
from workshop_utils.strategies import STRATEGY_OF

COMMANDS: dict[str, dict[str, Any]] = TABLES["commands"]
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
KNOWN = "python, torchrun, mpirun, horovodrun, accelerate or srun"
SEPARATORS = ";|&()\n"
OUR_START = "workshop_utils/start.py"  # fills in words on the way to the script
# How workers meet, and on which machine, socket and core they run.
PLACING = re.compile("rdzv|master|process|machine|rank|host|standalone|bind|map-by|mca|network|iface|gpu-ids")
# What is no command, or only running it would tell, and what stands for it before a text is split into words.
WITHOUT_WORDS: dict[re.Pattern[str], Callable[[re.Match[str]], str]] = {
    re.compile(r"<<-?\s*['\"]?(\w+)(?s:.*?)\n\1$", re.MULTILINE): lambda _: "",  # what a command is fed
    re.compile(r"(?:^|(?<=\s))#(?!SBATCH).*", re.MULTILINE): lambda _: "",
    re.compile(r"\s[012&]?[<>]+(&\d|\s*\S+)"): lambda _: "",
    re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"): lambda _: UNKNOWN,
    re.compile(r"(\w=)\(([^()]*)\)"): lambda found: f"{found[1]}'{re.sub(QUOTE, '', found[2])}'",  # a list
    re.compile(r"(?:.*\\\n)+.*"): lambda found: found[0].replace("\\\n", " "),
}
QUOTE = "[\"']"
_ANY = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
# $NAME or ${NAME}, also of a list, with a default or not; anything else that a shell works out.
VARIABLE = re.compile(rf"\$(\{{)?(\w+|[@*])(?(1)(?:\[[@*]\])?(?::?[-=]({_ANY}))?\}})|\$(?:\{{{_ANY}\}}|[?$])")
EXPANDED = re.compile(r"(?:^|=)~|\*|\{[^{}\s'\"]+(?:,|\.\.)[^{}\s'\"]+\}")  # what a shell replaces by names


def read(text: str, result: Imported, where: str = "", nodes: int = 0, strategy: str | None = None) -> None:
    """Note in `result` what the shell's `text` starts.

    Args:
        where: its place in a file of another kind.
        nodes, strategy: as in `settle`.

    Raises:
        JobError: if that is no training, or more than one.
    """
    starts = list(_starts(text, result, where, text))
    starts = [each for each in starts if {"strategy", "srun"} & each[2].keys()] or starts
    if len(starts) != 1:
        places = " and ".join(place for place, *_ in starts)
        held = f"{len(starts)} jobs, in {places}" if starts else "no training"
        raise JobError(f"{result.file}: it starts {held}; it must start one, by {KNOWN}")
    ((place, words, result.says),) = starts
    for word in filter(EXPANDED.search, words):
        result.note(f"{place}: {word}", "kept as it is written: no shell replaces it here")
    take_command(words, result, place)
    settle(result, place, nodes, strategy)


def _starts(
    text: str, result: Imported, where: str, whole: str
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """The commands of `text` that start Python's scripts: place, words, what has been said of the workers before."""
    variables = WORDS | result.job.get("environment", {})

    def of_variable(found: re.Match[str]) -> str:
        known = variables.get(found[2] or "", UNKNOWN)
        return VARIABLE.sub(of_variable, found[3]) if found[3] and known in ("", UNKNOWN) else known

    for line, raw in _commands(text, result):
        place = f"{where}: line {line}".removeprefix(": ")
        words: list[str] = []
        for word in raw:
            if re.fullmatch(r"[\"']?\$\{?[@*]\}?[\"']?", word):
                result.note(f"{place}: {word}", "dropped: give the script's further arguments after --")
            value = VARIABLE.sub(of_variable, word)
            is_several = VARIABLE.fullmatch(word) and not re.fullmatch("-[a-z]*c", "".join(words[-1:]))
            words += re.sub(QUOTE, "", value).split() if is_several else [value]
        if not words:  # but variables without a value
            continue
        trial = Imported(result.file, result.folder, result.target, says=dict(result.says))
        assigned = [found for found in map(ASSIGNMENT.fullmatch, words) if found]
        if words[0] == "#SBATCH":
            _take_options(place, words[1:], result, variables)
        elif words[0] in ("export", "declare", "local", "readonly") or len(assigned) == len(words):
            for name, value in (found.groups() for found in assigned):
                if UNKNOWN not in value or "{" not in variables.get(name, ""):
                    variables[name] = UNKNOWN if SECRET.search(name) else value
                if words[0] == "export" and (
                    PLACE.fullmatch(name) or not re.search(rf"\${{?{name}\b", whole)
                ):
                    result.take_variable(f"{place}: {name}", name, value)
                elif words[0] == "export":
                    result.note(f"{place}: {name}", "not in environment, since the file itself uses it")
        elif words[0] in TABLES["sets_up"] and result.target == "slurm":
            result.place.setdefault("setup", []).append(shlex.join(raw).replace("'", ""))
            if "activate" in str(words):
                result.note(f"{place}: {words[0]}", "in setup: name its Python in place.yaml, too, as python")
        elif code := take_command(list(words), trial, place):
            outer, result.says = result.says, trial.says
            yield from _starts(code, result, place, whole)
            result.says = outer
        elif "script" in trial.job or trial.job.get("module", "pip").partition(".")[0] not in TABLES["tools"]:
            yield place, words, trial.says
        elif words[0] == "cd" and (result.folder / words[-1]).is_dir():
            result.folders.append(words[-1])
            result.note(f"{place}: cd", f"changed: the job runs in its own folder, not in {words[-1]}")
        else:
            what = "changed: what it repeats is run once" if words[0] in TABLES["loops"] else "dropped"
            result.note(f"{place}: {words[0].partition('=')[0]}", what)


def _commands(text: str, result: Imported) -> Iterator[tuple[int, list[str]]]:
    """The commands of `text` in words, as they are written, with the number of the line."""
    for pattern, instead in WITHOUT_WORDS.items():
        text = pattern.sub(partial(_in_as_many_lines, instead), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters, line = " \t\r", True, "", 1
    try:
        for is_separator, words in groupby(lexer, lambda word: word != "" and not set(word) - {*SEPARATORS}):
            command = list(words)
            line, start = line + sum(word.count("\n") for word in command), line
            while command and command[0] in TABLES["keywords"]:
                del command[0]
            if command and not is_separator:
                yield start, command
    except ValueError:
        raise JobError(f"{result.file}: a quotation is not closed, from line {line} on") from None


def _in_as_many_lines(instead: Callable[[re.Match[str]], str], found: re.Match[str]) -> str:
    text = instead(found)
    return text + "\n" * (found[0].count("\n") - text.count("\n"))


def _take_options(place: str, words: list[str], result: Imported, variables: dict[str, str]) -> None:
    """Take options of sbatch; those that are no field of a job go to place.yaml."""
    result.target = "slurm"
    for name, value in options_of(words, COMMANDS["sbatch"]):
        option = f"-{name} {value}" if len(name) == 1 else f"--{name}={value}" if value else f"--{name}"
        field = COMMANDS["sbatch"]["fields"].get(name, "")
        if why := next((why for why, names in TABLES["not_taken"].items() if name in names), ""):
            result.note(f"{place}: {option.split('=')[0]}", f"dropped, since {why}")
        elif not field or value == "0" or re.search(r"(^|:)(?!gpu)[a-z]\w*:\d", value):  # a model of GPU
            result.place.setdefault("options", []).append(option.strip())
        variables |= dict.fromkeys(TABLES["slurm"].get(field, ()), value)
        result.says |= {field: _as_ours(field, value)} if field else {}


def _as_ours(field: str, text: str) -> str:
    """What an option of Slurm's says, in our own spelling of times, in seconds, and of sizes."""
    if field.startswith("memory"):
        found = re.fullmatch("([1-9].*?)([KMGT]?)B?", text.upper())
        return f"{found[1]}{found[2] or 'M'}i" if found else ""
    if field != "time":
        return text
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":") if part.isdecimal()]
    hours, minutes, seconds = ([*parts, 0, 0, 0] if dash or len(parts) == 3 else [0, *parts, 0, 0])[:3]
    return str(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def options_of(words: list[str], program: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Take from `words` the options with which they begin: names, with "-" for "_", and values."""
    options: list[tuple[str, str]] = []
    flags, pairs, name = program.get("flags", ()), program.get("pairs", ()), ""
    while words and re.match("-+[^-]", words[0]) and name not in program.get("last", ()):
        word = re.sub(r"^(-[A-Za-z])(?=\d)", r"\1=", words.pop(0))
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        count = 0 if equals or name in flags else 2 if name in pairs else 1
        options.append((name, value or "=".join(words[:count])))
        del words[:count]
    del words[: int(words[:1] == ["--"])]
    return options


def take_command(words: list[str], result: Imported, where: str) -> str:
    """Note in `result` what `words` start: a script or module, its arguments, and what options say of its workers.

    Returns:
        the text that a shell in them runs, or "".
    """
    while words:
        name = re.sub(r"^python[\d.]*$", "python", PurePosixPath(words[0]).name)
        if words[0] == UNKNOWN:
            words = words[1:]
        elif assigned := ASSIGNMENT.fullmatch(words[0]):
            result.take_variable(f"{where}: {assigned[1]}", assigned[1], assigned[2])
            words = words[1:]
        elif name in ("sh", "bash") and re.fullmatch("-[a-z]*c", "".join(words[1:2])):
            return "".join(words[2:3])
        elif name in COMMANDS:
            words = _inside(name, words[1:], result, where)
        else:
            break
    return ""


def _inside(name: str, words: list[str], result: Imported, where: str) -> list[str]:
    """Note what a program's options say, and its script; the command that it starts, if that is none."""
    program, says = COMMANDS[name], result.says
    is_inside = result.target == "slurm" and "script" in program
    if program.get("says", {}).get("strategy") == "torch_ddp" and "pods" not in says:  # one on each node
        if "srun" in says and "strategy" not in says and says.get("tasks", "").isdecimal():
            each = re.sub(r"\D", "", says.get("per_node", "")) or 1
            says.setdefault("nodes", str(int(says["tasks"]) // int(each)))
        says |= {"tasks": "", "per_node": ""}
    says |= program.get("says", {})
    del words[: int(words[:1] == [program.get("verb")])]
    for option, value in options_of(words, program):
        field = program.get("fields", {}).get(option)
        if field == "variable" and (assigned := ASSIGNMENT.fullmatch(value)):
            result.take_variable(f"{where}: {assigned[1]}", assigned[1], assigned[2])
        elif field == "nodes" and is_inside and not value.isdecimal():
            result.note(f"{where}: {name} {option} {value}", f"changed: Slurm gives {says.get('nodes') or 1}")
        elif field:
            says[field] = _as_ours(field, value)
        elif PLACING.search(option):
            result.note(f"{where}: {name} {option}", "dropped, since the launcher sees to it")
        elif option not in program.get("flags", ()):
            result.note(f"{where}: {name} {option}")
    del words[: program.get("skips", 0)]
    if says.get("module") == "":  # after a flag the name stands where a script would
        says["module"] = "".join(words[:1])
        del words[:1]
    module = says.pop("module", None)
    if name == "python" and (module in COMMANDS or module == "mpi4py"):
        return [module.replace("mpi4py", "mpi4py.run"), *words]
    if not program.get("script") or "no-python" in says or "code" in says:
        return [] if "code" in says else words
    is_start = "".join(words[:1]).endswith(OUR_START)
    if is_start or words[:1] == ["-m"]:  # which Python runs, in either case
        return ["python", *words[is_start:]]
    if module:
        result.job["module"] = module
    elif words:
        result.take_script(words.pop(0))
    result.take_arguments(where, words)
    return []


def settle(result: Imported, where: str, nodes: int = 0, strategy: str | None = None) -> None:
    """Turn what has been said of the workers into strategy, workers and resources.

    Args:
        nodes: how many machines there are, if something else than the command says so.
        strategy: where no program of the command has one.
    """
    says, job = result.says, result.job
    strategy = says.get("strategy", strategy)
    if most := re.fullmatch(r"\d+[:-](\d+)", says.get("nodes", "")):
        result.note(where, f"of {most[0]} nodes, {most[1]} are taken: say in job.yaml how many there are")
        says["nodes"] = most[1]
    if UNKNOWN in says.get("nodes", "") and not nodes:
        result.note(where, "how many nodes there are is computed: 1 is taken")
    count = {name: int(text) for name, text in says.items() if re.fullmatch(r"[1-9]\d*", text)}
    tasks = count.get("tasks", 1)
    nodes = nodes or count.get("nodes") or max(1, tasks // count.get("per_node", tasks))
    on_node = count.get("per_node") or max(1, tasks // nodes)
    # Torchrun and its like are Slurm's tasks, one on each node, and start the workers.
    has_agents = strategy == "torch_ddp"
    last = re.search(r"(?:^|:)(\d+)$", says.get("gpus_node", ""))
    gpus = count.get("gpus_task", 0) * (1 if has_agents else on_node) or count.get("gpus", 0) // nodes
    gpus = int(last[1]) if last else gpus
    unread = says.get("tasks") or says.get("per_node")
    if unread and not {"tasks", "per_node"} & count.keys():
        on_node = gpus or 1  # what torchrun's "gpu" means
        result.note(
            where, f"the workers on a node are {unread.replace(UNKNOWN, 'computed')}: {on_node} are taken"
        )
    total = count.get("tasks", nodes * on_node)
    if strategy is None and "srun" not in says:
        if nodes > 1 and "pods" in says:
            result.note(where, f"changed: {nodes} pods, which nothing joins, are one worker")
        total = nodes = on_node = 1  # Python alone runs once, however much is reserved for it
    uses = packages(imported(result.folder / job.get("script", "")))
    if strategy is None and total > 1:
        strategy = next((name for module, name in STRATEGY_OF.items() if module in uses), "torch_ddp")
        result.note(where, f"nothing says how the workers co-operate; strategy {strategy} is a guess")
    about = f"{uses} {result.place.get('image')} {job.get('arguments')}"
    if strategy == "mpi" and "horovod" in about and "mpi4py" not in says:
        strategy = "horovod"
    job["strategy"] = "horovod_elastic" if "elastic" in says else strategy or "single"
    is_one = total != nodes * on_node or on_node == 1 or (nodes == 1 and result.target is None)
    job |= {"workers": total} if is_one else {"nodes": nodes, "processes_per_node": on_node}
    cpus = float(says.get("cpus_node", 0)) / on_node or count.get("cpus", 0) / (on_node if has_agents else 1)
    memory = says.get("memory", "")
    with contextlib.suppress(ValueError):  # the check of job.yaml says what is wrong
        if per_cpu := says.get("memory_cpu"):
            memory = size(int(bytes_of(per_cpu) * (cpus or 1)))
        elif on_node > 1:
            memory = size(bytes_of(memory) // on_node)
    amounts = {"cpu": int(cpus) if cpus == int(cpus) else cpus, "memory": memory, "gpu": -(-gpus // on_node)}
    usual = dict(Resources())
    for name in {"kubernetes": ("cpu", "memory"), "slurm": ("memory",)}.get(result.target or "", ()):
        if not amounts[name] and "--mem" not in str(result.place.get("options")):
            result.note(f"resources.{name}", f"{usual[name]} for each worker, since the file asks for none")
    job["resources"] = {name: each for name, each in amounts.items() if each and each != usual[name]}


def size(nbytes: int) -> str:
    """`nbytes` in the largest unit that says it in a whole number."""
    power, unit = next(each for each in ((30, "Gi"), (20, "Mi"), (0, "")) if nbytes % 2 ** each[0] == 0)
    return f"{nbytes >> power}{unit}"
