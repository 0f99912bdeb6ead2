"""The optional packages: which extra of this package brings each, and what is said where one is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# What the packages of each extra are imported as.
MODULES = {
    "torch": ("torch",),
    "lessons": ("matplotlib", "vl_convert", "ipywidgets"),
    "lab": ("jupyterlab", "nbformat", "nbclient", "nbconvert", "papermill", "jinja2", "PIL", "oxipng"),
    "tensorflow": ("tensorflow", "keras", "jax"),
    "mpi": ("mpi4py",),
    "horovod": ("horovod",),
    "transformers": ("transformers",),
    "torchvision": ("torchvision",),
    "tf-keras": ("tf_keras",),
    "aws": ("boto3", "botocore", "sagemaker", "moto"),
    "kubernetes": ("kubernetes",),
    "spmd": ("spmd_types",),
    "spark": ("pyspark",),
}


# In an environment while extras are being installed into it, and for as long as that was interrupted: their names.
UNFINISHED = Path(sys.prefix, ".workshop-unfinished")
EXTRAS = {module: extra for extra, modules in MODULES.items() for module in modules}


class MissingPackage(ModuleNotFoundError):
    """A package that an extra brings is not installed; the message names both, and the command."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its representation: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


def missing(*extras: str) -> list[str]:
    """Those of the modules of `extras` that are not installed, or not whole."""
    try:
        unfinished = UNFINISHED.read_text().split()
    except OSError:  # there is none, as a rule
        unfinished = []
    return [
        module
        for each in extras
        for module in MODULES[each]
        if each in unfinished or not is_installed(module)
    ]


def is_installed(module: str) -> bool:
    """Whether this environment has `module`; a folder of that name that happens to be on the path is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def require(*extras: str) -> None:
    """Raise `MissingPackage` if a module of `extras` is not installed; wait for one that is being installed."""
    if absent := missing(*extras):
        try:
            import_module(absent[0])  # which waits (`setup.install`); a question does not
        except MissingPackage:
            raise
        except ImportError:
            pass  # the sentence below says more
    if absent := missing(*extras):
        raise MissingPackage(sentence(*extras), name=absent[0])


def sentence(*extras: str) -> str:
    """What is missing of `extras`, and what brings it."""
    lacking = [extra for extra in extras if missing(extra)]
    absent = missing(*lacking)
    it = "it" if len(absent) == 1 else "them"
    return f"{', '.join(absent)} not installed: `workshop install {' '.join(lacking)}` installs {it}"
