"""An emulated device: how long a pass lasts, when each gradient is ready, and that gradients stay what they are.

Time stands still here but for what is slept, so that no assertion is about this machine.
"""

import threading

import pytest
from torch import nn

torch = pytest.importorskip("torch")

from workshop_utils.training import emulated_device  # noqa: E402
from workshop_utils.training.emulated_device import EmulatedDevice  # noqa: E402

pytestmark = pytest.mark.processes

SECONDS, THIRD = 3.0, 1.0


class Clock:
    """Stands in for `time`: in `wait` the host waits, in `work` it computes, in `queue` it waits for a core."""

    def __init__(self):
        self.now = self.used = 100.0
        self.queued = 0.0

    def perf_counter(self):
        return self.now

    def thread_time(self):
        return self.used

    process_time = thread_time

    def sleep(self, seconds):
        self.now += seconds

    wait = sleep

    def work(self, seconds):
        self.now += seconds
        self.used += seconds

    def queue(self, seconds):
        self.now += seconds
        self.queued += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated_device, "time", clock)
    monkeypatch.setattr(emulated_device, "_core_wait_seconds", lambda: clock.queued)
    return clock


@pytest.fixture
def device(clock):
    """A device on which PyTorch computes during the test."""
    from torch.nn.modules import module as hooks

    made = EmulatedDevice(SECONDS)
    before = dict(hooks._global_forward_pre_hooks), dict(hooks._global_forward_hooks)
    emulated_device.attach_to_pytorch(made)
    yield made
    for own, kept in zip((hooks._global_forward_pre_hooks, hooks._global_forward_hooks), before, strict=True):
        own.clear()
        own.update(kept)


def lasts(clock, call):
    """The result of `call`, and how long it took."""
    started = clock.now
    result = call()
    return result, pytest.approx(clock.now - started, abs=1e-6)


def step(clock, model, inputs):
    """How long the forward and the backward pass take."""
    loss, forward = lasts(clock, lambda: model(inputs).square().mean())
    _, backward = lasts(clock, loss.backward)
    return forward.expected, backward.expected


def ready_times(clock, model, inputs):
    """When each parameter's gradient is ready, since the backward pass began."""
    times = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: times.update({name: clock.now}))
        for name, p in model.named_parameters()
    ]
    loss = model(inputs).square().mean()
    started = clock.now
    loss.backward()
    for hook in hooks:
        hook.remove()
    return {name: pytest.approx(moment - started) for name, moment in times.items()}


class Attention(nn.MultiheadAttention):
    def forward(self, inputs):
        return super().forward(inputs, inputs, inputs, need_weights=False)[0]


class Positions(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, count, width))

    def forward(self, inputs):
        return inputs + self.table


def test_forward_takes_a_third_and_backward_two_thirds_and_the_first_forward_at_its_end(device, clock):
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(4, 8)
    assert step(clock, model, inputs) == pytest.approx((0, 3))
    for _ in range(2):
        assert step(clock, model, inputs) == pytest.approx((1, 2))
    assert device.steps == 3


@pytest.mark.parametrize(
    ("layer", "inputs", "multiplications"),
    [
        (nn.Linear(8, 4), (6, 8), 6 * 8 * 4),
        (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 7, 7), 2 * 49 * 3 * 5 * 9),
        (nn.ConvTranspose2d(3, 5, 2, stride=2), (2, 3, 7, 7), 2 * 49 * 3 * 5 * 4),
        (nn.LSTM(4, 6), (5, 2, 4), 5 * 2 * 4 * 6 * (4 + 6)),
        (type("Own", (nn.LSTM,), {})(4, 6), (5, 2, 4), 5 * 2 * 4 * 6 * (4 + 6)),
        (nn.LSTMCell(4, 6), (2, 4), 2 * 4 * 6 * (4 + 6)),
        (Attention(8, 2), (5, 2, 8), 5 * 2 * 4 * 8 * 8),
        (Positions(5, 8), (2, 5, 8), 2 * 5 * 8),
        (nn.BatchNorm1d(8), (6, 8), 6 * 8),
    ],
)
def test_a_layer_s_work_is_what_it_multiplies(device, clock, layer, inputs, multiplications):
    other, inputs = nn.Linear(16, 16, bias=False), torch.ones(inputs)
    own = 2 * multiplications / (multiplications + 256)  # of a backward pass
    for _ in range(2):
        result = layer(inputs)
        result = result[0] if isinstance(result, tuple) else result
        loss = result.sum() + other(torch.ones(1, 16)).sum()
        _, took = lasts(clock, loss.backward)
    assert took == 2
    _, took = lasts(clock, lambda: layer(inputs))
    assert took == pytest.approx(own / 2)


def test_gradients_become_ready_layer_by_layer_and_a_layer_may_state_its_cost(device, clock):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    for costs, ready in (((None, None), 1.5), ((1000, 9000), 1.8)):
        model[0].emulated_cost, model[1].emulated_cost = costs
        ready_times(clock, model, torch.ones(4, 8))
        assert ready_times(clock, model, torch.ones(4, 8)) == {"1.weight": ready, "0.weight": 2.0}


def test_what_the_host_computes_is_part_of_the_device_s_time_and_what_it_waits_for_is_not(device, clock):
    class Waits(nn.Module):
        def __init__(self, spend):
            super().__init__()
            self.spend = spend

        def forward(self, inputs):
            self.spend(0.1)
            return inputs

    layers = [nn.Linear(4, 4) for _ in range(4)]
    step(clock, nn.Sequential(*layers), torch.ones(1, 4))
    for spend, forward in ((clock.work, 1.0), (clock.queue, 1.0), (clock.wait, 1.4)):
        model = nn.Sequential(*(part for layer in layers for part in (Waits(spend), layer)))
        assert step(clock, model, torch.ones(1, 4)) == pytest.approx((forward, 2))


def test_short_waits_add_up_and_lateness_is_a_share_of_what_was_asked_for(clock):
    device = EmulatedDevice(1.0)
    for _ in range(3):
        device.begin_step()
        started = clock.now
        for _ in range(20):
            clock.wait(0.002)
            device.compute(0.01)
        assert clock.now - started == pytest.approx(0.24)
        clock.sleep, sleep = lambda seconds: clock.wait(seconds + 0.01), clock.sleep
        device.compute(0.05)
        clock.sleep = sleep
    assert device.late_share() == pytest.approx(0.01 / 0.25)


def test_a_device_that_another_thread_has_used_meanwhile_did_not_wait(clock):
    device = EmulatedDevice(1.0)
    device.begin_step()
    device.compute(0.1)
    clock.wait(0.05)
    started = clock.now
    thread = threading.Thread(target=device.compute, args=(0.1,))
    thread.start()
    thread.join()
    assert clock.now - started == pytest.approx(0.05)


@pytest.mark.parametrize("order", ["FBFBFBFB", "FFFFBBBB", "FFBFBFBB"])
def test_each_micro_batch_takes_a_step_s_time_in_whatever_order(device, clock, order):
    model, losses = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    step(clock, model, torch.ones(1, 4))
    started = clock.now
    for each in order:
        if each == "F":
            losses.append(model(torch.ones(1, 4)).sum())
        else:
            losses.pop(0).backward()
    assert clock.now - started == pytest.approx(4 * SECONDS)
    assert device.steps == 5


def test_a_model_that_is_called_in_parts_takes_as_long_as_one_call(device, clock):
    parts, relu = [nn.Linear(4, 4) for _ in range(3)], nn.ReLU()  # which, called again, begins no new step
    for _ in range(2):
        result = torch.ones(1, 4)
        started = clock.now
        for part in parts:
            result = relu(part(result))
        nn.MSELoss()(result, torch.zeros(1, 4)).backward()
        assert clock.now - started == pytest.approx(SECONDS)
    assert device.steps == 2


def test_what_a_checkpoint_computes_again_takes_its_forward_time_within_the_backward_pass(device, clock):
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for _ in range(3):
        started, steps = clock.now, device.steps
        checkpoint(model, torch.ones(1, 4), use_reentrant=False).sum().backward()
        # PyTorch stops before the last layer.
        assert clock.now - started == pytest.approx(SECONDS + THIRD / 2)
        assert device.steps == steps + 1


def test_an_evaluation_takes_no_time_and_a_part_of_the_model_its_share(device, clock):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    step(clock, model, torch.ones(1, 8))
    with torch.no_grad():
        assert lasts(clock, lambda: model(torch.ones(1, 8)))[1] == 0
    assert lasts(clock, lambda: model[0](torch.ones(1, 8)))[1] == THIRD / 2


def test_outputs_that_are_parameters_nested_or_several_are_no_trouble(device, clock):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.ones(4)), nn.LSTM(4, 4)

        def forward(self, inputs):
            states, (last, cell) = self.layer(inputs)
            return {"all": (states, [last, cell]), "own": self.weight}

    model = Odd()
    for _ in range(4):
        started = clock.now
        outputs = model(torch.ones(3, 1, 4))
        (outputs["all"][1][0].sum() + outputs["own"].sum()).backward()
        assert clock.now - started == pytest.approx(SECONDS, rel=0.2)


def test_gradients_are_those_of_the_host_also_where_values_are_changed_in_place(device):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)), torch.randn(7, 3)
    model(inputs).sum().backward()
    with torch.no_grad():
        expected = ((inputs @ model[0].weight.T + model[0].bias) > 0).float().sum(0)
    assert torch.allclose(model[2].bias.grad, torch.tensor([7.0]))
    assert torch.allclose(model[0].bias.grad, expected * model[2].weight[0])


def test_a_batch_larger_than_any_before_takes_no_longer_and_a_smaller_one_its_share(device, clock):
    model = nn.Linear(4, 4)
    step(clock, model, torch.ones(2, 4))
    assert step(clock, model, torch.ones(8, 4)) == pytest.approx((1, 2))
    assert step(clock, model, torch.ones(4, 4)) == pytest.approx((0.5, 1))


def test_frozen_layers_take_the_time_of_their_forward_pass(device, clock):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    step(clock, model, torch.ones(1, 4))
    assert step(clock, model, torch.ones(1, 4)) == pytest.approx((1, 1))
