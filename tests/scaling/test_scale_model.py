"""A scale model of a cluster: closed forms against hand arithmetic, what is emulated, and what is measured."""

import math
from itertools import accumulate
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.comm.topology import Link
from workshop_utils.jobs import JobError
from workshop_utils.network import availability, devices
from workshop_utils.network.devices import MOST_HOST_SHARE
from workshop_utils.scaling import experiment, scale_model
from workshop_utils.scaling.experiment import Store
from workshop_utils.scaling.layers import MODELS, layers
from workshop_utils.scaling.scale_model import STRATEGIES, ScaleModel

SERVER = "workshop_parameter_server"
VGG = 553_430_176  # bytes of VGG-16's gradients
SPEED = 130.9  # images a second of a P100
ALONE = 64 / SPEED  # seconds for 64 of them


def vgg(strategy="ring", cluster="p100-25g", **changes):
    return ScaleModel.of(cluster, "vgg16", strategy, **changes)


def ready(*names):
    """When the gradients of VGG-16's layers `names`, its last, are there, in a step of one second."""
    table = layers("vgg16")
    return 1 / 3 + 2 / 3 * sum(each.flops for each in table if each.name in names) / sum(
        each.flops for each in table
    )


# Closed forms


@pytest.mark.parametrize(
    ("strategy", "workers", "link", "seconds"),
    [
        ("ring", 4, Link(1e-3, 1e9), 1 + 1.5 * VGG / 1e9 + 6e-3),  # 2 (N − 1) / N, after the backward pass
        (
            SERVER,
            4,
            Link(0, 1e9),
            1 + 2 * 4 * VGG / 1e9,
        ),  # its link carries every worker's push, then every pull
        (SERVER, 1, Link(0, 1e9), 1 + 2 * VGG / 1e9),  # the server is another machine
        *((alone, 1, Link(0, 1e9), 1) for alone in ("ring", "torch_ddp", "horovod")),
        # The convolutions' backward pass hides all buckets but the last: conv1 to conv5, of 555,328 parameters.
        ("torch_ddp", 2, Link(0, 1e9), 1 + 4 * 555_328 / 1e9),
        # A bucket is sent when it is full, that of fc3 first, since it need hold 1 MiB only; then the link never rests.
        # Each is an all-reduce with a latency of its own. DDP: fc3, fc2, fc1, and three buckets of convolutions.
        ("torch_ddp", 2, Link(1e-3, 1e8), ready("fc3") + VGG / 1e8 + 6 * 2e-3),
        # Horovod: fc3, while which is sent fc2 becomes ready; fc1, too large to join it; all convolutions.
        ("horovod", 2, Link(1e-3, 1e8), ready("fc3") + VGG / 1e8 + 4 * 2e-3),
    ],
)
def test_a_step_takes_what_one_calculates_by_hand(strategy, workers, link, seconds):
    assert vgg(strategy).exchanged(1.0, workers, link) == pytest.approx(seconds, rel=1e-9)


def test_a_prediction_has_the_cluster_s_steps_throughput_and_efficiency():
    table = vgg().predict([1, 4])
    step = ALONE + 1.5 * VGG / (0.75 * 25e9 / 8) + 6 * 30e-6
    assert table["gradient_nbytes"].tolist() == [VGG, VGG]
    assert table["device_seconds"].tolist() == pytest.approx([ALONE] * 2)
    assert table["step_seconds"].tolist() == pytest.approx([ALONE, step])
    assert table["throughput"].tolist() == pytest.approx([SPEED, 4 * 64 / step])
    assert table["efficiency"].tolist() == pytest.approx([1, ALONE / step])
    assert vgg(batch=32).step_seconds == pytest.approx(ALONE / 2)
    assert vgg(faster_link=10).link_of(4) == pytest.approx(10 * 0.75 * 25e9 / 8)


def test_servers_on_every_machine_send_what_a_ring_of_machines_sends_once_each_has_summed_its_gradients():
    model = vgg(SERVER, cluster="p100x4-25g")
    inside = 2 * 3 / 4 * VGG / (88.8e9 / 8)
    across = 2 * 3 / 4 * VGG / (0.54 * 25e9 / 8) + 6 * 30e-6
    assert model.sharded_servers_seconds(1) == ALONE
    assert model.sharded_servers_seconds(4) == pytest.approx(ALONE + inside)
    assert model.sharded_servers_seconds(16) == pytest.approx(ALONE + inside + across)


def test_the_headline_has_three_lines_a_model_and_points_of_those_that_are_measured(monkeypatch):
    def measure(model, workers, store):
        return model.predict(workers).assign(predicted=0.5)

    monkeypatch.setattr(ScaleModel, "measure", measure)
    rows = scale_model.headline(None, [4, 8])
    ways = ["ring", SERVER, "sharded_servers"]
    assert rows.groupby(["model", "strategy"])["workers"].agg(list).to_dict() == {
        (model, way): [1, 2, 3, 4, 8] for model in ("resnet101", "vgg16") for way in ways
    }
    measured = rows.dropna(subset=["efficiency"])
    assert measured.groupby("strategy")["workers"].agg(list).to_dict() == {
        way: [4, 8] * 2 for way in ways[:2]
    }
    assert measured["efficiency"].tolist() == measured["predicted"].tolist()


def test_a_machine_of_several_devices_exchanges_inside_and_several_by_a_ring_through_all():
    model = vgg(cluster="p3.16xlarge")
    table = model.predict([1, 4, 8, 16])
    alone, inside = model.step_seconds, 2 * 7 / 8 * VGG / 125e9
    pushed = 2 * 2 * VGG / (0.9 * 25e9 / 8) + 2 * 30e-6
    assert vgg(SERVER, "p3.16xlarge").predict([16])["step_seconds"][0] == pytest.approx(
        alone + inside + pushed
    )
    across = 2 * 15 / 16 * VGG / (0.9 * 25e9 / 8) + 2 * 30e-6
    assert table["machines"].tolist() == [1, 1, 1, 2]
    assert table["step_seconds"].tolist() == pytest.approx(
        [alone, alone + 1.5 * VGG / 125e9, alone + inside, alone + across]
    )
    assert vgg(SERVER, "p3.16xlarge").link_of(16) == pytest.approx(0.9 * 25e9 / 8)  # a machine pushes once
    with pytest.raises(JobError, match="workers is 12;"):
        model.predict([12])


def test_what_nobody_published_is_estimated_from_another_device_or_from_the_peak():
    scaled, worked_out = vgg(cluster="p3.2xlarge"), ScaleModel.of("p3.2xlarge", "gpt-1b", batch=2)
    assert scaled.step_seconds == pytest.approx(ALONE * 10.6 / 15.7)
    assert vgg(cluster="p3.2xlarge", batch=32).step_seconds == pytest.approx(scaled.step_seconds / 2)
    assert "estimated from one P100: Horovod" in str(scaled)
    flops = 3 * 2 * sum(each.flops for each in layers("gpt-1b"))
    assert worked_out.step_seconds == pytest.approx(flops / (0.4 * 15.7e12))
    assert "estimated from the device's peak" in str(worked_out)
    assert "scaled from a batch of 64" in str(ScaleModel.of("p100-25g", "resnet50", batch=32))
    with pytest.raises(
        JobError, match="how fast one A100 40 GB trains it is not known here: take bert-base or gpt-1b"
    ):
        ScaleModel.of("p4d.24xlarge", "resnet50")


# What is emulated


@pytest.mark.parametrize("model", MODELS)
def test_neighbouring_layers_are_merged_and_all_totals_and_large_layers_stay(model):
    original, merged = layers(model), ScaleModel.of("p100-25g", model).table
    assert len(merged) <= 24
    for number in ("flops", "parameters"):
        before, after = ([*accumulate(getattr(each, number) for each in rows)] for rows in (original, merged))
        assert set(after) <= set(before)  # so the order stays, too
        assert after[-1] == before[-1]
    large = {each.parameters for each in original if each.parameters > before[-1] / 20}
    assert large <= {each.parameters for each in merged}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("cluster", "workers"), [("p100-25g", 2), ("p2.8xlarge", 16)])
def test_an_emulated_step_has_the_ratios_of_the_cluster_s(strategy, cluster, workers):
    model = vgg(strategy, cluster)
    emulation = model.emulation(workers, 1e9)
    (seconds,) = model.predict([workers])["step_seconds"]
    assert emulation.expected_seconds / emulation.stretch == pytest.approx(seconds, rel=2e-3)  # no latency
    setting = emulation.setting()
    elements, costs = (
        [*map(float, setting.job.arguments[name].split(","))] for name in ("elements", "costs")
    )
    assert emulation.nbytes == 4 * (sum(elements) + 650)
    shares = [4 * each.parameters / VGG for each in layers("vgg16")]
    # Whole rows of 64.
    assert [4 * count / emulation.nbytes for count in elements] == pytest.approx(shares, abs=0.012)
    assert costs == pytest.approx([each.flops for each in layers("vgg16")], rel=1e-5)
    assert (setting.job.strategy, setting.job.workers) == (strategy, 2)
    device_seconds = float(setting.device.seconds.removesuffix("ms")) / 1000
    rate = setting.network.goodput
    assert device_seconds * rate / emulation.nbytes == pytest.approx(
        emulation.step_seconds * model.link_of(workers) / VGG, rel=1e-5
    )


@pytest.mark.parametrize(
    ("model", "workers", "forwarded", "binding"),
    [("vgg16", 1, 1e9, 0), ("resnet50", 2, 1e9, 1), ("vgg16", 16, 1e9, 2), ("vgg16", 4, 1e6, 3)],
)
def test_time_is_stretched_until_the_device_the_exchange_the_host_and_the_links_all_have_enough(
    model, workers, forwarded, binding, monkeypatch
):
    monkeypatch.setattr(scale_model, "cores", lambda: 2)
    emulation = ScaleModel.of("p100-25g", model).emulation(workers, forwarded)
    device_seconds = emulation.stretch * emulation.step_seconds
    plenty = [  # how many times what is needed
        device_seconds / scale_model.LEAST_DEVICE_SECONDS,
        (emulation.expected_seconds - device_seconds) / scale_model.LEAST_EXCHANGE_SECONDS,
        MOST_HOST_SHARE * 2 * emulation.expected_seconds / (workers * scale_model.CPU_SECONDS),
        forwarded / 2 / (workers * emulation.bytes_per_second),
    ]
    if workers == 1:
        del plenty[1]
    assert plenty[binding] == min(plenty) == pytest.approx(1, rel=0.01)
    slower = emulation.model.emulation(workers, forwarded, slower=3)
    assert slower.stretch == pytest.approx(3 * emulation.stretch)


def test_an_exchange_too_short_to_matter_stretches_nothing_and_a_step_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(scale_model, "cores", lambda: 1000)
    near = vgg(faster_link=1e4).emulation(2, 1e12)
    assert near.stretch * near.step_seconds == pytest.approx(scale_model.LEAST_DEVICE_SECONDS)
    with pytest.raises(JobError, match="a step of 64 workers would take"):
        vgg().emulation(64, 1e9, slower=1000)


# What is measured


@pytest.fixture
def runs(monkeypatch):
    """The settings that were run: instead of processes, steps of three times the device's.

    `runs.outcomes` are those of the runs in turn; the last is that of all others.
    """

    class Runs(list):
        def __init__(self):
            self.outcomes = [{}]

        def measure_once(self, setting):
            self.append(setting)
            device_seconds = float(setting.device.seconds.removesuffix("ms")) / 1000
            row = {"state": "succeeded", "reason": "", "remark": "", "host_share": 0.05}
            is_alone = setting.job.workers == 1 and setting.job.strategy != SERVER
            row["step_seconds"] = (1 if is_alone else 3) * device_seconds
            outcome = self.outcomes[min(len(self), len(self.outcomes)) - 1]
            return setting.described() | row | outcome

    started = Runs()
    monkeypatch.setattr(experiment, "measure_once", started.measure_once)
    monkeypatch.setattr(scale_model, "forwarded_bytes_per_second", lambda store: 1e9)
    return started


@pytest.mark.processes
def test_what_was_measured_is_scaled_back_kept_and_not_run_again(runs, tmp_path):
    model = vgg()
    table = model.measure([1, 4], Store(tmp_path))
    assert table["efficiency"].tolist() == pytest.approx([1, 1 / 3], rel=1e-4)
    assert table["throughput"].tolist() == pytest.approx([SPEED, 4 * SPEED / 3], rel=1e-4)
    assert table["predicted"].tolist() == model.predict([1, 4])["efficiency"].tolist()
    assert [setting.job.workers for setting in runs] == [1, 4]
    assert model.measure([1, 4], Store(tmp_path)).equals(table)
    assert len(runs) == 2


def test_what_this_machine_forwards_is_measured_once(tmp_path, monkeypatch):
    seconds = iter([[0.25, 0.5]])
    monkeypatch.setattr(scale_model, "on_ranks", lambda *_, **__: SimpleNamespace(values=next(seconds)))
    monkeypatch.setattr(scale_model, "machine", lambda: ("this one",))  # asking for it may start a process
    for _ in range(2):
        assert scale_model.forwarded_bytes_per_second(Store(tmp_path)) == 4 * scale_model.FORWARDED_NBYTES


@pytest.mark.processes
def test_a_run_that_keeps_the_host_busy_is_stretched_and_measured_again(runs, tmp_path):
    runs.outcomes = [{"host_share": 0.2, "remark": "busy"}, {}]
    table = vgg().measure([4], Store(tmp_path))
    first, second = (float(setting.device.seconds.removesuffix("ms")) for setting in runs)
    assert second == pytest.approx(2.4 * first, rel=1e-4)
    assert table["host_share"].tolist() == [0.05]
    assert table["stretch"].tolist() == pytest.approx([second / 1000 / ALONE], rel=1e-4)
    assert table["efficiency"].tolist() == pytest.approx([1 / 3])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("outcome", "started", "message"),
    [
        ({"host_share": 0.3, "remark": "all was busy"}, 3, ", however slow their devices: all was busy"),
        ({"state": "failed", "reason": "rank 1 was killed"}, 1, ": rank 1 was killed"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(runs, tmp_path, outcome, started, message):
    runs.outcomes = [outcome]
    with pytest.raises(JobError, match=f"4 workers could not be measured{message}"):
        vgg().measure([4], Store(tmp_path))
    assert len(runs) == started
    runs.outcomes = [{}]  # neither is kept
    vgg().measure([4], Store(tmp_path))
    assert len(runs) == started + 1


def command(*words):
    result = CliRunner().invoke(cli.app, ["scale-model", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.processes
def test_the_command_predicts_or_measures_and_says_what_is_imitated(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    words = ["p100-25g", "--model", "vgg16", "--workers", "1,4", "--strategy", "torch_ddp"]
    predicted = command(*words, "--faster-link", "10", "--predict")
    assert "1 × P100 a machine; 250 Gbit/s between machines" in predicted
    assert "vgg16: 16 layers, 553.4 MB of gradients, 411.1 MB of them in fc1" in predicted
    assert "torch_ddp: sends pieces of about 25 MiB" in predicted
    assert not runs
    assert "4 × " in command(*words)
    assert len(runs) == 2


@pytest.mark.processes
@pytest.mark.skipif(availability() == "none", reason="this machine makes no network namespaces")
@pytest.mark.parametrize(
    ("name", "strategy", "workers"),
    [("vgg16", "ring", [3]), ("vgg16", SERVER, [3]), ("alexnet", "torch_ddp", [2])],
)
def test_real_steps_are_not_over_before_their_closed_form(
    name, strategy, workers, tmp_path, monkeypatch, nothing_is_left
):
    for share in ("MOST_HOST_SHARE", "MOST_LATE_SHARE"):  # so that a busy machine repeats nothing
        monkeypatch.setattr(devices, share, math.inf)
    model = ScaleModel.of("p100-25g", name, strategy)
    table = model.measure(workers, Store(tmp_path))
    (emulation,) = (model.emulation(count, 1e9) for count in workers)
    ratio = table["step_seconds"][0] * emulation.stretch / emulation.expected_seconds
    assert ratio > 0.94  # how much later depends on what else this machine does
