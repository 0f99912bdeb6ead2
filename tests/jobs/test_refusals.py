"""A job that cannot be trained as it was described ends at once, with a sentence and no traceback."""

import pytest
from launching import launched

from workshop_utils.runs import RunFailed

REFUSED = [
    ("digits_mirrored", {"replicas": 0}, "replicas is 0; it must be at least 1"),
    ("digits_horovod_torch", {"reduction": "adasum"}, "launch with strategy 'mpi'"),
    ("digits_horovod_torch", {"batch-size": 1000}, "each of 2 workers has only 750 images"),
    ("horovod_fusion", {"nbytes": 3}, "nbytes is 3; it must be a multiple of 4"),
    ("digits_large_batch", {"batch-size": 33}, "must be a multiple of the 2 workers"),
    ("digits_large_batch", {"workers": 1, "learning-rates": "fast"}, "must be numbers such as 0.1,0.2"),
    ("digits_local_sgd", {"local-steps": 7}, "must divide the 256 steps"),
    ("digits_staleness", {"updates": 0}, "must make at least one"),
    ("digits_batch_norm", {"batch-size": 9}, "all parts must be equal"),
    ("digits_buckets", {"width": 0}, "width is 0; it must be at least 1"),
    ("gpt_pipeline", {"workers": 3, "layers": 2}, "layers is 2; 3 stages need at least one each"),
    ("gpt_pipeline", {"microbatches": 3}, "batch-size is 8; the 3 microbatches must divide it"),
    ("gpt_3d", {"workers": 2}, "is 2 × 2 × 2; it must make 2, the number of workers"),
    ("measure_pipeline", {"schedule": "gpipe", "chunks": 2}, "chunks is 2; schedule 'gpipe' has one a rank"),
    ("measure_step", {"elements": "64,100"}, "elements must be multiples of 64, such as 640,6400"),
    ("measure_step", {"elements": "64,64", "costs": "1"}, "costs has 1 numbers; it must have one for each"),
    ("measure_hogwild", {"stride": 3}, "stride is 3; it must divide"),
    ("measure_hogwild", {"parameter_servers": 2}, "parameter_servers is 2"),
    ("digits_parameter_server", {"locking": "none"}, "give consistency 'asynchronous'"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("name", "asked", "said"), REFUSED)
def test_what_cannot_be_trained_is_refused_in_a_sentence(name, asked, said):
    fields = {key: value for key, value in asked.items() if key in ("workers", "parameter_servers")}
    arguments = {key: value for key, value in asked.items() if key not in fields}
    with pytest.raises(RunFailed) as caught:
        launched(name, arguments=arguments, **fields)
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)
