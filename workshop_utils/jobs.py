"""What to run: one description of a training job that knows nothing of any place.

A job is a folder that holds `job.yaml` beside its script:

    job = TrainingJob.load("jobs/mnist_horovod")
    job = job.replace(workers=4, arguments={"epochs": 2})

or is written in Python with the same fields. Both go through the same validation, and what is wrong with them
is said in one sentence that names the field, the value and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from workshop_utils.quantities import bytes_of, seconds_of

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
    "spark",
]


class JobError(ValueError):
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


def _is_scalar(value: object) -> object:
    if not isinstance(value, str | int | float):
        raise ValueError("it must be a text, a number or true or false")
    return value


def _has_names(value: object) -> object:
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise ValueError("its fields must have names")  # YAML also takes a number or null for a key
    return value


def _fits_a_process(value: Any) -> Any:
    for key, text in value.items():
        if not key or "=" in key or "\0" in f"{key}{text}":
            raise ValueError(f"the name or value of {key!r} cannot be handed to a process")
    return value


Argument = Annotated[str | int | float | bool, BeforeValidator(_is_scalar)]
Size = Annotated[str, BeforeValidator(_number_to_text), AfterValidator(readable(bytes_of))]
Duration = Annotated[str, BeforeValidator(_number_to_text), AfterValidator(readable(seconds_of))]
# A DNS-1035 label: the strictest of the places that a job may go to (Kubernetes names pods after it).
Label = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)]


class Description(BaseModel):
    """A frozen model whose errors are for people: raises JobError, never pydantic's ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # A default that is made of another field, which is reported itself, needs no sentence.
            details = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
            raise JobError("\n".join(_sentence(detail, type(self)) for detail in details)) from None


class Resources(Description):
    """What one worker needs."""

    cpu: float = Field(default=1, gt=0, allow_inf_nan=False)
    memory: Size = "2Gi"
    gpu: int = Field(default=0, ge=0, strict=True)

    @property
    def memory_nbytes(self) -> int:
        """`memory` in bytes."""
        return bytes_of(self.memory)


class TrainingJob(Description):
    """One training run: name, script, arguments, strategy, workers, resources, image, data.

    `arguments` become `--key value` on the script's command line, with the keys as they are written.
    `data` is `"digits"`, `"mnist"`, a folder, a URL or an `s3://` path; `timeout` ends a run that hangs.
    """

    name: Label
    folder: Path = Field(default=Path(), exclude=True)
    script: str = "train.py"
    strategy: StrategyName = "single"
    workers: int = Field(default=1, ge=1, le=100_000, strict=True)
    parameter_servers: int = Field(default=1, ge=1, le=100_000, strict=True)
    arguments: Annotated[dict[str, Argument], AfterValidator(_fits_a_process)] = {}
    data: str = "digits"
    resources: Annotated[Resources, BeforeValidator(_has_names)] = Resources()
    image: str | None = None
    timeout: Duration = "10min"
    environment: Annotated[dict[str, str], AfterValidator(_fits_a_process)] = {}

    @model_validator(mode="after")
    def _script_exists(self) -> Self:
        if not self.script_path.is_file():
            raise ValueError(f"script is {self.script!r}; there is no such file in {self.folder or '.'}")
        return self

    @property
    def script_path(self) -> Path:
        """Where the script is."""
        return self.folder / self.script

    @property
    def timeout_seconds(self) -> float:
        """`timeout` in seconds."""
        return seconds_of(self.timeout)

    @property
    def command_line_arguments(self) -> list[str]:
        """`arguments` as the script receives them: `--key value`, sorted by key as SageMaker sorts them."""
        words: list[str] = []
        for key, value in sorted(self.arguments.items()):
            words += [f"--{key}", str(value)]
        return words

    def replace(self, **changes: Any) -> Self:
        """A validated copy with `changes`; `arguments` and `environment` are merged with what was there."""
        values = {name: getattr(self, name) for name in self.model_fields_set | {"folder"}}
        for name in ("arguments", "environment"):
            if isinstance(changes.get(name), Mapping):
                changes[name] = {**values.get(name, {}), **changes[name]}
        return type(self)(**{**values, **changes})

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
            raise JobError(f"there is no job at {file}: it must be a job.yaml, or a folder that holds one")
        values = _read_yaml(file)
        if "folder" in values:
            raise JobError(f"{file}: folder: unknown field; a job.yaml lies in its own folder")
        try:
            return cls(folder=file.parent, **values)
        except JobError as error:
            raise JobError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None

    def save(self, path: str | Path) -> None:
        """Write the job to `path`, a folder or a `job.yaml`, with the fields that differ from the defaults."""
        file = Path(path)
        if file.suffix not in {".yaml", ".yml"}:
            file.mkdir(parents=True, exist_ok=True)
            file = file / "job.yaml"
        values = self.model_dump(mode="json", exclude_defaults=True)
        file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem)
        if "'\\t'" in problem:
            problem = "there is a tab; YAML is indented with spaces"
        raise JobError(f"{file}, line {line}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date in a thirteenth month
        raise JobError(f"{file} is not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise JobError(f"{file} holds {_short(values)}; it must hold fields such as 'name: my-job'")
    return values


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _sentence(detail: Any, model: type[BaseModel]) -> str:
    """One of pydantic's error details as a sentence that names field, value and what would be right."""
    where = ".".join(str(part) for part in detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(model.model_fields)
        close = difflib.get_close_matches(where, known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
        return f"{where}: unknown field; {advice}"
    if kind == "missing":
        return f"{where} is missing"
    if isinstance(context.get("error"), JobError):  # a nested description has said it already
        return "\n".join(f"{where}.{line}" for line in str(context["error"]).splitlines())
    if kind == "value_error":
        message = str(context["error"])
        return f"{where} is {_short(value)}; {message}" if where else message
    if kind == "string_pattern_mismatch":
        advice = "it must be lower-case letters, digits and '-', and start with a letter"
    elif kind in {"model_type", "dict_type"}:
        advice = "it must hold fields of its own, as in 'memory: 2Gi'"
    elif kind == "literal_error":
        advice = f"it must be one of {context['expected']}"
    else:
        advice = detail["msg"][0].lower() + detail["msg"][1:].replace("Input", "it")
        advice = advice.replace("input should be", "it must be")
    return f"{where} is {_short(value)}; {advice}"
