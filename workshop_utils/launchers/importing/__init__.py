"""`workshop import FILE` makes job.yaml and place.yaml of what people have, and lists what it dropped or changed.

| module | what it reads |
| --- | --- |
| `manifests` | Kubernetes: TFJob, PyTorchJob, MPIJob, TrainJob, Job |
| `shell` | shell files: of sbatch, or with srun, torchrun, mpirun, horovodrun, accelerate or python |
| `imported` | what each of them has read |
| `tables.yaml` | names: of options, fields and variables |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from workshop_utils.jobs import JobError, TrainingJob, label_of
from workshop_utils.launchers.importing.imported import UNKNOWN, Imported

READ_AT_MOST = 4 << 20  # bytes
UNLIMITED = "24h"  # of a job whose source names no limit


def import_file(file: Path, folder: Path | None = None) -> str:
    """Write what `file` describes to job.yaml and place.yaml in `folder`.

    By default that is the folder of `file`, or the working folder if only this has the script.

    Returns:
        a line for each thing that was written, dropped or changed, or is left to do.

    Raises:
        JobError: if it is of no known kind, is a template, describes no job or two, or one of both is there already;
            nothing has been written then.
    """
    folders = (file.parent, Path()) if folder is None else (folder,)
    results = [read(file, each) for each in {each.resolve(): each for each in folders}.values()]
    result = next(filter(_has_script, results), results[0])
    texts = {"job.yaml": _text(result.job, f"Imported from {file.name}.", TrainingJob.model_fields)}
    if result.place:
        texts["place.yaml"] = _text(
            result.place, f"For --on {result.target} --config place.yaml.", result.place
        )
    paths = {result.folder / name: text for name, text in texts.items()}
    for path in paths:
        if path.exists():
            raise JobError(f"{path} is there already; move it, or name another folder by --output")
    result.folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
    try:
        TrainingJob.load(result.folder)
    except JobError as error:
        advice = ": put it there, or name the folder that has it by --output"
        for line in reversed(str(error).splitlines()):
            result.notes.insert(0, f"to do: {line}" + advice * ("no such file" in line))
    return "\n".join([*(f"wrote {path}" for path in paths), *result.notes])


def read(file: Path, folder: Path) -> Imported:
    """What `file` describes. Raises JobError as `import_file` does."""
    from workshop_utils.launchers.importing import manifests, shell

    if not file.is_file():
        raise JobError(f"there is no file {file}; name a manifest or a shell file")
    if file.suffix == ".py":
        advice = f"docs/your_script.md says what to do with SageMaker's estimators; `workshop launch {file}` trains"
        raise JobError(f"{file} is Python; an import reads manifests and shell files: {advice}")
    text = file.read_bytes()[:READ_AT_MOST].decode(errors="replace").replace("\r\n", "\n")
    if not text.strip() or UNKNOWN in text:
        raise JobError(f"{file} {'holds no text' if text.strip() else 'is empty'}: nothing is to be imported")
    is_manifest = re.search(r"^kind:", text, re.MULTILINE) or file.suffix in (".yaml", ".yml", ".json")
    reader: Any = manifests if is_manifest else shell
    result = Imported(file, folder)
    try:
        reader.read(text, result)
    except JobError:
        raise
    except RecursionError:
        raise JobError(f"{file}: what it holds is nested too deeply to be read") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        raise JobError(f"{file} is not written as such files are: {error!r}") from None
    result.job["name"] = label_of(result.says.get("name", file.stem))
    _take_time(result)
    return result


def _take_time(result: Imported) -> None:
    """Take the job's timeout, in the largest unit that says it in a whole number."""
    text = result.says.get("time", "0")
    if not re.fullmatch(r"\d{1,12}", text):
        raise JobError(f"{result.file}: its time limit, {text}, is no whole number of seconds")
    if seconds := int(text):
        units = ((3600, "h"), (60, "min"), (1, "s"))
        result.job["timeout"] = next(f"{seconds // n}{unit}" for n, unit in units if seconds % n == 0)
    elif result.target:
        result.job["timeout"] = UNLIMITED
        result.note("timeout", f"{UNLIMITED}, since the file names no limit; look at what it may cost")


def _has_script(result: Imported) -> bool:
    return TrainingJob.model_construct(folder=result.folder, **result.job).script_path.is_file()


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line, as people write short ones."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def _text(fields: Mapping[str, Any], comment: str, names: Iterable[str]) -> str:
    """`fields` as YAML, in the order of `names`, without those of a job that say what is so anyway."""
    usual = {name: field.default for name, field in TrainingJob.model_fields.items()}
    kept = {name: fields[name] for name in names if fields.get(name) not in (None, {}, [], usual.get(name))}
    return f"# {comment}\n" + yaml.dump(kept, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
