"""Figures to play with: each is drawn offline, says in words what it shows, is small, and computes what is taught."""

import base64
import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workshop_utils.comm import threads
from workshop_utils.comm.halving_doubling import halving_doubling_seconds
from workshop_utils.comm.ring import ring_all_reduce, ring_seconds
from workshop_utils.parallel import context, experts, gpt, tensor
from workshop_utils.plots import playable
from workshop_utils.plots.communication import contributions
from workshop_utils.scaling.cost import recursive_doubling_seconds

FUNCTIONS = {name: getattr(math, name) for name in ("ceil", "floor", "log", "pow", "sqrt")}
FUNCTIONS |= {"LN2": math.log(2), "max": max, "min": min, "round": round}
FUNCTIONS["format"] = lambda number, pattern: {".2r": two_digits}[pattern](number)
NAMES = sorted(path.stem for path in playable.FOLDER.glob("*.json"))
MOST_NBYTES = 10_000  # of a specification


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_a_picture_words_and_labelled_sliders(name):
    data, about = playable.figure(name)._repr_mimebundle_()
    specification = data[playable.SPECIFICATION]
    assert set(data) == {playable.SPECIFICATION, "image/png", "text/plain"}  # never text/html
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert len(about["image/png"]["alt"]) > 60
    assert len(json.dumps(specification)) < MOST_NBYTES
    sliders = [parameter["bind"] for parameter in specification["params"] if "bind" in parameter]
    assert sliders
    assert all(slider["name"].strip() for slider in sliders)
    assert specification["$schema"].endswith("vega-lite/v5.json")


def test_an_unknown_figure_names_those_there_are():
    with pytest.raises(ValueError, match="no figure 'nothing'"):
        playable.figure("nothing")


def test_no_text_of_a_figure_ends_or_hides_its_script():
    page = playable.html({"title": "</script><!--<script>"}, "words", "here")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<!--" not in page
    source = page.partition('vegaEmbed("#here", ')[2].partition(", {actions")[0]
    assert json.loads(source) == {"title": "</script><!--<script>"}


def in_python(expression):
    """A Vega expression of numbers, functions and conditions, as Python has it."""
    condition, is_conditional, branches = expression.replace("&&", "and").partition(" ? ")
    then, _, otherwise = branches.partition(" : ")
    return f"({then} if {condition} else {in_python(otherwise)})" if is_conditional else condition


def two_digits(number):
    """A number to two significant digits, as d3's `.2r` has it."""
    rounded = float(f"{number:.1e}")
    return f"{rounded:.{max(1 - math.floor(math.log10(rounded)), 0)}f}"


def calculated(transforms, settings, **data):
    """A row's fields after the transforms, or None if a filter drops it."""
    row = SimpleNamespace(**data)
    for transform in transforms:
        scope = FUNCTIONS | settings | {"datum": row}
        if "calculate" in transform:
            setattr(row, transform["as"], eval(in_python(transform["calculate"]), scope))
        elif "filter" in transform and not eval(in_python(transform["filter"]), scope):
            return None
    return vars(row)


@pytest.mark.parametrize(
    ("buckets", "goodput", "latency"), [(1, 10, 50), (4, 10, 50), (100, 8, 100), (7, 50, 0)]
)
def test_all_reduces_of_buckets_wait_for_their_bucket_and_for_the_one_before(buckets, goodput, latency):
    (above, below) = playable.figure("buckets").specification["vconcat"]
    backward = 120
    settings = {"t": backward, "B": goodput, "latency": latency, "chosen": buckets}
    seconds = 2 * 7 * latency / 1e6 + 2 * 7 / 8 * (100e6 / buckets) / (goodput * 1e9 / 8)
    end = 0.0
    for bucket in range(1, buckets + 1):
        start = max(bucket / buckets * backward, end)
        end = start + 1000 * seconds
        row = calculated(below["transform"], settings, i=bucket)
        assert (row["start"], row["end"]) == pytest.approx((start, end))
    exposed = calculated(above["transform"], settings, m=buckets)["exposed"]
    assert exposed == pytest.approx(end - backward)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_grid_holds_what_a_real_ring_held_after_every_step(size):
    ring = playable.figure("ring").specification["transform"]
    held = np.count_nonzero(contributions(ring_all_reduce, size), axis=3)
    for step in range(2 * size - 1):
        rows = [calculated(ring, {"N": size, "step": step}, cell=cell) for cell in range(64)]
        shown = {(row["rank"], row["chunk"]): row for row in rows if row}
        assert len(shown) == size**2
        for (rank, chunk), row in shown.items():
            assert row["contributions"] == held[rank, step, chunk]
            assert row["arrived"] == (step > 0 and held[rank, step, chunk] != held[rank, step - 1, chunk])


FORMS = {
    "ring": ring_seconds,
    "recursive doubling": recursive_doubling_seconds,
    "halving-doubling": halving_doubling_seconds,
}


@pytest.mark.parametrize("size", [4, 7, 8, 12, 100, 256])
def test_the_curves_are_the_closed_forms(size):
    settings = {"N": size, "gigabits": 10, "microseconds": 20}
    for power in (2, 4.5, 6, 9):
        row = calculated(playable.figure("collectives").specification["transform"], settings, power=power)
        for name, seconds in FORMS.items():
            assert row[name] == pytest.approx(seconds(size, 10**power, 20e-6, 1.25e9))
        assert row["least"] == min(row[name] for name in FORMS)


ROOFLINE = playable.figure("roofline").specification
H100 = {"C": 989, "W": 50, "L": 4}


def all_reduced(communicator, array):
    """The bytes that a rank sends to all-reduce an array of values of two bytes."""
    ring_all_reduce(communicator, array.copy())
    return communicator.traffic.bytes_sent.sum()


def placed(cut, **settings):
    """Where the roofline has a cut."""
    return calculated(ROOFLINE["transform"], H100 | settings, cut=cut)


@pytest.mark.parametrize(
    ("ranks", "width", "hidden", "tokens", "blocks"), [(2, 12, 24, 5, 1), (3, 6, 48, 9, 4)]
)
def test_the_roofline_has_the_flop_per_byte_that_are_counted(ranks, width, hidden, tokens, blocks):
    settings = {"N": ranks, "T": tokens, "F": hidden, "L": blocks}
    weights, activations = np.zeros((2, width, hidden), "i2"), np.zeros((tokens, width), "i2")
    forward = 2 * (2 * tokens * width * hidden)  # two products, a multiplication and an addition each
    flop = forward + 2 * forward  # backward: the gradients of both factors of each product
    per_array = [
        np.mean(threads.run(ranks, functools.partial(all_reduced, array=each)))
        for each in (weights, activations)
    ]
    assert placed("data", **settings)["I"] == pytest.approx(flop / ranks / per_array[0])
    both = 2 * per_array[1]  # of activations, and of their gradient
    assert placed("tensor", **settings)["I"] == pytest.approx(flop / ranks / both)
    assert placed("pipeline", **settings)["I"] == pytest.approx(blocks * flop / (2 * activations.nbytes))


def test_a_cut_lies_between_all_overlapping_and_nothing():
    """A GPU computes and sends at the same time, or in turn; its share is that of computing in all the time."""
    for link, shares in (
        (50, ("59 to 96", "35 to 53", "97 to 100")),
        (450, ("93 to 100", "83 to 100", "100")),
    ):
        for cut, expected in zip(("data", "tensor", "pipeline"), shares, strict=True):
            row = placed(cut, W=link, N=8, T=131_072, F=49_152)
            computing, sending = 1 / 989e12, 1 / (row["I"] * link * 1e9)  # seconds per FLOP
            assert row["all"] == pytest.approx(computing / max(computing, sending))
            assert row["none"] == pytest.approx(computing / (computing + sending))
            forward, backward = computing / 3, 2 * computing / 3
            best = {
                "data": forward + max(backward, sending),
                "tensor": max(forward, sending / 2) + max(backward, sending / 2),
                "pipeline": max(computing, sending),
            }
            assert row["top"] == pytest.approx(computing / best[cut])
            assert row["words"] == f"{cut} {expected}%"
            assert link != H100["W"] or f"{expected}%" in ROOFLINE["description"]


def test_at_the_ridge_the_roof_bends_and_a_cut_without_overlap_attains_half():
    ridge = calculated(ROOFLINE["layer"][1]["transform"][:4], H100)
    assert (ridge["I"], ridge["all"], ridge["none"]) == (19_780, 1, 0.5)
    limits = {each["name"]: each["bind"] for each in ROOFLINE["params"]}
    assert limits["N"]["min"] == 2  # one rank sends nothing


@pytest.mark.parametrize(("pick", "end", "other"), [(min, "min", "max"), (max, "max", "min")])
def test_every_setting_of_the_roofline_is_on_its_axes(pick, end, other):
    binds = {each["name"]: each["bind"] for each in ROOFLINE["params"]}
    settings = {name: pick(binds[name]["options"]) for name in "CW"}
    settings |= {name: binds[name][end] for name in "TFL"} | {"N": binds["N"][other]}
    for cut in ("data", "tensor", "pipeline"):
        row = placed(cut, **settings)
        for axis, values in (("x", [row["I"]]), ("y", [row["none"], row["all"]])):
            low, high = ROOFLINE["encoding"][axis]["scale"]["domain"]
            assert all(low <= value <= high for value in values)


CUTS = playable.figure("cuts").specification


@pytest.mark.parametrize(
    ("ranks", "width", "tokens", "k", "grouped"), [(2, 2048, 32, 1, 1), (8, 4096, 640, 3, 2)]
)
def test_cuts_send_the_bytes_of_closed_forms_for_the_flop_of_a_block(ranks, width, tokens, k, grouped):
    with torch.device("meta"):
        block = gpt.Block(gpt.GPTSizes(width=width, heads=width // 128))
    weights = sum(each.numel() for each in block.parameters() if each.dim() == 2)
    scores = tokens**2 / 2  # the mask hides half
    flop = 3 * (2 * weights * tokens + 2 * 2 * width * scores)
    activation, own = 2 * tokens * width, tokens // ranks
    keys, rows = activation // ranks // grouped, torch.full((ranks, ranks), own * k // ranks)
    of_query, of_keys = (context.ulysses_bytes_sent(ranks, each) / 2 for each in (activation // ranks, keys))
    sent = {
        "tensor": tensor.block_bytes_sent(ranks, activation),
        "ring": context.ring_attention_bytes_sent(ranks, keys),
        "Ulysses": of_query + of_keys,
        "experts": experts.expert_bytes_sent(rows, 2 * width)[0].item() - 8 * ranks * (ranks - 1),
        "pipeline": 2 * activation / (16 / ranks),  # of one layer of a stage
    }
    settings = {"s": tokens, "h": width, "g": grouped, "k": k, "L": 16, "W": 50}
    for cut, nbytes in sent.items():
        of_rank = flop if cut == "pipeline" else flop / ranks
        row = calculated(CUTS["transform"], settings, cut=cut, N=ranks)
        assert row["ratio"] == pytest.approx((nbytes / 50e9) / (of_rank / 989e12)), cut


def test_cuts_are_those_of_large_models_of_today():
    llama = {"s": 131_072, "h": 16_384, "g": 16, "k": 1, "L": 126}
    deepseek = {"s": 4096, "h": 7168, "g": 1, "k": 8, "L": 61}
    for settings, cut, ranks, link, expected in (
        (llama, "tensor", 8, 450, 0.13),
        (llama, "tensor", 8, 50, 1.1),
        (llama, "ring", 16, 50, 0.11),
        (llama | {"g": 1}, "ring", 16, 50, 1.8),
        (deepseek, "experts", 64, 50, 2.3),
        (deepseek | {"k": 4}, "experts", 64, 50, 1.2),
        (deepseek, "tensor", 8, 160, 1.3),
    ):
        row = calculated(CUTS["transform"], settings | {"W": link}, cut=cut, N=ranks)
        assert float(f"{row['ratio']:.2g}") == expected, (cut, ranks, link)
