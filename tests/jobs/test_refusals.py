"""A job that cannot be trained as it was described ends at once, with a sentence and no traceback.

The jobs and the sentences are in `tests/guards/bad_inputs.yaml`.
"""

from pathlib import Path

import pytest
import yaml
from conftest import with_horovod
from launching import launched

from workshop_utils.runs import RunFailed

pytestmark = pytest.mark.processes

CORPUS = Path(__file__).parents[1] / "guards" / "bad_inputs.yaml"
ENTRIES = [
    with_horovod(entry["job"], entry, id=f"{entry['job']} {entry['says'][0]}")
    for entry in yaml.safe_load(CORPUS.read_text(encoding="utf-8"))["scripts"]
]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("job", "entry"), ENTRIES)
def test_what_cannot_be_trained_is_refused_in_a_sentence(job, entry):
    fields = {
        key: entry[key] for key in ("strategy", "workers", "parameter_servers", "arguments") if key in entry
    }
    with pytest.raises(RunFailed) as failure:
        launched(job, environment={"CUDA_VISIBLE_DEVICES": ""}, **fields)
    assert all(words in str(failure.value) for words in entry["says"])
    assert "Traceback" not in str(failure.value)
