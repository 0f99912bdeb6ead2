"""A planted change is there in its block, and nowhere else."""

import pytest

from workshop_utils.lessons.gauntlet import planting
from workshop_utils.lessons.gauntlet.model import loss_of, ragged, whole_model
from workshop_utils.lessons.gauntlet.trainer import Training
from workshop_utils.parallel.gpt import batch_of, manual

pytestmark = pytest.mark.processes


def loss_here():
    batch = ragged(batch_of(manual(), 0, 4, 16))
    return loss_of(whole_model(), batch).item()


def row(where, old, new, **more):
    change = {"where": where, "old": old, "new": new}
    return planting.row_of(
        {"name": "n", "class": "c", "layout": {}, "options": {}, "says": "", **change, **more}
    )


def test_a_planted_change_is_there_in_its_block_alone_also_under_a_decorator_and_in_several_functions():
    before = loss_here()
    mlp = "workshop_utils.parallel.gpt:MLP.forward", "functional.gelu(self.up(x))", "self.up(x)"
    attention = "workshop_utils.parallel.gpt:causal_attention"
    also = [{"where": attention, "old": "is_causal=True", "new": "is_causal=False"}]
    with planting.planted(row(*mlp)):
        once = loss_here()
    with planting.planted(row(*mlp, also=also)):
        assert len({before, once, loss_here()}) == 3
    assert loss_here() == before

    evaluate = "workshop_utils.lessons.gauntlet.trainer:Training.evaluate"
    with planting.planted(row(evaluate, "self.module.eval()\n", "raise LookupError(self)\n")):
        with pytest.raises(LookupError) as failure:
            Training.evaluate("self", [])
        frame = failure.traceback[-1]
        assert frame.path.name == "trainer.py"
        assert "self.module.eval()" in frame.path.read_text().splitlines()[frame.lineno]
    init = (
        "workshop_utils.parallel.gpt:Head.__init__",
        "super().__init__()",
        "super().__init__()\nself.planted = 1",
    )
    with planting.planted(row(*init)):
        assert whole_model().layers[-1].planted == 1
    assert not hasattr(whole_model().layers[-1], "planted")


@pytest.mark.parametrize(
    ("where", "old", "message"),
    [
        ("gpt:MLP.forward", "gelo", "occurs 0 times"),
        ("gpt:MLP.forward", "self.", "occurs 2 times"),
        ("gpt:Head.__init__", "super().__init__()", "changes which variables"),
        ("gpt:GPTSizes.layers", "4", "is a int"),
    ],
)
def test_what_cannot_be_planted_is_refused_and_nothing_changes(where, old, message):
    before = loss_here()
    with (
        pytest.raises(ValueError, match=message),
        planting.planted(row(f"workshop_utils.parallel.{where}", old, "nn.Module.__init__(self)")),
    ):
        pass
    assert loss_here() == before


def test_of_several_lines_the_later_ones_are_indented_as_the_first():
    source = "def f():\n    if True:\n        a = 1\n\n        b = 2\n    return a\n"
    change = planting.Change("m:f", "a = 1\n\nb = 2\n", "a = 2\nif a:\n    a = 3\n")
    got = planting.replaced(source, change)
    assert got == "def f():\n    if True:\n        a = 2\n        if a:\n            a = 3\n    return a\n"
