"""Data parallelism: every rank has the whole module and a part of the batch, and gradients are averaged.

    with tcp.connect(*place.rendezvous()) as communicator:
        model = OverlappedDataParallel(module, communicator)     # rank 0's parameters are now everybody's
        optimizer = torch.optim.AdamW(model.parameters())
        for inputs, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            model.synchronise()                                  # .grad is now the mean of all ranks
            optimizer.step()

Three forms, each better than the one before it, and all with the same result:

| class | what travels | when |
| --- | --- | --- |
| `NaiveDataParallel` | each parameter's gradient by itself | after the backward pass |
| `BucketedDataParallel` | buckets of gradients, so fewer and larger messages | after the backward pass |
| `OverlappedDataParallel` | the same buckets | during the backward pass, each as soon as it is full |

Source: Li et al. (2020), "PyTorch Distributed: experiences on accelerating data parallel training", section 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import Communicator, as_array
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_broadcast
from workshop_utils.parallel.experts import Experts
from workshop_utils.parallel.tensor import Cut

MEBIBYTE = 1024 * 1024


class UnusedParameters(ValueError):
    """Parameters that had no part in a step; the message names them."""


class NaiveDataParallel(nn.Module):
    """After the backward pass, one all-reduce for each parameter.

    Parameters that are frozen (`requires_grad` is False) when this is made become rank 0's, and take no part in steps.
    A tied parameter is one parameter, and travels once. Buffers, such as the statistics of a batch normalisation, are
    rank 0's at the start and then each rank's own.

    A parameter that had no part in a step has no gradient. That is an error, for it is most often a mistake.

    Args:
        module: on the CPU; of the same structure on all ranks.
        communicator: of these ranks. While a step is under way, nobody else may use it.

    Raises:
        ValueError: if a layer is cut, or a FullySharded has cut it, among some of these ranks, or an embedding has a
            `max_norm`.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        refuse_different(module, communicator)
        self.module, self.communicator = module, communicator
        broadcast_from_first(communicator, module)
        # named_parameters leaves out the second name of a tied parameter.
        self._trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **kwargs)

    def synchronise(self) -> None:
        """Replace every gradient by its mean over the ranks. Every rank calls it once a step, after backward.

        Raises:
            UnusedParameters: if a parameter has no gradient.
            CommunicationError: if the others cannot be reached, or do something else.
        """
        for its_gradient in self._gradients().values():
            with contiguous(its_gradient) as gradient:
                ring_all_reduce(self.communicator, as_array(gradient), "mean")

    def close(self) -> None:
        """Let go of hooks and threads. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gradients(self) -> dict[str, Tensor]:
        """By the parameters' names. Raises UnusedParameters if one has none."""
        gradients = {name: p.grad for name, p in self._trainable.items() if p.grad is not None}
        refuse_unused([name for name in self._trainable if name not in gradients], self.communicator)
        return gradients


class Bucket:
    """Gradients that travel together, end to end in one array, of which each parameter's `.grad` is a view."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.held: set[nn.Parameter] = set()  # whose gradients of this step are in
        whole = torch.zeros(sum(p.numel() for p in self.parameters), dtype=self.parameters[0].dtype)
        parts = zip(self.parameters, whole.split([p.numel() for p in self.parameters]), strict=True)
        self.memory, self.views = as_array(whole), {p: part.view(p.shape) for p, part in parts}

    @property
    def is_full(self) -> bool:
        """Whether all its gradients are in."""
        return len(self.held) == len(self.parameters)

    def hold(self, parameter: nn.Parameter) -> None:
        """Take the parameter's gradient in, and let `.grad` be its place here."""
        view, gradient = self.views[parameter], parameter.grad
        # If they are the same, autograd has added to it in place.
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        self.held.add(parameter)


class BucketedDataParallel(NaiveDataParallel):
    """After the backward pass, one all-reduce for each bucket of about `bucket_bytes`.

    Buckets are filled with parameters in the reverse of the order in which the module names them, which is about the
    order in which a backward pass gives their gradients; a bucket has one dtype, and is closed once it has reached
    `bucket_bytes`. (So does PyTorch's DDP, which by default closes its first bucket at 1 MiB already. In its first
    step it has one bucket; then it fills buckets in the order in which gradients have come.)

    The rest is as in NaiveDataParallel.

    Raises:
        ValueError: if `bucket_bytes` is not above zero.
    """

    def __init__(
        self, module: nn.Module, communicator: Communicator, bucket_bytes: int = 25 * MEBIBYTE
    ) -> None:
        super().__init__(module, communicator)
        self.buckets = [Bucket(each.values()) for each in buckets_of(self._trainable, bucket_bytes)]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}

    def synchronise(self) -> None:
        """Replace every gradient by its mean over the ranks; as in NaiveDataParallel."""
        self._gradients()  # each has one
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                bucket.hold(parameter)
            ring_all_reduce(self.communicator, bucket.memory, "mean")
            bucket.held.clear()


class OverlappedDataParallel(BucketedDataParallel):
    """During the backward pass, each bucket is all-reduced on a second thread as soon as it is full.

    All ranks send the buckets in their order, also where a later one is full first. Arrays meet by position: in
    different orders, different buckets would be added up, without an error where their sizes agree. Arguments,
    attributes and errors are those of BucketedDataParallel, which can also add up several backward passes. After a
    backward pass that failed, close this and make a new one. If the communicator shares its links, as a
    group of a mesh does, nothing overlaps.

    Use it as a context manager, or call `close` in the end, which ends the thread.
    """

    def __init__(self, module: nn.Module, communicator: Communicator, **options: Any) -> None:
        super().__init__(module, communicator, **options)
        self._sent: list[Future[None]] = []  # one a bucket that has been handed over
        self._thread = CommunicationThread(communicator)
        # Called once a backward pass for each parameter, however often the module has used it.
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._bucket_of]

    def _on_gradient(self, parameter: Any) -> None:
        bucket = self._bucket_of[parameter]
        if parameter in bucket.held:
            raise RuntimeError("two backward passes before synchronise(); BucketedDataParallel adds them up")
        bucket.hold(parameter)
        while len(self._sent) < len(self.buckets) and self.buckets[len(self._sent)].is_full:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[len(self._sent)]
        self._sent.append(self._thread.start(ring_all_reduce, self.communicator, bucket.memory, "mean"))

    def synchronise(self) -> None:
        """Wait until every gradient is its mean over the ranks; as in NaiveDataParallel."""
        try:
            self._gradients()  # each has one
            for bucket in self.buckets[len(self._sent) :]:
                for parameter in set(bucket.parameters) - bucket.held:
                    bucket.hold(parameter)
                self._send_next()
            for sent in self._sent:
                sent.result()
            for bucket in self.buckets:
                bucket.held.clear()
        finally:
            self._sent.clear()

    def close(self) -> None:
        """Let go of hooks and thread. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._thread.close()


class CommunicationThread:
    """A rank's second thread, which communicates, one job after the other, while the first one computes.

    Once a job has failed, those after it fail likewise. If the jobs' `communicator` shares its links, as a group of a
    mesh does, the first thread waits for each job, since it may communicate with another group next.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._failure: Exception | None = None
        self._waits = communicator is not None and communicator.shares_links
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workshop-communication")

    def start(self, job: Callable[..., object], *arguments: Any) -> Future[None]:
        """Do `job(*arguments)` once all before it are done. If it waits, it raises what the job raises."""
        future = self._pool.submit(self._run, job, arguments)
        if self._waits:
            future.result()
        return future

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            with torch.no_grad():
                job(*arguments)
        except Exception as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        """End it; what has not begun is cancelled. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)


def buckets_of(parameters: dict[str, nn.Parameter], bucket_bytes: int) -> list[dict[str, nn.Parameter]]:
    """The parameters of each bucket: in reverse order, of one dtype, closed once it has reached `bucket_bytes`.

    Raises:
        ValueError: if `bucket_bytes` is not above zero.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be above zero")
    buckets: list[dict[str, nn.Parameter]] = []
    nbytes, dtype = 0, None
    for name, parameter in reversed(parameters.items()):
        if not buckets or nbytes >= bucket_bytes or parameter.dtype != dtype:
            buckets.append({})
            nbytes, dtype = 0, parameter.dtype
        buckets[-1][name] = parameter
        nbytes += parameter.nbytes
    return buckets


def refuse_different(module: nn.Module, communicator: Communicator) -> None:
    """Raise ValueError if ranks have different parts of a layer, or would not keep an embedding the same."""
    for name, each in module.named_modules():
        ranks = vars(each).get("sharded_among", ())  # by a FullySharded, whether or not that is in `module`
        if isinstance(each, Experts) and each.communicator is not None:
            ranks = each.communicator.ranks
        if isinstance(each, Cut):
            ranks = each.region.communicator.ranks
        if len({*ranks}.intersection(communicator.ranks)) > 1:
            right = "their parts would become the same: leave it out, or use mesh.synchronise"
            raise ValueError(f"{name or 'module'} is cut among {len(ranks)} ranks; {right}")
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            right = "it must be None, for each rank would shorten only the rows that it looks up"
            raise ValueError(f"max_norm of embedding {name!r} is {each.max_norm}; {right}")


def broadcast_from_first(communicator: Communicator, module: nn.Module) -> None:
    """Replace parameters and buffers, in place on every rank, by those of rank 0."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        with contiguous(tensor) as whole:
            tree_broadcast(communicator, whole.view(-1).view(torch.uint8))  # NumPy has no bfloat16


@contextmanager
def contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in row order, without its history: itself, or a copy whose contents become the tensor's own."""
    detached = tensor.detach()
    whole = detached.contiguous()
    yield whole
    # An expanded tensor, whose numbers share memory, cannot be copied into.
    if whole.data_ptr() != detached.data_ptr() and not torch.equal(whole, detached):
        detached.copy_(whole)


def refuse_unused(names: list[str], communicator: Communicator) -> None:
    """Raise UnusedParameters if there are `names` of parameters without a gradient; the message has the first three."""
    if names:
        which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UnusedParameters(
            f"{which} had no part in this step on rank {communicator.rank}, which must send every gradient"
        )
