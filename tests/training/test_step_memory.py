"""What a step holds in memory is counted operation by operation, and each tensor under its kind."""

import pytest

torch = pytest.importorskip("torch")

from workshop_utils import ranks  # noqa: E402
from workshop_utils.training import memory  # noqa: E402

pytestmark = pytest.mark.processes

INPUTS, HIDDEN, CLASSES, BATCH = 5, 70_000, 3, 11
WEIGHTS = 4 * (INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)  # bytes of all parameters
LAYER = 4 * BATCH * HIDDEN  # bytes of the hidden layer's outputs


def training(hidden, batch):
    """A step with momentum, whose state appears in the first."""
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.rand(batch, INPUTS), torch.randint(CLASSES, (batch,))

    def step(seen):
        seen.phase = "forward"
        loss = torch.nn.functional.cross_entropy(model(x), y)
        seen.phase = "backward"
        loss.backward()
        seen.phase = "update"
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@pytest.fixture(scope="module")
def rows():
    """Of a process of its own, whose memory nothing else has changed."""
    arguments = {"training": training, "sizes": (HIDDEN, BATCH), "warm_up": (8, 2)}
    return ranks.on_ranks(1, memory.follow, arguments, framework="torch").values[0]


def test_what_was_there_before_stays_and_nothing_else_does(rows):
    assert all(
        (row["tensors"]["parameters"], row["tensors"]["optimizer's state"]) == (WEIGHTS, WEIGHTS)
        for row in rows
    )
    assert sum(rows[-1]["tensors"].values()) == pytest.approx(2 * WEIGHTS, abs=100)  # and the loss


def test_the_forward_pass_keeps_relu_s_output_and_drops_its_input(rows):
    forward = [row["tensors"] for row in rows if row["phase"] == "forward"]
    assert max(each.get("temporary", 0) for each in forward) == LAYER
    assert "temporary" not in forward[-1]
    # The hidden layer, the outputs and their logarithms; and the loss with what its gradient needs.
    assert forward[-1]["activations"] == pytest.approx(LAYER + 2 * 4 * BATCH * CLASSES, abs=100)


def test_the_peak_is_relu_s_backward_pass(rows):
    peak = max(rows, key=lambda row: sum(row["tensors"].values()))
    assert (peak["phase"], peak["operation"]) == ("backward", "threshold_backward")
    assert peak["tensors"]["gradients of activations"] == 2 * LAYER


def test_gradients_of_parameters_are_told_from_those_of_activations(rows):
    last = [row["tensors"] for row in rows if row["phase"] == "backward"][-1]
    assert last["gradients"] == pytest.approx(WEIGHTS, abs=100)  # and the loss's own, a number
    assert "gradients of activations" not in last


def test_the_process_holds_what_its_tensors_do(rows):
    # The kernel counts pages in batches.
    assert all(row["process"] > 0.95 * sum(row["tensors"].values()) for row in rows)
