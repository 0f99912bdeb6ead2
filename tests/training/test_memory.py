"""What a step holds in memory is counted operation by operation, and each tensor under its kind."""

import pytest

torch = pytest.importorskip("torch")

from workshop_utils.training import memory  # noqa: E402

pytestmark = pytest.mark.processes

INPUTS, HIDDEN, CLASSES, BATCH = 5, 700, 3, 11
WEIGHTS = 4 * (INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)  # bytes of all parameters
LAYER = 4 * BATCH * HIDDEN  # bytes of the hidden layer's outputs


@pytest.fixture(scope="module")
def rows():
    """Of a second step with momentum, so the optimizer's state is there from the beginning."""
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.rand(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))
    for _ in range(2):
        state = [each["momentum_buffer"] for each in optimizer.state.values()]
        with memory.StepMemory({"parameters": model.parameters(), "state": state}) as seen:
            seen.phase = "forward"
            loss = torch.nn.functional.cross_entropy(model(x), y)
            seen.phase = "backward"
            loss.backward()
            seen.phase = "update"
            optimizer.step()
            optimizer.zero_grad()
    return seen.table()


def test_what_was_there_before_stays_and_nothing_else_does(rows):
    assert all((row["tensors"]["parameters"], row["tensors"]["state"]) == (WEIGHTS, WEIGHTS) for row in rows)
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


def test_the_process_holds_more_than_its_tensors(rows):
    assert all(row["process"] > sum(row["tensors"].values()) for row in rows)
    # The kernel counts pages in batches.
    assert memory.peak_nbytes() > 0.99 * max(row["process"] for row in rows)
