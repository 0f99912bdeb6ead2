"""What to run: one description of a training job, which knows no target.

A job is a folder that holds `job.yaml` beside its script:

    job = TrainingJob.load("jobs/mnist_horovod")
    job = job.replace(workers=4, arguments={"epochs": 2})

or is written in Python with the same fields. Both go through the same validation, which reports a mistake in one
sentence with the field, the value and what would be right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, model_validator

from workshop_utils import start
from workshop_utils.jobs.quantities import bytes_of, seconds_of

StrategyName = Literal[
    "single",
    "ring",
    "workshop_parameter_server",
    "horovod",
    "horovod_elastic",
    "torch_ddp",
    "multi_worker_mirrored",
    "parameter_server",
    "mpi",
]
StorageKind = Literal["folder", "s3", "claim"]
PROCESS_NAME = re.compile(r"[a-z]+-\d+")
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")


class PlainError(Exception):
    """An error whose message is for people; a notebook shows that alone."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception how it wants to be shown: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


class JobError(PlainError, ValueError):
    """A job description that cannot be run; the message has one line for each field that is wrong."""


def readable(parse: Callable[[str | float], float]) -> Callable[[str], str]:
    """A validator that keeps the text as it was written, once `parse` has understood it."""

    def check(text: str) -> str:
        if parse(text) <= 0:
            raise ValueError("it must be more than zero")
        return text

    return check


def _number_to_text(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _arguments(value: Any) -> dict[str, Any] | tuple[Any, ...]:
    """The arguments as a mapping or a list has them. Raises what says which of them is wrong."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            if re.search(r"^-|\s", key):
                raise JobError(f"{key} is no argument's name; it must be as in 'lr: 0.1', which is --lr 0.1")
            is_list = isinstance(each, list | tuple)
            if is_list and not each:
                raise JobError(f"{key} is []; it must hold a value, or be left empty (null) for a bare flag")
            for word in each if is_list else (each,):
                if word is not None or is_list:
                    _check_word(key, word)
        return _fits_a_process(dict(value))
    if isinstance(value, list | tuple):
        for place, word in enumerate(value):
            _check_word(str(place), word)
        return tuple(value)
    raise ValueError("it must hold 'name: value' pairs, or be a list of words such as [3, --amp, --lr=0.1]")


def _check_word(name: str, word: object) -> None:
    if not isinstance(word, str | int | float):
        raise JobError(f"{name} is {_short(word)}; it must be a text, a number or true or false")
    if "\0" in str(word):
        raise JobError(f"{name} is {_short(word)}; it cannot be handed to a process")


def _data(value: Any) -> str | dict[str, str] | None:
    """The data as one source, or as several by the names of channels. Raises what says which is wrong."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            "it must be a source such as 'digits' or a folder, or sources by name: {train: ..., test: ...}"
        )
    for name, source in value.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", str(name)):
            raise JobError(f"{name} is no name of a channel; it must be letters, digits, '_' and '-'")
        if not isinstance(source, str):
            raise JobError(f"{name} is {_short(source)}; it must be a source such as 'digits' or a folder")
    if len({str(name).upper().replace("-", "_") for name in value}) < len(value):
        raise ValueError("two of its names are one variable; they must differ in more than case, '-' and '_'")
    return {str(name): source for name, source in value.items()}


def _has_names(value: object) -> object:
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise ValueError("its fields must have names")  # YAML also takes a number or null for a key
    return value


def _fits_a_process(value: Any) -> Any:
    for key, text in value.items():
        if not key or "=" in key or "\0" in f"{key}{text}":
            raise ValueError(f"the name or value of {key!r} cannot be handed to a process")
    return value


def words_of(arguments: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """The words of a command line, from a mapping or a list of `arguments`."""
    if not isinstance(arguments, Mapping):
        return [str(word) for word in arguments]
    words: list[str] = []
    for key, value in sorted(arguments.items()):
        words.append(f"--{key}" if len(key) > 1 else f"-{key}")
        words += map(str, value if isinstance(value, list | tuple) else [] if value is None else [value])
    return words


def label_of(text: str) -> str:
    """`text` as the name of a job, in letters that every target takes."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:50].rstrip("-") or "job"


def storage_kind(text: str) -> StorageKind:
    """What `text` names: a folder, an `s3://` address, or `claim:NAME`, a volume claim of Kubernetes.

    Raises:
        ValueError: if it is none of these.
    """
    if re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{2,62}(/.*)?", text):
        return "s3"
    if re.fullmatch(r"claim:[a-z0-9]([-a-z0-9]*[a-z0-9])?", text):
        return "claim"
    if not text or re.match(r"[\w+.-]+:/", text) or text.startswith("claim:") or "\0" in text:
        bucket = "s3://bucket/path (a bucket has 3 to 63 of a-z, 0-9, '.', '-')"
        raise ValueError(f"it must be a folder, {bucket}, or claim:NAME")
    return "folder"


Variable = Annotated[str, BeforeValidator(_number_to_text)]
Size = Annotated[str, BeforeValidator(_number_to_text), AfterValidator(readable(bytes_of))]
Duration = Annotated[str, BeforeValidator(_number_to_text), AfterValidator(readable(seconds_of))]
Storage = Annotated[str, AfterValidator(lambda text: text if storage_kind(text) else "")]
# A DNS-1035 label: the strictest rule of any target (Kubernetes names pods after it).
Label = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)]


class Description(BaseModel):
    """A frozen model whose errors are for people: raises JobError, never pydantic's ValidationError."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            # A default that is made of another field, which is reported itself, needs no sentence.
            details = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
            raise JobError("\n".join(_sentence(detail, type(self)) for detail in details)) from None

    @classmethod
    def _read(cls, file: Path, example: str, **fields: Any) -> Self:
        """The description in a YAML file such as `example`, with `fields` that it may not hold. Raises JobError."""
        values = _read_yaml(file, example)
        words = values.get("arguments")
        if isinstance(words, list) and None not in words:  # as they are written: 1.10, on and 007
            written = parsed(file, partial(yaml.load, Loader=yaml.BaseLoader))
            if "arguments" not in written:
                raise JobError(f"{file}: arguments: a list that << merges is not read: write it out")
            values["arguments"] = written["arguments"]
        if "apiVersion" in values:
            raise JobError(
                f"{file} is a manifest of Kubernetes: `workshop import {file}` makes a job.yaml of it"
            )
        for name in fields.keys() & values.keys():
            raise JobError(f"{file}: {name}: unknown field; a job.yaml's {name} is the one it lies in")
        try:
            return cls(**fields, **values)
        except JobError as error:
            raise JobError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None

    @classmethod
    def _parsed(cls, field: str, text: str, form: str, by_process: str) -> Self:
        """The description in a line such as `100Mbit,latency=1ms,worker-1=10Mbit`.

        What stands alone is the first of this class's fields; values for processes go into the field `by_process`.

        Raises:
            JobError: for another `form`, or a wrong value; it begins with the `field` of which this is the value.
        """
        values: dict[str, Any] = {by_process: {}}
        known = [*(name for name in cls.model_fields if name != by_process), "worker-1"]
        for number, setting in enumerate(str(text).split(",")):
            name, equals, value = (part.strip() for part in setting.partition("="))
            if number == 0 and not equals:
                name, value = next(iter(cls.model_fields)), name
            target = values[by_process] if PROCESS_NAME.fullmatch(name) else values
            if not name or not value or name in target:
                raise JobError(f"{field} is {text!r}; it must be {form}, each once")
            if target is values and name not in known:
                raise JobError(f"{field} is {text!r}: {_unknown(name, known)}")
            is_count = target is values and cls.model_fields[name].annotation is int and value.isdecimal()
            target[name] = int(value) if is_count else value
        try:
            return cls(**values)
        except JobError as error:
            raise JobError(f"{field} is {text!r}: {error}") from None


class Resources(Description):
    """What one worker, that is one process, needs.

    Attributes:
        cpu: processor cores.
        memory: such as `"2Gi"`.
        gpu: NVIDIA GPUs of its own. With none it trains on the CPU on this machine; instances of SageMaker and pods
            show it the GPUs that they have. None of the workshop's jobs uses more than one in a process.
    """

    cpu: float = Field(default=1, gt=0, allow_inf_nan=False)
    memory: Size = "2Gi"
    gpu: int = Field(default=0, ge=0, strict=True)

    @property
    def memory_nbytes(self) -> int:
        """`memory` in bytes."""
        return bytes_of(self.memory)


class TrainingJob(Description):
    """One training run: what to start, how many of it, and what it reads and writes.

    Attributes:
        name: what the target calls the run.
        folder: where the script is; not a field of job.yaml.
        script: the training script, in the job's folder.
        module: in place of a script, a module below the job's folder, such as `package.train`: Python's `-m`.
        strategy: how the workers co-operate, see `strategies`.
        workers: how many processes train: `nodes` times `processes_per_node`.
        nodes: on how many machines. Without it the target decides: this machine is one node, and elsewhere each
            worker is one.
        processes_per_node: how many workers share a machine.
        parameter_servers: how many processes hold parameters, where the strategy has such.
        arguments: the script's command line: `key: value` is `--key value`, or `-k value` for one letter; `key: null`
            a bare `--key`; `key: [1, 2]` is `--key 1 2`. Or a list of words: `[3, --amp, --lr=0.1, model.depth=2]`.
            In them {rank} and the other words of `start.py` are filled in by each process.
        data: `"digits"`, `"mnist"`, a folder, a file, or (SageMaker) an `s3://` address; or several of these by
            name, `{train: ..., test: ...}`, which are SageMaker's channels. Without it, the script has none.
        outputs: where the model stays: a folder, an `s3://` address, or `claim:NAME`, a volume claim of Kubernetes.
            Without it, the target's own default.
        checkpoints: where the script keeps what the next launch resumes from, in the same forms.
        resources: what one worker needs.
        image: the container image, for targets that run containers.
        timeout: how long the run may take; one that hangs is ended then.
        environment: more variables for the script.
        requirements: whether the packages of a requirements.txt in the folder must be there.
    """

    name: Label
    folder: Path = Field(default=Path(), exclude=True)
    script: str = "train.py"
    module: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
    strategy: StrategyName = "single"
    workers: int = Field(default=1, ge=1, le=100_000, strict=True)
    nodes: int | None = Field(default=None, ge=1, le=100_000, strict=True)
    processes_per_node: int | None = Field(default=None, ge=1, le=1_000, strict=True)
    parameter_servers: int = Field(default=1, ge=1, le=100_000, strict=True)
    arguments: Annotated[dict[str, Any] | tuple[Any, ...], PlainValidator(_arguments)] = {}
    data: Annotated[str | dict[str, str] | None, PlainValidator(_data)] = None
    outputs: Storage | None = None
    checkpoints: Storage | None = None
    resources: Annotated[Resources, BeforeValidator(_has_names)] = Resources()
    image: str | None = None
    timeout: Duration = "10min"
    environment: Annotated[dict[str, Variable], AfterValidator(_fits_a_process)] = {}
    requirements: bool = Field(default=True, strict=True)
    _timeout_seconds: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Of workers, nodes and processes per node, add the one that follows from the others."""
        if not isinstance(values, dict):
            return values
        given: list[Any] = [values.get(name) for name in ("workers", "nodes", "processes_per_node")]
        workers, nodes, per_node = given
        is_possible = all(value is None or (type(value) is int and value > 0) for value in given)
        if not is_possible or (nodes is None and per_node is None):
            return values  # where a number cannot be, its field's own check says so
        if nodes is None:
            nodes = max(1, (workers or per_node) // per_node)
        per_node = per_node or max(1, (workers or nodes) // nodes)
        if workers not in (None, nodes * per_node):
            raise ValueError(
                f"workers is {workers}; it must be nodes × processes_per_node, here {nodes} × {per_node}: change one, "
                "or leave one of the three out"
            )
        return {**values, "workers": nodes * per_node, "nodes": nodes, "processes_per_node": per_node}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.module is not None and "script" in self.model_fields_set:
            raise ValueError(
                f"module is {self.module!r} and script is {self.script!r}; leave one of them out"
            )
        if not self.script_path.is_file():
            field = "script" if self.module is None else "module"
            raise ValueError(f"{field} is {self.program!r}; there is no such file in {self.folder or '.'}")
        if self.script_path.suffix in SHELL_SUFFIXES:
            raise ValueError(
                f"script is {self.script!r}; it must be Python's: `workshop import {self.script_path}` makes a job of "
                "what it starts"
            )
        self._timeout_seconds = seconds_of(self.timeout)
        return self

    @property
    def script_path(self) -> Path:
        """Where the script, or the file of the module, is."""
        if self.module is None:
            return self.folder / self.script
        path = self.folder.joinpath(*self.module.split("."))
        return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")

    @property
    def program(self) -> str:
        """What is run, for messages: the script or the module."""
        return self.module or self.script

    @property
    def needs_start(self) -> bool:
        """Whether the arguments hold words that `start.py` fills in."""
        return any(any(start.PATTERN.findall(word)) for word in self.command_line_arguments)

    @property
    def channels(self) -> dict[str, str]:
        """The sources of the data by SageMaker's names of channels; a single one is called `training`."""
        return {"training": self.data} if isinstance(self.data, str) else self.data or {}

    @property
    def named_arguments(self) -> dict[str, Any]:
        """The arguments that were given by name; none of a list."""
        return self.arguments if isinstance(self.arguments, dict) else {}

    @property
    def timeout_seconds(self) -> float:
        """`timeout` in seconds."""
        return self._timeout_seconds

    @property
    def command_line_arguments(self) -> list[str]:
        """`arguments` as the script receives them, on every target: a mapping sorted by key, as SageMaker sorts it."""
        return words_of(self.arguments)

    def storage(self, name: Literal["outputs", "checkpoints"], *kinds: StorageKind) -> str | None:
        """The field `name`, if it is one of the `kinds` that a target can write to.

        Raises:
            JobError: if it is of another kind.
        """
        value: str | None = getattr(self, name)
        if value is not None and storage_kind(value) not in kinds:
            forms = {"folder": "a folder", "s3": "an s3:// address", "claim": "claim:NAME, a volume claim"}
            right = " or ".join(forms[kind] for kind in kinds)
            raise JobError(f"{name} is {value!r}; here it must be {right}")
        return value

    def replace(self, **changes: Any) -> Self:
        """A validated copy with `changes`; a mapping of `arguments` or `environment` is merged with what was there.

        New `workers` keep the processes per node, and a new number of nodes or of processes per node gives new workers.

        Raises:
            JobError: if the copy would be none that can be run.
        """
        values = {name: getattr(self, name) for name in self.model_fields_set | {"folder"}}
        layout = {"workers", "nodes", "processes_per_node"}
        if changed := changes.keys() & layout:
            stale = layout if len(changed) > 1 else {"nodes" if "workers" in changed else "workers"}
            values = {name: value for name, value in values.items() if name not in stale}
        for name in ("arguments", "environment"):
            old, new = values.get(name, {}), changes.get(name)
            if isinstance(new, Mapping):
                changes[name] = {**old, **new} if isinstance(old, Mapping) else [*old, *words_of(new)]
        return type(self)(**{**values, **changes})

    @classmethod
    def from_function(
        cls,
        program: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        framework: str | None = None,
        **fields: Any,
    ) -> Self:
        """A job whose workers each call `program(group, **arguments)`, as `on_ranks` does, on any target.

        Its script holds the source of the function, and of the names that it uses (`jobs.function`). It stays in the
        cache folder for a week, as `job.folder`.

        Args:
            program: a function that `def` made, in a cell or a file.
            arguments: its parameters after the first, by name: what JSON has. They are the job's `arguments`.
            framework: as in `on_ranks`. It decides the strategy; without one the Communicator's messages go through
                PyTorch's process group, which every target can start.
            fields: other fields of the job, such as `workers=4`.

        Raises:
            JobError: if something cannot travel; the message names it.
        """
        from workshop_utils.jobs import function  # which needs this module

        arguments = {} if arguments is None else arguments
        function.check_call(program, arguments, framework)
        if "strategy" in fields:
            raise JobError(f"strategy is {fields['strategy']!r}; it follows from the framework: leave it out")
        derived = {
            "folder": function.write(program, framework),
            "name": label_of(program.__name__),
            "strategy": function.FRAMEWORKS[framework][0],
            "arguments": function.encoded(arguments),
        }
        return cls(**{**derived, **fields})

    @classmethod
    def of_script(cls, script: str | Path | None = None, **fields: Any) -> Self:
        """A job without a job.yaml: a `script`, or a `module`, of the working folder, where it runs as under Python.

        The folder of a script from elsewhere is its own.

        Raises:
            JobError: if there is no such file, or a field is wrong.
        """
        folder, program = Path(), dict[str, str]()
        if script is not None:
            path = Path(script)
            is_below = path.absolute().is_relative_to(Path.cwd()) and ".." not in path.parts
            folder = folder if is_below else path.parent
            program["script"] = path.absolute().relative_to(folder.absolute()).as_posix()
        name = Path(script).stem if script is not None else str(fields.get("module"))
        return cls(**{"name": label_of(name), "folder": folder, **program, **fields})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The job in `path`, a `job.yaml` or the folder that holds one.

        Raises:
            JobError: if there is no such file, it is not YAML, or a field is wrong.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "job.yaml"
        if not file.is_file():
            scripts = sorted(each.name for each in file.parent.glob("*.py"))
            advice = f"; without one, launch a script, such as {file.parent / scripts[0]}" if scripts else ""
            raise JobError(
                f"there is no job at {file}: it must be a job.yaml, or a folder that holds one{advice}"
            )
        return cls._read(file, "name: my-job", folder=file.parent)


def parsed(file: Path, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """What `load` makes of a YAML file. Raises JobError where that is no YAML."""
    try:
        return load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem)
        if "'\\t'" in problem:
            problem = "there is a tab; YAML is indented with spaces"
        raise JobError(f"{file}, line {line}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date in a thirteenth month
        raise JobError(f"{file} is not readable as YAML: {' '.join(str(error).split())}") from None


def _read_yaml(file: Path, example: str) -> dict[str, Any]:
    values = parsed(file)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise JobError(f"{file} holds {_short(values)}; it must hold fields such as '{example}'")
    return values


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
    return f"{name}: unknown field; {advice}"


def _sentence(detail: Any, model: type[BaseModel]) -> str:
    """One of pydantic's error details as a sentence that names field, value and what would be right."""
    where = ".".join(str(part) for part in detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(where, list(model.model_fields))
    if kind == "missing":
        examples = getattr(model.model_fields.get(where), "examples", None)
        return f"{where} is missing" + (f"; it must be {examples[0]}" if examples else "")
    if isinstance(context.get("error"), JobError):  # the message of a nested description
        return "\n".join(f"{where}.{line}" for line in str(context["error"]).splitlines())
    if kind == "value_error":
        message = str(context["error"])
        return f"{where} is {_short(value)}; {message}" if where else message
    if kind == "string_pattern_mismatch" and where == "module":
        advice = "it must be a module as Python's -m takes it, such as package.train"
    elif kind == "string_pattern_mismatch":
        advice = "it must be lower-case letters, digits and '-', and start with a letter"
    elif kind in {"model_type", "dict_type"}:
        advice = "it must hold fields of its own, as in 'memory: 2Gi'"
    elif kind == "literal_error":
        advice = f"it must be one of {context['expected']}"
    else:
        advice = detail["msg"][0].lower() + detail["msg"][1:].replace("Input", "it")
        advice = advice.replace("input should be", "it must be")
    return f"{where} is {_short(value)}; {advice}"
