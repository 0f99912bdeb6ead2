"""What each Python process of a run imports when it starts.

On SIGUSR1 it prints its stack, so that a hang gets a name; on a fatal signal, too.

Its folder comes first on PYTHONPATH. It goes from the process's own path again, and the environment's sitecustomize,
which this one hides, is imported as if this one were not there.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of, without the time that its enumerations take
import faulthandler
import os
import sys

faulthandler.enable(file=2)
faulthandler.register(_signal.SIGUSR1, file=2, all_threads=False, chain=False)

sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]  # noqa: PTH120  # no pathlib yet
_this = sys.modules.pop(__name__)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
finally:
    sys.modules.setdefault(__name__, _this)
