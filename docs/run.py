"""Records docs/run.gif, the README's moving picture: a ring of four processes, one of them behind a slow link.

python docs/run.py        from the repository's root, on Linux with network namespaces
"""

import io
import time
from contextlib import suppress
from itertools import pairwise

from PIL import Image

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.plots import live, style

EVERY_SECONDS = 0.4  # between two pictures, beside what drawing takes
LAST_SECONDS = 4.0  # that the last picture stays

style.use()
job = TrainingJob.load("jobs/digits_ring").replace(workers=4, arguments={"epochs": 30, "hidden": 512})
pictures, moments = [], []


def keep(run):
    moments.append(time.monotonic())
    written = io.BytesIO()
    live.draw(run).savefig(written, dpi=90)
    pictures.append(Image.open(written).convert("P", palette=Image.Palette.ADAPTIVE, colors=32))


with Local(network=Network.parse("bandwidth=200Mbit,worker-2=50Mbit")).launch(job) as run:
    while True:
        keep(run)
        with suppress(TimeoutError):
            run.wait(EVERY_SECONDS)
            break
    keep(run)
size = pictures[-1].size
seconds = [after - before for before, after in pairwise(moments)] + [LAST_SECONDS]  # as fast as it ran
first, *others = [each.resize(size) for each in pictures]
first.save(
    "docs/run.gif",
    save_all=True,
    append_images=others,
    duration=[round(1000 * each) for each in seconds],
    loop=0,
)
