"""Shell files and command lines that start training: sbatch, srun, torchrun, mpirun, horovodrun, accelerate, python."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from workshop_utils.jobs import JobError, Resources
from workshop_utils.jobs.imports import imported, packages
from workshop_utils.jobs.quantities import bytes_of
from workshop_utils.launchers.importing.imported import (
    TABLES,
    UNKNOWN,
    WORDS,
    Imported,
    has_secret,
    refuse_template,
)
from workshop_utils.launchers.output import SECRET
from workshop_utils.strategies import STRATEGY_OF

COMMANDS: dict[str, dict[str, Any]] = TABLES["commands"]
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
KNOWN = "python, torchrun, mpirun, horovodrun, accelerate or srun"
SEPARATORS = ";|&()\n"
# How workers meet, and on which machine, socket and core they run.
PLACING = re.compile("rdzv|master|process|machine|rank|host|standalone|bind|map-by|mca|network|iface|gpu-ids")
# Stand-ins for what a shell would take for its own, were it not in quotes; and marks, which take no room in a word:
# of quotes, before an item of a list, and for a line that has gone.
STAND_INS = {ord(sign): 0xE000 + ord(sign) for sign in " \t\n<>()|;&#`$\\'\"*~{}"}
QUOTED, ITEM, GONE = "\uf000", "\uf001", "\uf002"
AS_MEANT: dict[int, str | None] = {
    stand_in: chr(sign) for sign, stand_in in STAND_INS.items()
} | dict.fromkeys(map(ord, QUOTED + GONE))
AS_MEANT[ord(ITEM)] = " "
ESCAPED = AS_MEANT | {stand_in: f"\\{sign}" for stand_in, sign in AS_MEANT.items() if stand_in < ord(QUOTED)}
IN_NAMES = {sign: stand_in for sign, stand_in in STAND_INS.items() if chr(sign) not in "${}*"}
SPACE = chr(STAND_INS[ord(" ")])
SPACES = {STAND_INS[ord(sign)]: " " for sign in " \t\n"}
# How many branches deeper a word leads, and what ends a line, in a text with stand-ins.
BRANCHES = {"if": 1, "fi": -1, "case": 1, "esac": -1}
LINE = re.compile(f"[\n{GONE}{chr(STAND_INS[10])}]")
_PART = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^()'"\\]"""
_INNER = rf"\((?s:{_PART}|\((?:{_PART}|\((?:{_PART})*+\))*+\))*+\)"
_COMPUTED = rf"\${_INNER}|`[^`]*`"
_ANY = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
# What eval is given where it sets up an environment, such as "$(conda shell.bash hook)".
_HOOK = rf"""\$\((?:[^()\s"]*/)?(?:{"|".join(map(re.escape, TABLES["sets_up"]))})\s[^()"\n]*\)"""
_HOOK = rf'"{_HOOK}"|{_HOOK}'
# What is no command, or only running it would tell, and what is quoted.
SHELL = re.compile(
    r"(?P<nothing>(?<!<)<<-?\s*['\"]?(\w+)(?s:.*?)\n\t*\2$|(?<![^\s;&|()])#(?!(?<=^#)SBATCH\b).*)"
    rf"|(?<=\beval )(?P<hook>{_HOOK})"
    rf"|(?P<computed>{_COMPUTED}|[<>]{_INNER}|\$'(?:[^'\\]|\\.)*')|\\(?P<escaped>(?s:.))|'(?P<quoted>[^']*)'"
    rf'|"(?P<double>(?:{_COMPUTED}|\$\{{{_ANY}\}}|\\(?s:.)|[^"\\])*+)"'
    r"""|(?<=^#SBATCH)(?P<options>(?:'[^'\n]*'|"(?:\\.|[^"\\\n])*"|\\.|(?<!\s)#|[^#'"\\\n])+)""",
    re.MULTILINE,
)
IN_DOUBLE_QUOTES = re.compile(
    rf"(?P<computed>{_COMPUTED})|(?P<variable>\$(?:\{{{_ANY}\}}|\w+|[@*#?]))"
    r"|\\(?P<escaped>[\"\\$`\n])|(?P<quoted>[^\\$`]+|[\\$`])"
)
REDIRECTED = re.compile(r"(?:(?<=\s)[012&])?[<>]+(?:&[\d-]|\s*[^\s;|&()]+)")
LIST = re.compile(r"(?<=\w=)\(([^()]*)\)|(?<=\w\+=)\(([^()]*)\)")
# $NAME or ${NAME}, also of a list, with a default or not; anything else that a shell works out.
VARIABLE = re.compile(
    rf"\$(\{{)?(\w+|[@*])(?(1)(?:\[[@*]\])?(?::?[-=]({_ANY}))?\}})|\$(?:\{{{_ANY}\}}|\{{.*|[?$])"
)
MODEL = re.compile(r"(^|[:,])(?!gpu)[a-z]\w*:\d")  # of a GPU, or another resource
AMOUNT = re.compile("[cg]pus|memory|per_gpu|time|name")  # of which a field without a number says nothing
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|-1|UNLIMITED|INFINITE|")
DAY = "86400"
USUAL = re.compile("HOME|USER|SLURM_.*")  # variables that a batch script always has
EXPANDED = re.compile(r"(?:^|=)~|\*|\{[^{}\s'\"]+(?:,|\.\.)[^{}\s'\"]+\}")  # what a shell replaces by names


def read(text: str, result: Imported, where: str = "", nodes: int = 0, strategy: str | None = None) -> None:
    """Note in `result` what the shell's `text` starts.

    Args:
        where: its place in a file of another kind.
        nodes, strategy: as in `settle`.

    Raises:
        JobError: if that is no training, or more than one.
    """
    shell = _Shell(result, where)
    starts = list(shell.starts(text))
    main = [each for each in starts if {"strategy", "srun"} & each.says.keys()] or starts
    if len(main) != 1:
        held = f"{len(main)} jobs, in {' and '.join(each.place for each in main)}" if main else "no training"
        unknown = f"; unknown: {', '.join(shell.unknown[-3:])}" if shell.unknown and not main else ""
        raise JobError(f"{result.file}: it starts {held}; it must start one, by {KNOWN}{unknown}")
    (start,) = main
    if other := re.search(r"^#(PBS|BSUB)\b", text, re.MULTILINE):
        line = text.count("\n", 0, other.start()) + 1
        what = "options of PBS and LSF are not read: say in job.yaml and place.yaml what they ask for"
        result.note(f"{where}: line {line}: {other[0]}".removeprefix(": "), what)
    place, words, result.says = start.place, start.words, start.says
    for index, each in enumerate(starts):
        if each is not start:
            when = "before" if index < starts.index(start) else "afterwards"
            why = f"dropped, since {place} starts the workers: run it {when}"
            result.note(f"{each.place}: python {each.script}", why)
    for before, word in pairwise(["", *words]):
        if EXPANDED.search(word) and not has_secret(as_meant(f"{before} {word}")):
            result.note(f"{place}: {as_meant(word)}", "kept as it is written: no shell replaces it here")
    if start.environment:
        result.job["environment"] = start.environment
    take_command(list(map(as_meant, words)), result, place)
    settle(result, place, nodes, strategy)


class Start(NamedTuple):
    """A command that starts a script or module: its words, with stand-ins, and what is said of the workers.

    Attributes:
        environment: the variables there, if the command is inside another.
    """

    place: str
    words: list[str]
    says: dict[str, str]
    script: str
    environment: Mapping[str, str] = {}


class _Shell:
    """A shell that starts nothing, and notes in `result` what it reads.

    Attributes:
        branched: the variables whose values depend on a condition; `used` are those in the current command.
        unknown: programs that are not known.
    """

    def __init__(self, result: Imported, where: str, unknown: list[str] | None = None) -> None:
        self.result, self.where, self.has_begun = result, where, False
        known = result.job.get("environment", {})
        self.variables = WORDS | {name: value.translate(STAND_INS) for name, value in known.items()}
        self.branched: set[str] = set()
        self.used: set[str] = set()
        self.unknown = [] if unknown is None else unknown

    def starts(self, text: str) -> Iterator[Start]:
        """The commands of `text` that start Python's scripts."""
        for line, raw, is_branch in _commands(text, self.result):
            place = f"{self.where}: line {line}".removeprefix(": ")
            self.used.clear()
            words = [each for word in raw for each in self.words(word, place)]
            name = "".join(words[:1])
            if name == "#SBATCH":
                self.take_options(place, list(map(as_meant, words)))
            elif name in ("export", "declare", "local", "readonly") or all(map(ASSIGNMENT.fullmatch, words)):
                self.assign(place, words, is_branch)
            else:
                yield from self.command(place, raw, words)
            self.has_begun |= name != "#SBATCH"

    def words(self, word: str, place: str) -> list[str]:
        """The words that `word` becomes: several, if it holds a variable that is not quoted, or all of a list."""
        if re.fullmatch(rf"{QUOTED}*\$\{{?[@*]\}}?", word):
            self.result.note(
                f"{place}: {as_meant(word)}", "dropped: give the script's further arguments after --"
            )
            return []
        is_assigned = ASSIGNMENT.fullmatch(word)
        value = self.expanded(word, bool(is_assigned) and ITEM not in word)
        if is_assigned:
            return [value.replace(" ", ITEM if ITEM in value else SPACE)]
        is_empty = "[@]" in word and not value.strip(QUOTED)
        return [] if is_empty else list(filter(None, value.split(" ")))

    def expanded(self, text: str, is_quoted: bool = False) -> str:
        """`text` with the values of variables, which have spaces where a shell splits them."""

        def value_of(found: re.Match[str]) -> str:
            quoted = is_quoted or found.string[: found.start()].endswith(QUOTED)
            value = self.variables.get(found[2] or "", UNKNOWN)
            self.used |= self.branched & {found[2]}
            if found[3] and value in ("", UNKNOWN):
                return self.expanded(found[3], quoted)
            if value.startswith(ITEM):
                items = [*filter(None, value.split(ITEM))][: None if re.search(r"\[[@*]", found[0]) else 1]
                value = (SPACE if quoted and "[*]" in found[0] else " ").join(items)
            elif not quoted:  # what is left of quotes in it is no empty word
                value = value.replace(QUOTED, "")
            return value if quoted else value.translate(SPACES)

        return VARIABLE.sub(value_of, text)

    def command(self, place: str, raw: list[str], words: list[str]) -> Iterator[Start]:
        """Take what one command says; it, if it starts a script."""
        result, meant, rest = self.result, list(map(as_meant, words)), list(map(as_meant, words))
        name = meant[0]
        _refuse_template(result, place, meant[:1])
        job = {"environment": dict(result.job.get("environment", {}))}
        trial = replace(result, job=job, says=dict(result.says), notes=[])
        is_hook = name == "eval" and re.fullmatch(_HOOK, as_meant("".join(raw[1:])))
        is_setup = is_hook or (name in TABLES["sets_up"] and meant[1:2] != ["run"])
        if is_setup and result.target == "slurm":
            self.say_branches(place)
            self.set_up(f"{place}: {name}", raw)
        elif code := take_command(rest, trial, place):
            self.say_branches(place)
            for start in _Shell(trial, place, self.unknown).starts(code):
                yield start._replace(environment={**job["environment"], **start.environment})
            result.notes += [note for note in trial.notes if note not in result.notes]
            if name == "eval" and job["environment"]:
                result.job["environment"] = job["environment"]
        elif "script" in trial.job or trial.job.get("module", "pip").partition(".")[0] not in TABLES["tools"]:
            _refuse_template(result, place, meant)
            self.say_branches(place)
            script = trial.job.get("script", f"-m {trial.job.get('module')}")
            yield Start(place, words, trial.says, script)
        elif name == "cd" and (result.folder / meant[-1]).is_dir():
            result.folders.append(meant[-1])
            result.note(f"{place}: cd", f"changed: the job runs in its own folder, not in {meant[-1]}")
        else:
            self.drop(place, name.partition("=")[0], rest)

    def drop(self, place: str, program: str, rest: list[str]) -> None:
        """Note that a command starts nothing; `rest` begins with the program that is not known."""
        what = "changed: what it repeats is run once" if program in TABLES["loops"] else "dropped"
        self.result.note(f"{place}: {program}", what)
        if rest[:1] in (["sh"], ["bash"]):
            rest = [word for word in rest[1:] if not word.startswith("-")]
        inner = (rest or [program])[0]
        if inner not in TABLES["idle"] and re.fullmatch(r"[\w./+-]+", inner):
            self.unknown.append(f"{inner} in {place}")

    def say_branches(self, place: str) -> None:
        """Name the variables of this command that a condition sets."""
        for name in sorted(self.used):
            if UNKNOWN not in (value := as_meant(self.variables[name])):
                shown = "…" if has_secret(value) else value.strip() or "empty"
                what = f"changed: it is set in a branch, and the last value, {shown}, is taken"
                self.result.note(f"{place}: {name}", what)

    def take_options(self, place: str, words: list[str]) -> None:
        """Take a line of sbatch's options; those that are no field of a job go to place.yaml."""
        _refuse_template(self.result, place, words)
        if self.has_begun:
            self.result.note(f"{place}: #SBATCH", "dropped, since Slurm reads none after the first command")
            return
        self.result.target = "slurm"
        for name, value in options_of(words[1:], COMMANDS["sbatch"]):
            dashes, joined = ("-", " ") if len(name) == 1 else ("--", "=")
            where, option = f"{place}: {dashes}{name}", f"{dashes}{name}"
            field = COMMANDS["sbatch"]["fields"].get(name, "")
            if field == "variables":
                _take_exported(place, value, self.result)
            elif why := next((why for why, names in TABLES["not_taken"].items() if name in names), ""):
                self.result.note(where, f"dropped, since {why}")
            elif not field or value == "0" or MODEL.search(value):
                self.keep(where, "options", f"{option}{joined}{shlex.quote(value)}" if value else option)
            if field not in ("", "variables"):
                _take_field(name, field, value, self.result, where)
                ours = self.result.says.get(field, "").translate(STAND_INS)
                self.variables |= dict.fromkeys(TABLES["slurm"].get(field, ()), ours)

    def keep(self, where: str, name: str, line: str) -> None:
        """Keep a line for a field of place.yaml."""
        if UNKNOWN in line:
            self.result.note(where, f"not read, since it is computed: add it to {name} in place.yaml")
        elif has_secret(line):
            self.result.note(where, f"left out of {name} in place.yaml, since it may be a secret")
        else:
            self.result.place.setdefault(name, []).append(line)

    def set_up(self, where: str, raw: list[str]) -> None:
        """Take a line for place.yaml's setup, with the values of the file's own variables."""
        own = {name: value for name, value in self.variables.items() if WORDS.get(name) != value}
        not_set: list[str] = []

        def value_of(found: re.Match[str]) -> str:
            if found[2] and not (found[3] or found[2] in self.variables or USUAL.fullmatch(found[2])):
                not_set.append(found[0])
            return own.get(found[2], found[0])

        def quoted(word: str) -> str:
            if raw[0] == "eval":
                return as_meant(word)
            is_live = re.search("^~|[$*]", word)
            return word.translate(ESCAPED) if is_live else shlex.quote(as_meant(word))

        line = " ".join(quoted(VARIABLE.sub(value_of, word)) for word in raw)
        self.keep(where, "setup", line)
        for name in not_set:
            self.result.note(f"{where} {name}", "in setup as it is written, though the file does not set it")
        if "activate" in line:
            self.result.note(where, "in setup: name its Python in place.yaml, too, as python")

    def assign(self, place: str, words: list[str], is_branch: bool) -> None:
        """Take the variables that a command sets; those that it exports are the script's, too."""
        _refuse_template(self.result, place, list(map(as_meant, words)))
        is_exported = words[:1] == ["export"] or words[:2] == ["declare", "-x"]
        is_branch |= bool(self.used)
        for word in words:
            if found := ASSIGNMENT.fullmatch(word.lstrip(QUOTED)):
                name, sign, value = found.groups()
                value = self.variables.get(name, "") + value if sign == "+=" else value
                if UNKNOWN not in value or "{" not in self.variables.get(name, ""):
                    self.variables[name] = UNKNOWN if SECRET.search(name) else value
                self.branched = self.branched | {name} if is_branch else self.branched - {name}
            elif is_exported and word in self.variables:
                name, value = word, self.variables[word]
            else:
                continue
            if is_exported:
                self.result.take_variable(f"{place}: {name}", name, as_meant(value))
                self.used = self.branched & {name}
                self.say_branches(place)


def as_meant(text: str) -> str:
    """`text` with what the stand-ins stand for."""
    return text.translate(AS_MEANT)


def _refuse_template(result: Imported, place: str, words: list[str]) -> None:
    if template := re.search(r"\{\{|\{%", " ".join(words)):
        refuse_template(f"{result.file}, {place}", template[0])


def _commands(text: str, result: Imported) -> Iterator[tuple[int, list[str], bool]]:
    """The commands of `text`: number of the line, words with stand-ins, whether a condition decides about it."""
    text = SHELL.sub(_stand_in, text)
    text = LIST.sub(_items, REDIRECTED.sub("", text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters, line = " \t\r", True, "", 1
    depth, before, name = 0, "", ""
    try:
        for is_separator, words in groupby(lexer, lambda word: word != "" and not set(word) - {*SEPARATORS}):
            text = " ".join(words)
            line, start = line + len(LINE.findall(text)), line
            if is_separator:
                before = text
                continue
            command = [*filter(None, text.replace(GONE, "").split(" "))]
            while command and command[0] in TABLES["keywords"]:
                depth += BRANCHES.get(command.pop(0), 0)
            is_branch = depth > 0 or "||" in before or ("&&" in before and name in ("[", "[[", "test"))
            name = "".join(command[:1])
            depth += BRANCHES.get(name, 0)
            if command:
                yield start, command, is_branch
    except ValueError:
        raise JobError(f"{result.file}: a quotation is not closed, from line {line} on") from None


def _stand_in(found: re.Match[str]) -> str:
    """What stands for a quotation, a comment, text that a command is fed, or what is computed."""
    kind, text = found.lastgroup or "", found[found.lastgroup or 0]
    if kind == "nothing":
        return "\n" * text.count("\n")
    if kind == "computed":
        return UNKNOWN + GONE * text.count("\n")
    if kind == "double":
        return QUOTED + IN_DOUBLE_QUOTES.sub(_stand_in, text)
    if kind == "escaped" and text == "\n":
        return GONE
    if kind == "variable":
        return QUOTED + re.sub(_COMPUTED, UNKNOWN, text).replace('"', "").translate(IN_NAMES)
    if kind == "hook":
        return QUOTED + text.translate(IN_NAMES)
    if kind == "options":  # of Slurm's, which knows words and quotes alone
        words = shlex.split(re.sub(_COMPUTED, UNKNOWN, text))
        return " ".join(["", *(QUOTED + word.translate(IN_NAMES) for word in words)])
    return QUOTED + text.translate(STAND_INS)


def _items(found: re.Match[str]) -> str:
    """A list as one word."""
    return ITEM + re.sub(r"\s+", lambda space: ITEM + GONE * space[0].count("\n"), found[1] or found[2] or "")


def _take_exported(where: str, value: str, result: Imported) -> None:
    """Take what `--export` of Slurm's gives to the script."""
    for each in value.split(","):
        if assigned := ASSIGNMENT.fullmatch(each):
            result.take_variable(f"{where}: {assigned[1]}", assigned[1], assigned[3])
        else:
            result.note(f"{where}: --export {each}", "dropped, since our script says it")


def _take_field(option: str, field: str, value: str, result: Imported, where: str) -> None:
    """Take what an option says of the workers, unless it is computed or cannot be read."""
    said = result.says.get(field, "")
    if UNKNOWN in value and (AMOUNT.match(field) or (said and UNKNOWN not in said)):
        result.note(where, "not read, since it is computed")
    elif field == "time" and not TIME.fullmatch(value.upper()):
        result.says[field] = said = said or DAY
        result.note(where, f"{value} cannot be read as a time of Slurm: {int(said) // 60} min are taken")
    else:
        result.says[field] = _as_ours(option, field, value)


def _as_ours(name: str, field: str, text: str) -> str:
    """What an option of Slurm's says, in our own spelling of times, in seconds, of sizes, and numbers of GPUs."""
    if name == "include":  # of deepspeed's
        return str(1 + text.count(","))
    if field.startswith("gpus"):
        gpus = [each for each in text.split(",") if each and (name != "gres" or each.startswith("gpu"))]
        numbers = [re.search(r"(?:^|:)(\d+)(?:\(.*)?$", each) for each in gpus]
        return text if UNKNOWN in text else str(sum(int(each[1]) if each else 1 for each in numbers))
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
    flags, pairs, name = (
        {*program.get("flags", ()), *program.get("more_flags", ())},
        program.get("pairs", ()),
        "",
    )
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
        the text that a shell in them runs, or ""; then a program that is not known is left as the first of `words`.
    """
    while words:
        name = re.sub(r"^python[\d.]*$", "python", PurePosixPath(words[0]).name)
        if words[0] == UNKNOWN:
            del words[0]
        elif assigned := ASSIGNMENT.fullmatch(words[0]):
            result.take_variable(f"{where}: {assigned[1]}", assigned[1], assigned[3])
            del words[0]
        elif name in ("sh", "bash") and re.fullmatch("-[a-z]*c", "".join(words[1:2])):
            return "".join(words[2:3])
        elif name == "eval":
            return " ".join(words[1:])
        elif name.endswith(".py"):
            words.insert(0, "python")
        elif name in COMMANDS:
            words[:] = _inside(name, words[1:], result, where)
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
        says |= {"tasks": "", "per_node": "", "per_gpu": ""}
    says |= program.get("says", {})
    del words[: int("".join(words[:1]) in program.get("verbs", ()))]
    for option, value in options_of(words, program):
        if program.get("fields", {}).get(option) == "nodes" and is_inside and not value.isdecimal():
            result.note(f"{where}: {name} {option} {value}", f"changed: Slurm gives {says.get('nodes') or 1}")
        else:
            _take_option(name, option, value, result, where)
    for word in words[: program.get("skips", 0)]:
        what = f"changed: runs in the host's Python, not in {word}" if program.get("image") else "dropped"
        result.note(f"{where}: {name} {words.pop(0)}", what)
    if says.get("module") == "":  # after a flag the name stands where a script would
        says["module"] = "".join(words[:1])
        del words[:1]
    module = says.pop("module", None)
    if name == "python" and (module in COMMANDS or module == "mpi4py"):
        return [module.replace("mpi4py", "mpi4py.run"), *words]
    if not program.get("script") or "no-python" in says or "code" in says or words[:1] == ["-"]:
        return [] if "code" in says or words[:1] == ["-"] else words
    if module:
        result.job["module"] = module
    elif words:
        result.take_script(words.pop(0), where)
    if (added := program.get("adds")) and "adds-nothing" not in says:
        words = [added, *words]
        result.note(f"{where}: {name}", f"changed: the script is given {added}, as {name} does")
    result.take_arguments(where, words)
    return []


def _take_option(name: str, option: str, value: str, result: Imported, where: str) -> None:
    """Note what an option of a program says, or that it is dropped."""
    program = COMMANDS[name]
    field = program.get("fields", {}).get(option)
    if option == "include" and not re.fullmatch(r"[\w.-]+:\d+(,\d+)*", value):
        field = None  # GPUs of several hosts, or all but some
    if variable := program.get("sets", {}).get(option):
        result.note(f"{where}: {name} {option}", f"changed: {variable} in environment says it")
        result.take_variable(f"{where}: {variable}", variable, value)
    elif option in program.get("changes", ()):
        result.note(f"{where}: {name} {option}", "dropped: the script trains without what it asks for")
    elif field == "variable" and (assigned := ASSIGNMENT.fullmatch(value)):
        result.take_variable(f"{where}: {assigned[1]}", assigned[1], assigned[3])
    elif field == "variables":
        _take_exported(where, value, result)
    elif field:
        _take_field(option, field, value, result, f"{where}: {name} {option}")
    if PLACING.search(field or option):
        result.note(f"{where}: {name} {option}", "dropped, since the launcher sees to it")
    elif not field and not any(option in program.get(each, ()) for each in ("flags", "changes", "sets")):
        result.note(f"{where}: {name} {option}")


def settle(result: Imported, where: str, nodes: int = 0, strategy: str | None = None) -> None:
    """Turn what has been said of the workers into strategy, workers and resources.

    Args:
        nodes: how many machines there are, if something else than the command says so.
        strategy: where no program of the command has one.
    """
    says, job = result.says, result.job
    strategy = says.get("strategy", strategy)
    # Torchrun and its like are Slurm's tasks, one on each node, and start the workers.
    has_agents = strategy == "torch_ddp"
    nodes, on_node, total, gpus = _counted(result, where, nodes, has_agents)
    if strategy is None and "srun" not in says:
        if nodes > 1 and "pods" in says:
            result.note(where, f"changed: {nodes} pods, which nothing joins, are one worker")
        total = nodes = on_node = 1  # Python alone runs once, however much is reserved for it
    uses = packages(imported(result.folder / job.get("script", "")))
    if strategy is None and total > 1:
        strategy = next((name for module, name in STRATEGY_OF.items() if module in uses), "torch_ddp")
        result.note(where, f"nothing says how the workers co-operate; strategy {strategy} is a guess")
    about = f"{result.place.get('image')} {job.get('arguments')}"
    is_horovod = "horovod" in uses or ("horovod" in about and "mpi4py" not in uses)
    if strategy == "mpi" and is_horovod and "mpi4py" not in says:
        strategy = "horovod"
    job["strategy"] = "horovod_elastic" if "elastic" in says else strategy or "single"
    is_one = total != nodes * on_node or on_node == 1 or (nodes == 1 and result.target is None)
    job |= {"workers": total} if is_one else {"nodes": nodes, "processes_per_node": on_node}
    _take_resources(result, on_node, gpus, has_agents)


def _counted(result: Imported, where: str, nodes: int, has_agents: bool) -> tuple[int, int, int, int]:
    """How many nodes there are, workers on each and in all, and GPUs on each."""
    says = result.says
    if most := re.fullmatch(r"\d+[:-](\d+)", says.get("nodes", "")):
        result.note(where, f"of {most[0]} nodes, {most[1]} are taken: say in job.yaml how many there are")
        says["nodes"] = most[1]
    if UNKNOWN in says.get("nodes", "") and not nodes:
        result.note(where, "how many nodes there are is computed: 1 is taken")
    if not nodes and not says.get("tasks"):
        _count_hosts(result, where)
    count = {name: int(text) for name, text in says.items() if re.fullmatch(r"[1-9]\d*", text)}
    tasks = count.get("tasks", 1)
    nodes = nodes or count.get("nodes") or max(1, tasks // count.get("per_node", tasks))
    gpus = count.get("gpus_node") or count.get("gpus", 0) // nodes
    unread = says.get("tasks") or says.get("per_node")
    if "per_gpu" in count and not unread:
        count["per_node"] = count["per_gpu"] * (gpus or 1)
    on_node = count.get("per_node") or max(1, tasks // nodes)
    gpus = gpus or count.get("gpus_task", 0) * (1 if has_agents else on_node)
    if "per_gpu" in count and unread:
        gpus = gpus or -(-on_node // count["per_gpu"])
    if unread and not {"tasks", "per_node"} & count.keys():
        on_node = gpus or 1  # what torchrun's "gpu" means
        if unread not in ("gpu", "auto") or not gpus:
            what = unread.replace(UNKNOWN, "computed")
            result.note(where, f"the workers on a node are {what}: {on_node} are taken")
    if not gpus and any(says.get(name) for name in ("per_gpu", "cpus_gpu", "memory_gpu")):
        result.note(where, "options for each GPU are not read, since none says how many GPUs there are")
    return nodes, on_node, count.get("tasks", nodes * on_node), gpus


def _count_hosts(result: Imported, where: str) -> None:
    """Count the workers of an mpirun that names hosts and no number."""
    says = result.says
    hosts = [each for each in says.get("hosts", "").split(",") if each]
    if hosts and UNKNOWN not in says["hosts"]:
        slots = [re.search(r":(\d+)$", each) for each in hosts]
        says.setdefault("nodes", str(len({each.partition(":")[0] for each in hosts})))
        if not says.get("per_node"):
            says["tasks"] = str(sum(int(each[1]) if each else 1 for each in slots))
    elif {"hosts", "hostfile"} & says.keys() and not says.get("nodes"):
        result.note(
            where,
            "how many hosts there are is not known: 1 is taken; say in job.yaml how many workers there are",
        )


def _take_resources(result: Imported, on_node: int, gpus: int, has_agents: bool) -> None:
    """Take what one worker gets."""
    says, each_gpu = result.says, -(-gpus // on_node)
    cpus = float(says.get("cpus_node", 0)) / on_node
    cpus = cpus or float(says.get("cpus") or 0) / (on_node if has_agents else 1)
    cpus = cpus or float(says.get("cpus_gpu") or 0) * gpus / on_node
    memory = says.get("memory", "")
    with contextlib.suppress(ValueError):  # the check of job.yaml says what is wrong
        if per_cpu := says.get("memory_cpu"):
            memory = size(int(bytes_of(per_cpu) * (cpus or 1)))
        elif per_gpu := says.get("memory_gpu"):
            memory = size(bytes_of(per_gpu) * gpus // on_node)
        elif on_node > 1:
            memory = size(bytes_of(memory) // on_node)
    amounts = {"cpu": int(cpus) if cpus == int(cpus) else cpus, "memory": memory, "gpu": each_gpu}
    usual = dict(Resources())
    for name in {"kubernetes": ("cpu", "memory"), "slurm": ("memory",)}.get(result.target or "", ()):
        if not amounts[name] and "--mem" not in str(result.place.get("options")):
            result.note(f"resources.{name}", f"{usual[name]} for each worker, since the file asks for none")
    result.job["resources"] = {name: each for name, each in amounts.items() if each and each != usual[name]}


def size(nbytes: int) -> str:
    """`nbytes` in the largest unit that says it in a whole number."""
    power, unit = next(each for each in ((30, "Gi"), (20, "Mi"), (0, "")) if nbytes % 2 ** each[0] == 0)
    return f"{nbytes >> power}{unit}"
