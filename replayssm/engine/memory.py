"""Memory that one step frees and the next one needs again.

Owns one habit of the C library's allocator. Must not know what is allocated.
"""

import torch

_LARGEST = 31 << 20


def keep_freed_memory() -> None:
    """Has the allocator keep freed CPU memory for reuse instead of returning it to the system.

    glibc asks the system for every block above a threshold and hands it back when it is freed; the
    pages of the next one are then mapped and zeroed anew, which takes a quarter of a lockstep
    window of nine small rows. The threshold follows the largest block freed so far, up to 32 MiB:
    this frees one, whose pages were never touched. Up to 64 MiB stay with the process. Other
    allocators take no notice.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)
