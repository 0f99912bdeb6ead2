"""Messages with which every transport is tested."""

import numpy as np


def random_exchanges(communicator):
    """Shifts by random distances with arrays of random sizes; how many came wrong."""
    shared = np.random.default_rng(7)  # the same numbers on every rank
    rank, size, wrong = communicator.rank, communicator.size, 0
    for _ in range(60):
        distance, length = int(shared.integers(1, size)), int(shared.choice([0, 1, 3, 1000, 20_001, 900_007]))
        dtype = str(shared.choice(["u1", "<f4", ">i8", "S3", "g", "M8[s]"]))
        shape = (length, 1) if shared.integers(2) else (length,)
        seed = shared.integers(1 << 30)

        def contents(of, length=length, dtype=dtype, seed=seed, shape=shape):
            bytes_of = np.random.default_rng([seed, of])
            return np.frombuffer(bytes_of.bytes(length * np.dtype(dtype).itemsize), dtype).reshape(shape)

        source = (rank - distance) % size
        incoming = np.empty(shape, dtype)
        outgoing = contents(rank).copy()
        if shared.integers(2):  # elements that do not lie next to each other
            outgoing = np.repeat(outgoing[..., None], 2, axis=-1)[..., 0]
        communicator.send_recv((rank + distance) % size, outgoing, source, incoming)
        wrong += incoming.tobytes() != contents(source).tobytes()
    return wrong
