"""How many threads may compute one operation on the CPU, for equal rows to get equal bits.

Owns that one limit and why it exists. Must not know models, sessions or policies.

torch splits an elementwise operation into one piece per thread, of ceil(elements / threads), and
computes the last few elements of a piece, those that do not fill a vector, with the scalar
exponential instead of the vector one. Halves of the sizes that occur here are whole vectors; thirds
are not (and three threads are what 8 threads become for an operation of medium size). With three
threads, silu gave single rows other last bits; with one and two, none did.
"""

from contextlib import contextmanager

import torch

MOST_THREADS = 2


@contextmanager
def few_threads(device: torch.device):
    """While active, CPU operations use at most MOST_THREADS threads; nothing changes elsewhere."""
    before = torch.get_num_threads()
    limited = device.type == "cpu" and before > MOST_THREADS
    if limited:
        torch.set_num_threads(MOST_THREADS)
    try:
        yield
    finally:
        if limited:
            torch.set_num_threads(before)
