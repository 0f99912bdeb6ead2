"""What an import has read so far: the fields of job.yaml and of place.yaml, and what was dropped or changed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from workshop_utils.jobs import JobError
from workshop_utils.launchers import output
from workshop_utils.launchers.output import SECRET, SECRET_VALUE

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
UNKNOWN = "\0"  # in a text: what only a shell could compute
PLACE = re.compile("|".join(TABLES["place"]))
WORDS = {name: word for word, names in TABLES["variables"].items() for name in names}
SHOWN_SECRET = re.compile(rf"[^\s=]*(?:{SECRET_VALUE.pattern})[^\s:]*")
# A name before its value: as NAME=VALUE, "NAME": VALUE or NAME: VALUE; as an option, which may be in a list of JSON.
NAMED = re.compile(
    r"""(?:^|[\s,;'"={[])-*(\w[\w.-]*)(?==\S|['"]\s*:|:\s)|(?:^|[^\w-])-+([\w.-]+)['",\s]+[^\s'",-]"""
)
AUTHORIZED = re.compile(r"(?i)\b(?:authorization['\"]?\s*[:=]|bearer\s)\s*\S")
OPTION = re.compile(r"--\w[\w.-]*|-[A-Za-z]")
ADVICE = "a local run inherits it from your shell; elsewhere: job.replace(environment={{{0!r}: os.environ[{0!r}]}})"


@dataclass
class Imported:
    """The job and the place that a file describes.

    Attributes:
        folder: where job.yaml will be.
        target: of place.yaml; None if the file is about no target.
        says: what options say of the workers, in numbers such as "4", by the names in `tables.yaml`.
        paths: words that stand for folders of the old place in arguments, such as `{data}` for `/mnt/data`.
        folders: where below `folder` scripts may lie.
        notes: what was dropped or changed, a line each.
    """

    file: Path
    folder: Path
    target: str | None = None
    job: dict[str, Any] = default(default_factory=dict)
    place: dict[str, Any] = default(default_factory=dict)
    says: dict[str, str] = default(default_factory=dict)
    paths: dict[str, str] = default(default_factory=dict)
    folders: list[str] = default(default_factory=lambda: [""])
    notes: list[str] = default(default_factory=list)

    def note(self, where: str, what: str = "dropped") -> None:
        """Say what has become of `where`."""
        if (line := SHOWN_SECRET.sub("…", f"{where}: {what}".replace(UNKNOWN, "…"))) not in self.notes:
            self.notes.append(line)

    def take_fields(self, tree: Any, table: Mapping[str, str]) -> None:
        """Take out of `tree` what is at the paths of `table`, for its fields; what has been taken before stays."""
        for path, field in table.items():
            value, (*sections, name) = take(tree, path), field.split(".")
            if value not in (None, *TABLES["usual"].get(field, ())):
                fields = {"place": self.place, "job": self.job}.get(field.partition(".")[0], self.says)
                for section in sections[1:]:
                    fields = fields.setdefault(section, {})
                value = path.rpartition(".")[2] if value == {} else value  # such as `volcano: {}`
                fields.setdefault(name, str(value) if fields is self.says else value)

    def take_script(self, path: str, where: str) -> None:
        """Take the script at `path`, if it lies below the folder, or else one of that name beside job.yaml."""
        paths = [PurePosixPath(folder, path).as_posix() for folder in reversed(self.folders)]
        here = (path for path in paths if path[0] not in "./" and (self.folder / path).is_file())
        self.job["script"] = script = next(here, PurePosixPath(path).name)
        if UNKNOWN in script:
            self.job["script"] = "train.py"
            self.note(
                f"{where}: {path}", "changed: the script's name is computed, and train.py stands for it"
            )
        elif script not in paths:
            self.note(f"{where}: {path}", f"changed: it is {script}, beside job.yaml")

    def take_variable(self, where: str, name: str, value: Any, is_secret: bool = False) -> None:
        """Take a variable for the script, if its value is known, unless launchers set it or it may be a secret."""
        if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.says.setdefault("gpus_node", str(1 + value.count(",")))
        if PLACE.fullmatch(name):
            self.note(where, "dropped, since the launcher sets it")
        elif is_secret or output.is_secret(name, str(value)) or has_secret(str(value)):
            self.note(where, f"left out, since it may be a secret: {ADVICE.format(name)}")
        elif value is None or UNKNOWN in str(value):
            self.note(where, "not read, since it is computed: add it to environment in job.yaml")
        else:
            self.job.setdefault("environment", {})[name] = str(value)

    def take_arguments(self, where: str, words: Sequence[str]) -> None:
        """Take the script's arguments, without those whose values are secret, or computed."""
        kept: list[str] = []
        for word in words:
            last = kept[-1] if kept and OPTION.fullmatch(kept[-1]) and not OPTION.match(word) else ""
            option, is_valued = last or word.partition("=")[0], bool(last) or "=" in word
            is_named = is_valued and option.strip("-") != "key" and SECRET.search(option)
            if (is_secret := is_named or has_secret(word)) or UNKNOWN in word:
                kept = kept[:-1] if last else kept
                why = "it may be a secret" if is_secret else "it is computed"
                is_shown = not is_secret or re.fullmatch(r"[\w.-]+", option)
                self.note(
                    f"{where}: {option if is_shown else '…'}", f"left out of the arguments, since {why}"
                )
                continue
            for path, stand_in in self.paths.items():
                if re.search(rf"(^|=){re.escape(path)}(/|$)", word):
                    self.note(f"{where}: {word}", f"changed: {path} is {stand_in}")
                    word = word.replace(path, stand_in, 1)
            kept.append(word)
        keys, values = kept[::2], kept[1::2]
        named = {key.lstrip("-"): plain(value) for key, value in zip(keys, values, strict=False)}
        is_mapping = all(len(key) != 3 and OPTION.fullmatch(key) for key in keys)  # --a would become -a
        is_mapping &= len(named) == len(values) == len(keys) and not any(map(OPTION.fullmatch, values))
        self.job["arguments"] = named if is_mapping else list(map(plain, kept))


def has_secret(text: str) -> bool:
    """Whether `text`, such as a line of shell or a value in JSON, gives a secret by its name or in its form."""
    names = (each for found in NAMED.findall(text.replace("\\", "")) for each in found)
    return bool(SECRET_VALUE.search(text) or AUTHORIZED.search(text)) or any(
        SECRET.search(name) for name in names if name != "key"
    )


def refuse_template(place: str, sign: str) -> None:
    """Raise JobError, since what `sign` begins in a template stands at `place`."""
    advice = "import what is rendered, such as what helm template or envsubst prints"
    raise JobError(f"{place}: it is a template, with {sign}; {advice}")


def plain(word: str) -> int | float | str:
    """`word` as a number or truth, where that is written in the same way."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(kind(word)) == word:
                return kind(word)
    return {"True": True, "False": False}.get(word, word)


def take(tree: Any, path: str) -> Any:
    """What is at `path`, in which a name has no dots or they are escaped, taken out of `tree`; None if nothing is."""
    *names, last = (name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", path))
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree.pop(last, None) if isinstance(tree, dict) else None


def left(tree: Any, path: str) -> Iterator[str]:
    """The paths of what is left in `tree`, which is at `path`, without what says nothing."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        where = f"{path}.{name}".removeprefix(".")
        if isinstance(value, dict) and name in TABLES["opened"]:
            yield from left(value, where)
        elif value not in (None, {}, [], *TABLES["usual"].get(name, ())):
            yield where
