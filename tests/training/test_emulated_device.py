"""An emulated device: how long a pass lasts, when each gradient is ready, and that gradients stay what they are."""

import time
from contextlib import contextmanager

import pytest
from torch import nn

torch = pytest.importorskip("torch")

from workshop_utils.training import emulated_device  # noqa: E402
from workshop_utils.training.emulated_device import FORWARD, EmulatedDevice  # noqa: E402

SECONDS = 0.12


@pytest.fixture
def device():
    """A device on which PyTorch computes during the test."""
    from torch.nn.modules import module as hooks

    made = EmulatedDevice(SECONDS)
    before = dict(hooks._global_forward_pre_hooks), dict(hooks._global_forward_hooks)
    emulated_device.attach_to_pytorch(made)
    yield made
    for own, kept in zip((hooks._global_forward_pre_hooks, hooks._global_forward_hooks), before, strict=True):
        own.clear()
        own.update(kept)


@contextmanager
def lasting(seconds):
    started = time.perf_counter()
    yield
    assert seconds <= time.perf_counter() - started < seconds + 0.06


def ready_times(model, inputs):
    """When each parameter's gradient is ready, in seconds since the backward pass began."""
    times = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: times.update({name: time.perf_counter()}))
        for name, p in model.named_parameters()
    ]
    loss = model(inputs).square().mean()
    started = time.perf_counter()
    loss.backward()
    for hook in hooks:
        hook.remove()
    return {name: moment - started for name, moment in times.items()}


def test_forward_takes_a_third_and_backward_two_thirds_from_the_first_step_on(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    for _ in range(3):
        with lasting(FORWARD * SECONDS):
            loss = model(torch.ones(4, 8)).square().mean()
        with lasting((1 - FORWARD) * SECONDS):
            loss.backward()
    assert device.steps == 3
    assert 0 < device.host_share() < 1


def test_gradients_become_ready_layer_by_layer_in_proportion_to_their_work(device):
    small, large = nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False)
    model = nn.Sequential(small, large)
    ready_times(model, torch.ones(4, 8))
    ready = ready_times(model, torch.ones(4, 8))
    backward = (1 - FORWARD) * SECONDS
    assert ready["1.weight"] == pytest.approx(0.75 * backward, abs=0.02)
    assert ready["0.weight"] == pytest.approx(backward, abs=0.02)


def test_a_layer_may_state_its_cost(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].emulated_cost, model[1].emulated_cost = 1, 9
    ready_times(model, torch.ones(1, 8))
    assert ready_times(model, torch.ones(1, 8))["1.weight"] == pytest.approx(0.9 * 2 / 3 * SECONDS, abs=0.02)


def test_gradients_are_those_of_the_host(device):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)), torch.randn(7, 3)
    model(inputs).sum().backward()
    with torch.no_grad():
        expected = ((inputs @ model[0].weight.T + model[0].bias) > 0).float().sum(0)
    assert torch.allclose(model[2].bias.grad, torch.tensor([7.0]))
    assert torch.allclose(model[0].bias.grad, expected * model[2].weight[0])


def test_a_second_micro_batch_takes_its_time_although_all_forward_passes_come_first(device):
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    losses = [model(torch.ones(1, 4)).sum() for _ in range(2)]
    for loss in losses:
        time.sleep(0.02)
        with lasting((1 - FORWARD) * SECONDS):
            loss.backward()


def test_an_evaluation_takes_no_time_and_a_part_of_the_model_its_share(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model(torch.ones(1, 8))
    with lasting(0), torch.no_grad():
        model(torch.ones(1, 8))
    with lasting(FORWARD * SECONDS / 2):
        model[0](torch.ones(1, 8))


def test_a_forward_pass_that_fails_does_not_confuse_the_next(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 7))
    for _ in range(2):
        with lasting(FORWARD * SECONDS):
            model(torch.ones(1, 8))


def test_jitter_changes_each_step_and_equal_seeds_draw_equal_factors():
    def seconds(seed):
        device = EmulatedDevice(0.02, jitter=0.5, seed=seed)
        taken = []
        for _ in range(4):
            started = time.perf_counter()
            device.begin_step()
            device.compute(1.0)
            taken.append(time.perf_counter() - started)
        return taken

    first, again, other = seconds(1), seconds(1), seconds(2)
    assert first == pytest.approx(again, rel=0.2, abs=0.004)
    assert first != pytest.approx(other, rel=0.2, abs=0.004)
    assert len({round(each, 3) for each in first}) == 4


def test_two_passes_tell_nothing_of_the_host():
    device = EmulatedDevice(0.02)
    device.begin_step()
    device.begin_step()
    assert device.host_share() == 0
