"""The checks of exercises never raise, say what is wrong, and take every right answer.

Wrong answers to each exercise, and what is said of them, are in guards/wrong_answers.yaml; here is what all share.
"""

import os
import resource
import shutil
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from workshop_utils.comm.communicator import chunk
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from workshop_utils.comm.subset import Subset
from workshop_utils.launchers.local import hang
from workshop_utils.lessons import checks
from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    contexts_and_experts,
    failures,
    model_parallel,
    one_worker,
    parallelism,
    parameter_server,
    processes,
    ring,
    tensorflow,
    welcome,
)
from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup, karp_flatt
from workshop_utils.training import checkpoints

# What all checks share


def unwritten(serial_fraction, workers):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [None, ..., lambda serial, workers: ..., lambda s, n: None, unwritten])
def test_what_is_not_written_yet_is_not_wrong(answer):
    assert one_worker.laws([answer] * 3).state == "not yet"


def test_the_three_laws_may_come_in_a_list():
    assert one_worker.laws([amdahl_speedup, gustafson_speedup, karp_flatt]).state == "right"

    def unwritten(s, workers):
        return s / {}[workers]

    assert "(line 2 of your `unwritten`)" in one_worker.laws([unwritten, gustafson_speedup, karp_flatt]).text


def test_rules_are_run_if_they_are_right_and_otherwise_ours(capsys):
    def held(state, worker, bound):
        return all(state.pushes[worker] <= state.pushes[each] + bound for each in state.active)

    def fresh(state, worker):
        return state.version == state.has[worker]

    assert parameter_server.rules_to_run((held, fresh)) == (held, fresh)
    assert capsys.readouterr().out == ""
    ours = parameter_server.rules_to_run((held, lambda state, worker: ...))
    assert parameter_server.rules(ours).state == "right"
    assert "ours is run" in capsys.readouterr().out


def test_a_new_exercise_needs_only_to_say_what_is_wrong():
    @checks.exercise
    def even(answer):
        if answer % 2:
            raise Wrong(f"{answer} is odd.")
        if answer == 0:
            raise NotYet("zero is where you start.")
        return "it is even."

    assert [even(value).state for value in (3, 0, 4, None)] == ["wrong", "not yet", "right", "not yet"]
    assert repr(even(4)) == "Right: it is even."


# Right answers that are not the lesson's own


def blocks(environment, count):
    rank, workers = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return list(range(rank * count // workers, (rank + 1) * count // workers))


def through_a_part(path, content):
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(content)
        part.flush()
        os.fdatasync(part)
    shutil.move(part.name, path)
    folder = os.open(path.parent, os.O_DIRECTORY)
    os.fdatasync(folder)
    os.close(folder)


def through_a_folder_beside_it(path, content):
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        folder = os.open(beside, os.O_DIRECTORY)
        part = Path(beside, "part")
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file)
        os.replace("part", path, src_dir_fd=folder)
        os.close(folder)
    above = os.open(path.parent, os.O_DIRECTORY)
    os.fsync(above)
    os.close(above)


def with_polling(communicator, folder, shard, write):
    write(folder / f"shard-{communicator.rank}", shard)
    if communicator.rank == communicator.size - 1:
        while not all((folder / f"shard-{rank}").exists() for rank in range(communicator.size)):
            time.sleep(0.01)
        write(folder / "complete", b"%d\n" % communicator.size)
    communicator.barrier()


def ring_in_another_style(communicator, array):
    """With parts of NumPy's own cut, the mean first, and even ranks that send before they receive."""
    size, parts = communicator.size, np.array_split(array, communicator.size)
    right, left = (communicator.rank + 1) % size, (communicator.rank - 1) % size
    array /= size
    for step in range(2 * size - 2):
        outgoing, mine = parts[(communicator.rank - step) % size], parts[(left - step) % size]
        incoming = np.zeros_like(mine)
        if communicator.rank % 2 == 0:
            communicator.send(right, outgoing)
            communicator.recv(left, incoming)
        else:
            communicator.recv(left, incoming)
            communicator.send(right, outgoing)
        mine[:] = mine + incoming if step < size - 1 else incoming


def mlp_with_a_hook(dist, x, up, down):
    """Units dealt out in turn; autograd does not see a sum in place."""
    from torch.nn import functional

    def total(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    x = x.view_as(x)
    x.register_hook(total)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    hidden = functional.gelu(functional.linear(x, up.weight[own], up.bias[own]))
    z = functional.linear(hidden, down.weight[:, own])
    dist.all_reduce(z.data)
    return z + down.bias


def sequence_mlp_that_recomputes(region, x, up, down):
    """Units dealt out in turn; checkpointing drops all of X, and gathers it again."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    class Opposite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, gathers):
            ctx.gathers = gathers
            return region.gather_sequence(tensor) if gathers else region.scatter_sum(tensor)

        @staticmethod
        def backward(ctx, gradient):
            return region.scatter_sum(gradient) if ctx.gathers else region.gather_sequence(gradient), None

    own = slice(region.communicator.rank, None, region.communicator.size)

    def first(tokens):
        return functional.linear(Opposite.apply(tokens, True), up.weight[own], up.bias[own])

    hidden = functional.gelu(checkpoint(first, x, use_reentrant=False))
    return Opposite.apply(functional.linear(hidden, down.weight[:, own]), False) + down.bias


def passes_of_one_form(communicator, order, stage, shape):
    """Receives at once where something was sent."""
    first, last = communicator.rank == 0, communicator.rank == communicator.size - 1
    for kind, number in order:
        incoming = np.zeros(shape, np.float32)
        if kind == "forward":
            if not first:
                communicator.send_recv(None, None, communicator.rank - 1, incoming)
            outgoing = stage.forward(number, None if first else incoming)
            _ = last or communicator.send(communicator.rank + 1, outgoing)
        else:
            if not last:
                communicator.recv(communicator.rank + 1, incoming)
            outgoing = stage.backward(number, None if last else incoming)
            _ = first or communicator.send(communicator.rank - 1, outgoing)


def one_bad_image_spoils_all_weights(communicator, weights, gradient, count, learning_rate):
    total = np.append(count * gradient if count else 0 * weights, count)
    ring_all_reduce(communicator, total)
    return weights - learning_rate * total[:-1] / total[-1] + (0 if np.isfinite(total).all() else np.nan)


def there_and_back(communicator, number):
    """The sum grows once round, and goes round once more."""
    rank, size, carried = communicator.rank, communicator.size, np.zeros(1)
    if size == 1:
        return number
    if rank > 0:
        communicator.recv(rank - 1, carried)
    carried += number
    communicator.send((rank + 1) % size, carried)
    communicator.recv((rank - 1) % size, carried)
    if rank < size - 1:
        communicator.send(rank + 1, carried)
    return carried


def everything_seen(communicator, number):
    """Every rank keeps what came, and sends it on."""
    right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
    numbers = [np.array([float(number)])]
    while len(numbers) < communicator.size:
        numbers.append(np.empty_like(numbers[-1]))
        communicator.send_recv(right, numbers[-2], left, numbers[-1])
    return sum(numbers)


def push_in_one_message(communicator, part, rows, gradients):
    """Row numbers travel as a column beside the sums, behind a message with how many there are."""
    rank, size, sums = communicator.rank, communicator.size, {}
    for row, gradient in zip(rows.tolist(), gradients, strict=True):
        sums[row] = sums.get(row, 0) + gradient
    for distance in range(size):
        to, source = (rank + distance) % size, (rank - distance) % size
        mine = [[row, *values] for row, values in sums.items() if row % size == to]
        arriving = outgoing = np.array(mine, part.dtype).reshape(len(mine), part.shape[1] + 1)
        if distance:
            communicator.send_recv(
                to, np.array([len(mine)], np.int32), source, count := np.empty(1, np.int32)
            )
            communicator.send_recv(
                to, outgoing, source, arriving := np.empty((count[0], outgoing.shape[1]), part.dtype)
            )
        for row, *values in arriving:
            part[int(row) // size] += np.array(values)


def two_levels_by_hand(communicator, array, group):
    """Each rank sends every other its part directly, in NumPy's cut."""
    rank, size = communicator.rank, communicator.size

    def exchange(ranks, whole, adds):
        own, parts = ranks.index(rank), np.array_split(whole, len(ranks))
        for distance in range(1, len(ranks)):
            to, source = (own + distance) % len(ranks), (own - distance) % len(ranks)
            outgoing, incoming = parts[to if adds else own], np.zeros_like(parts[own if adds else source])
            communicator.send_recv(ranks[to], outgoing, ranks[source], incoming)
            parts[own if adds else source][:] = adds * parts[own if adds else source] + incoming
        return parts[own]

    inside, across = (
        [*range(rank - rank % group, rank - rank % group + group)],
        [*range(rank % group, size, group)],
    )
    mine = exchange(inside, array, adds=True)
    exchange(across, mine, adds=True)
    exchange(across, mine, adds=False)
    exchange(inside, array, adds=False)


def two_levels_of_other_parts(communicator, array, group):
    """Backwards inside a machine, and across by halving and doubling."""
    rank, size = communicator.rank, communicator.size
    inside = Subset(communicator, [*range(rank - rank % group, rank - rank % group + group)][::-1])
    across = Subset(communicator, [*range(rank % group, size, group)])
    halving_doubling_all_reduce(across, ring_reduce_scatter(inside, array))
    ring_all_gather(inside, array)


def two_levels_by_turns(communicator, array, group):
    """Rings in NumPy's cut, whose even ranks send before they receive."""
    rank, size = communicator.rank, communicator.size

    def pass_on(ranks, whole, adds):
        own, count = ranks.index(rank), len(ranks)
        parts = np.array_split(whole, count)
        for step in range(count - 1):
            outgoing, mine = parts[(own - adds - step) % count], parts[(own - adds - step - 1) % count]
            incoming = np.zeros_like(mine)
            if own % 2 == 0:
                communicator.send(ranks[(own + 1) % count], outgoing)
            communicator.recv(ranks[own - 1], incoming)
            if own % 2:
                communicator.send(ranks[(own + 1) % count], outgoing)
            mine[:] = adds * mine + incoming
        return parts[own]

    first = rank // group * group
    inside, across = [*range(first, first + group)], [*range(rank % group, size, group)]
    mine = pass_on(inside, array, adds=1)
    pass_on(across, mine, adds=1)
    pass_on(across, mine, adds=0)
    pass_on(inside, array, adds=0)


def two_levels_of_one_owner_after_another(communicator, array, group):
    """Inside, all send to one rank after another."""
    rank, size = communicator.rank, communicator.size
    place, first = rank % group, rank // group * group
    parts, others = np.array_split(array, group), [first + each for each in range(group) if each != place]
    incoming = np.empty_like(parts[place])
    for owner in range(group):
        if owner != place:
            communicator.send(first + owner, parts[owner])
            continue
        for other in others:
            communicator.recv(other, incoming)
            parts[place] += incoming
    ring_all_reduce(Subset(communicator, range(place, size, group)), parts[place])
    for owner in range(group):
        if owner != place:
            communicator.recv(first + owner, parts[owner])
            continue
        for other in others:
            communicator.send(other, parts[place])


def groups_from_a_grid(rank, sizes):
    grid = np.arange(np.prod([*sizes.values()])).reshape([*sizes.values()], order="F")
    place = np.argwhere(grid == rank)[0]
    ways = enumerate(sizes)
    return {way: grid[(*place[:axis], slice(None), *place[axis + 1 :])] for axis, way in ways}


def query_by_query(state, scores, values):
    states = [[*each] for each in zip(*state, strict=True)]
    for query, row in enumerate(scores):
        for score, value in zip(row[row > -np.inf], values[row > -np.inf], strict=True):
            maximum, total, mixture = states[query]
            largest = max(maximum, score)
            old, new = np.exp(maximum - largest), np.exp(score - largest)
            states[query] = [largest, old * total + new, old * mixture + new * value]
    return [np.array(each) for each in zip(*states, strict=True)]


def from_both_ends(length, rank, size):
    own = length // size // 2
    return chain(range(rank * own, (rank + 1) * own), range(length - (rank + 1) * own, length - rank * own))


def newest_first(order, rank, ranks):
    owed = []
    for each in order:
        yield each
        owed += [each[1]] * (each[0] == "backward")
        if len(owed) == rank + 1:
            yield ["weight", owed.pop()]
    yield from [("weight", number) for number in owed]


def held_at_the_newest_version(state, worker, bound):
    slowest = min(state.pushes[each] for each in state.active)
    return state.version > state.has[worker] and state.pushes[worker] - slowest <= bound


def choice_by_choice(dist, tokens, chosen, weights, mlps):
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    result = 0.0 * tokens
    for choice, weight in zip(chosen.t(), weights.t(), strict=True):
        order = choice.argsort()
        sent = (choice // len(mlps)).bincount(minlength=dist.get_world_size())
        received = sent.new_empty(len(sent))
        dist.all_to_all_single(received, sent)
        there, here = received.tolist(), sent.tolist()
        rows = all_to_all_single(tokens.new_empty(sum(there), tokens.shape[1]), tokens[order], there, here)
        numbers = choice.new_empty(sum(there))
        dist.all_to_all_single(numbers, choice[order], there, here)
        sort = (numbers % len(mlps)).argsort()
        parts = rows[sort].split((numbers % len(mlps)).bincount(minlength=len(mlps)).tolist())
        done = torch.cat([mlp(part) for mlp, part in zip(mlps, parts, strict=True)])[sort.argsort()]
        back = all_to_all_single(tokens.new_empty(tokens.shape), done, here, there)
        result = result + weight.unsqueeze(1) * back[order.argsort()]
    return result


@pytest.mark.processes
@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (welcome.my_images, blocks),
        (welcome.total, there_and_back),
        (welcome.total, everything_seen),
        (
            parameter_server.rules,
            (held_at_the_newest_version, lambda state, worker: state.has[worker] == state.version),
        ),
        (parameter_server.sparse_push, push_in_one_message),
        (ring.two_level, two_levels_by_hand),
        (ring.two_level, two_levels_of_other_parts),
        (parallelism.uneven_step, one_bad_image_spoils_all_weights),
        (model_parallel.tensor_parallel_mlp, mlp_with_a_hook),
        (model_parallel.sequence_parallel_mlp, sequence_mlp_that_recomputes),
        (model_parallel.pipeline_messages, passes_of_one_form),
        (contexts_and_experts.softmax_step, query_by_query),
        (contexts_and_experts.zig_zag, from_both_ends),
        (contexts_and_experts.place_weights, newest_first),
        (contexts_and_experts.dispatch_and_combine, choice_by_choice),
        (model_parallel.mesh_groups, groups_from_a_grid),
        (failures.atomic_save, checkpoints.write_atomically),
        (failures.atomic_save, through_a_part),
        (failures.atomic_save, through_a_folder_beside_it),
        (failures.save_sharded, with_polling),
        (failures.diagnosis, {letter: [rank, cause] for letter, (cause, rank) in failures.CASES.items()}),
    ],
)
def test_another_right_answer_is_right(check, answer):
    assert check(answer).state == "right"


@pytest.mark.processes
@pytest.mark.parametrize("late", [0, 3])
def test_time_that_starting_takes_is_not_held_against_an_answer(late, monkeypatch):
    """Not even if ranks begin, and return, while they are asked for their stacks."""
    ask = hang.Hang.ask
    monkeypatch.setattr(hang.Hang, "ask", lambda *each: time.sleep(late) or ask(*each))
    with pytest.raises(NotYet, match="not enough to start the ranks"):
        processes.values_on_ranks("on 2 ranks", 2, lambda _: 0, {}, timeout="0.01s")


@pytest.mark.processes
def test_a_push_is_run_if_it_is_right_and_otherwise_ours(capsys):
    assert parameter_server.push_to_run(push_in_one_message) is push_in_one_message
    assert "ours" not in capsys.readouterr().out
    ours = parameter_server.push_to_run(lambda communicator, part, rows, gradients: ...)
    assert parameter_server.sparse_push(ours).state == "right"
    assert "ours is run" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("check", "answer", "times"),
    [
        (ring.ring_all_reduce, ring_in_another_style, "2.0"),
        (ring.two_level, two_levels_by_turns, "1.6"),
        (ring.two_level, two_levels_of_one_owner_after_another, "1.6"),
    ],
)
def test_a_collective_whose_ranks_send_by_turns_is_right_and_told_how_long_it_takes(check, answer, times):
    verdict = check(answer)
    assert verdict.state == "right", verdict
    assert f"8 ranks take {times} times as long" in verdict.text


def with_the_remainder_last(array, index, count):
    """Chunk `index`, where the last one has the remainder, and with fewer elements than ranks all of them."""
    index, length = index % count, len(array) // count
    return array[index * length :] if index == count - 1 else array[index * length : (index + 1) * length]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "way", "first"),  # `way` is in which chunks are numbered along the ring
    [(chunk, 1, 2), (chunk, -1, 2), (with_the_remainder_last, 1, 0)],
)
def test_a_ring_may_cut_its_chunks_and_begin_as_it_likes(part, way, first):
    def answer(communicator, array):
        rank, size = communicator.rank, communicator.size
        for adds in (1, 0):
            for step in range(size - 1):
                arriving = part(array, way * (rank + first - step - adds), size)
                incoming = np.empty_like(arriving)
                outgoing = part(array, way * (rank + first + 1 - step - adds), size)
                communicator.send_recv((rank + 1) % size, outgoing, (rank - 1) % size, incoming)
                arriving[:] = adds * arriving + incoming
        array /= size

    assert ring.ring_all_reduce(answer).state == "right"


def test_a_full_disk_and_watched_files_end_with_the_check():
    def state():
        return resource.getrlimit(resource.RLIMIT_FSIZE), os.rename, os.replace, os.link, os.fsync

    before = state()
    failures.atomic_save(Path.write_bytes)
    assert state() == before


# Lesson 06 asks for what TensorFlow does


@pytest.mark.parametrize(
    ("sizes", "packs_by_hint"),
    [  # what TensorFlow's own `group_by_size` returns
        ([100, 1, 1, 1, 100], {0: [[100, 1, 1, 1, 100]], 1: [[100], [1, 1], [1, 100]], 9: [[100], [1, 1, 1, 100]]}),
        ([3, 9, 2, 7, 7, 1, 1], {1: [[3], [9], [2], [7], [7], [1, 1]], 8: [[3, 9], [2, 7], [7, 1, 1]]}),
    ],
)  # fmt: skip
def test_packs_are_cut_as_tensorflow_cuts_them(sizes, packs_by_hint):
    for hint, packs in packs_by_hint.items():
        assert tensorflow.tensorflow_packs(sizes, hint) == packs


@pytest.mark.parametrize(("check", "answer"), [(tensorflow.shardings, {}), (tensorflow.replica, list)])
def test_a_check_without_its_framework_says_what_to_install(check, answer, monkeypatch):
    monkeypatch.setattr("workshop_utils.optional.is_installed", lambda module: False)
    verdict = check(answer)
    assert verdict.state == "not yet"
    assert "`workshop install tensorflow` installs" in verdict.text
