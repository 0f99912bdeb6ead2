"""The optional packages: which extra of this package brings each, and what is said where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

# What the packages of each extra are imported as.
MODULES = {
    "torch": ("torch",),
    "lessons": ("matplotlib", "vl_convert", "ipywidgets"),
    "lab": ("jupyterlab", "nbformat", "nbclient", "nbconvert", "papermill", "jinja2", "PIL", "oxipng"),
    "tensorflow": ("tensorflow", "keras", "jax"),
    "mpi": ("mpi4py",),
    "horovod": ("horovod",),
    "transformers": ("transformers",),
    "aws": ("boto3", "botocore", "sagemaker", "moto"),
    "kubernetes": ("kubernetes",),
    "spark": ("pyspark",),
}


EXTRAS = {module: extra for extra, modules in MODULES.items() for module in modules}


class MissingPackage(ModuleNotFoundError):
    """A package that an extra brings is not installed; the message names both, and the command."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its representation: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


def missing(*extras: str) -> list[str]:
    """Those of the modules of `extras` that are not installed."""
    return [module for extra in extras for module in MODULES[extra] if find_spec(module) is None]


def require(extra: str) -> None:
    """Raise `MissingPackage` if a module of `extra` is not installed."""
    if absent := missing(extra):
        raise MissingPackage(sentence(extra), name=absent[0])


def sentence(extra: str) -> str:
    """What is missing of `extra`, and what brings it."""
    way = f"`workshop install {extra}`, or pip install 'workshop-utils[{extra}]'"
    return f"{', '.join(missing(extra))} not installed: {way}"
