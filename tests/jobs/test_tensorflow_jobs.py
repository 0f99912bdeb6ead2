"""TensorFlow's job by both strategies, between processes: mirrors equal one process, and all go on after a kill."""

from pathlib import Path

import numpy as np
import pytest
from conftest import with_horovod
from launching import job_of, killed

from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed
from workshop_utils.training import checkpoints

MIRRORED, SERVERS = "mnist_tensorflow", "mnist_tensorflow/parameter_server.yaml"
PATIENCE_SECONDS = 200

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


def trained(job, folder, warm=True):
    """The run of `job` to its end, the step after which it resumed (0: it did not), and the weights it wrote."""
    with Local(warm=warm).launch(job.replace(outputs=str(folder))) as run:
        run.wait(PATIENCE_SECONDS)
    assert run.warm is warm
    lines = list(run.logs())
    assert [line for line in lines if line.stream == "stderr"] == [], "TensorFlow's notices stay out of sight"
    resumed = [line.text.split()[-1] for line in lines if line.text.startswith("resumed after step ")]
    with np.load(folder / "model.npz") as model:
        weights = np.concatenate([model[key].ravel() for key in ("w1", "b1", "w2", "b2")])
    return run, int(resumed[0]) if resumed else 0, weights


def devices_of(run):
    """Where each variable is, by name."""
    devices = {}
    for words in (line.text.split() for line in run.logs()):
        if words[0] == "variable":
            devices.setdefault(words[1], set()).add(words[3].replace("/replica:0", ""))
    return devices


def kill_after(step, job, worker):
    """Launch `job`, and kill `worker` once there is a checkpoint of `step` or a later one."""
    folder = Path(job.checkpoints)
    killed(
        job,
        worker,
        lambda run: any(path >= checkpoints.path_of(folder, step) for path in checkpoints.paths(folder)),
    )


def test_workers_in_a_ring_equal_one_that_takes_the_batch_of_all_however_gradients_are_packed(tmp_path):
    workers, batch, epochs = 3, 17, 2  # 17, 13 and 10 classes are odd for 2 and 3
    steps = 1500 // workers // batch
    arguments = {"hidden": 13, "epochs": epochs, "learning_rate": 0.15}
    alone = job_of(MIRRORED, workers=1, arguments={**arguments, "batch_size": workers * batch})
    # One starts as a command line would have it.
    serial, _, expected = trained(alone, tmp_path / "serial", warm=False)
    arguments |= {"batch_size": batch, "bytes_per_pack": 1}
    run, _, weights = trained(job_of(MIRRORED, workers=workers, arguments=arguments), tmp_path / "ring")
    one, other = (each.metrics.dropna(subset=["test_loss"]) for each in (run, serial))
    assert list(one["step"]) == list(other["step"]) == [steps * epoch for epoch in range(epochs + 1)]
    # float32, added in another order
    np.testing.assert_allclose(one["test_loss"], other["test_loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-5)
    assert one["accuracy"].iloc[-1] > 0.8
    assert one["test_loss"].iloc[-1] < 0.5 * one["test_loss"].iloc[0]
    mirrors = {f"/job:worker/task:{index}/device:CPU:0" for index in range(workers)}
    assert devices_of(run) == dict.fromkeys(("w1", "b1", "w2", "b2"), mirrors)


def test_mirrored_workers_that_were_killed_end_with_the_bits_of_an_uninterrupted_run(tmp_path):
    workers, epochs = 4, 24  # of two workers' gradients the sum is the same in either order
    arguments = {"epochs": epochs, "batch_size": 32, "hidden": 33, "checkpoint_steps": 15}
    job = job_of(MIRRORED, workers=workers, arguments=arguments)
    _, begin, expected = trained(job, tmp_path / "whole")
    assert begin == 0

    job = job.replace(checkpoints=str(tmp_path / "checkpoints"))
    kill_after(30, job, f"worker-{workers - 1}")
    run, begin, weights = trained(job, tmp_path / "resumed")
    last = int(run.metrics["step"].max())
    assert 30 <= begin < last
    assert begin % 15 == 0
    assert weights.tobytes() == expected.tobytes()
    # The others have no checkpoint of their own, and take the next step with rank 0.
    assert set(run.metrics.dropna(subset=["loss"]).groupby("rank")["step"].min()) == {begin + 1}
    assert set(run.metrics["device"].dropna()) == {"cpu"}

    run, begin, weights = trained(job, tmp_path / "again")
    assert begin == last
    assert run.metrics["loss"].isna().all(), "nothing is left to train"
    assert weights.tobytes() == expected.tobytes()
    with pytest.raises(RunFailed, match=rf"is of step {last}, and this run would end at step "):
        trained(job.replace(arguments={"epochs": epochs - 1}), tmp_path)


def test_a_coordinator_updates_by_every_batch_and_goes_on_from_the_end_of_an_epoch_after_a_kill(tmp_path):
    workers, servers, epochs = 3, 2, 12
    steps = 1500 // workers // 32 * workers  # of an epoch
    arguments = {"epochs": epochs, "checkpoint_steps": 1}
    job = job_of(SERVERS, workers=workers, parameter_servers=servers, arguments=arguments)
    job = job.replace(checkpoints=str(tmp_path / "checkpoints"))
    kill_after(steps, job, "worker-1")
    run, begin, _ = trained(job, tmp_path)
    assert begin in range(steps, epochs * steps, steps)
    tested = run.metrics.dropna(subset=["accuracy"])
    assert tested["step"].tolist() == list(range(begin + steps, epochs * steps + 1, steps))
    assert tested["accuracy"].iloc[-1] > 0.9
    # The weights were there from the start: untrained ones have a loss of 2.3.
    assert run.metrics["test_loss"].dropna().iloc[0] < 1
    devices = run.metrics.dropna(subset=["device"]).set_index("worker")["device"].to_dict()
    assert devices == {f"worker-{index}": "cpu" for index in range(workers)}
    assert set.union(*devices_of(run).values()) == {
        f"/job:ps/task:{server}/device:CPU:0" for server in range(servers)
    }
    message = (
        f"is of step {epochs * steps}, and this run would end at step {(epochs - 1) * steps}: ask for more"
    )
    with pytest.raises(RunFailed, match=message):
        trained(job.replace(arguments={"epochs": epochs - 1}), tmp_path)


# Scripts for Keras 2, as others have them: `fit` under each strategy, and what each rank's weights add up to.
FIT = """
    import numpy as np, tensorflow as tf
    {before}
    x, y = np.random.rand(64, 4).astype("float32"), np.random.rand(64, 1).astype("float32")
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile(tf.keras.optimizers.SGD(learning_rate=0.1), loss="mse")
    model.fit(x, y, batch_size=16, epochs=2, steps_per_epoch=2, verbose=0)
    print(sum(float(np.sum(each)) for each in model.get_weights()))
"""
MIRRORED_FIT = FIT.format(before="strategy = tf.distribute.MultiWorkerMirroredStrategy()")
SERVED_FIT = FIT.format(
    before="""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, "grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
"""
)
HOROVOD_FIT = """
    import numpy as np, tensorflow as tf
    import horovod.tensorflow.keras as hvd
    hvd.init()
    x, y = np.random.rand(64, 4).astype("float32"), np.random.rand(64, 1).astype("float32")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(learning_rate=0.1 * hvd.size()))
    model.compile(optimizer, loss="mse", experimental_run_tf_function=False)
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    calls.append(hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=1))
    model.fit(x, y, batch_size=16, epochs=2, callbacks=calls, verbose=0)
    print(sum(float(np.sum(each)) for each in model.get_weights()))
"""


@pytest.mark.parametrize(
    ("strategy", "script"),
    [
        ("multi_worker_mirrored", MIRRORED_FIT),
        ("parameter_server", SERVED_FIT),
        with_horovod("horovod", HOROVOD_FIT),
    ],
)
def test_a_script_for_keras_2_trains_with_it_unchanged(strategy, script, make_job):
    pytest.importorskip("tf_keras")
    job = make_job(script, strategy=strategy, workers=2, environment={"TF_USE_LEGACY_KERAS": "1"})
    with Local().launch(job) as run:
        lines = run.wait(PATIENCE_SECONDS).logs()
    sums = [line.text for line in lines if line.stream == "stdout" and line.text[-1:].isdigit()]
    assert len(sums) == (1 if strategy == "parameter_server" else 2)
    assert len({*sums}) == 1


def test_a_script_for_keras_2_that_fails_is_answered_with_it(make_job):
    run = Local().launch(make_job(MIRRORED_FIT, strategy="multi_worker_mirrored", workers=2))
    with pytest.raises(RunFailed, match="`workshop install tf-keras`"):
        run.wait(PATIENCE_SECONDS)
