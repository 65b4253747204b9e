"""What the kernels of every recurrence share: cursors on the device, exact products, commits.

Owns how rows find their slots and who moves a cursor. Knows no recurrence and no format.

Cursors live on the device and are moved by kernels, so that a step needs no host synchronisation
and a captured graph replays any schedule. Whoever moves a cursor must know that nobody still has to
read it. Either one small kernel moves the cursors of all rows that are due and hands out what they
were (`list_due`), or, where one launch does a whole step, the programs of a row count themselves
when they have its cursor, and the last to be counted moves it (`count_arrival`, `move_if_last`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Cursors(NamedTuple):
    """Where S slots stand, and which of them this launch works on.

    All on the device; a slot may occur in `slots` once. A kernel takes the whole tuple.
    """

    slots: Tensor  # [B] int32 or int64: slot of each row; negative: a padding row, left alone
    pos: Tensor  # [S] int64: committed records
    arrivals: Tensor  # [S, 1024] int32, from `new_arrivals`: zero between launches
    flushes: Tensor  # [S] int64: state writes so far, the flush index of the next one
    sequence: Tensor  # [S] int64, in [0, 2^32)
    seed: Tensor  # [S] int64, in [0, 2^32)
    saturated: Tensor  # [S] int64: elements saturated on writing, summed over writes and copies
    not_finite: Tensor  # [S] int64: elements written that were Inf or NaN, counted once a write


def new_cursors(slots: Tensor, *, sequence: Tensor, seed: Tensor) -> Cursors:
    """Cursors of empty rings for `slots`; `sequence` and `seed` are [S] int64, by reference."""
    zero = torch.zeros_like(seed)
    return Cursors(
        slots=slots,
        pos=zero,
        flushes=zero.clone(),
        sequence=sequence,
        seed=seed,
        saturated=zero.clone(),
        not_finite=zero.clone(),
        arrivals=new_arrivals(zero),
    )


# Of a slot: programs of its row, and what each of them has said to its head (`largest_of_head`).
COUNTERS = 1024
_COUNTERS = tl.constexpr(COUNTERS)


def new_arrivals(per_slot: Tensor) -> Tensor:
    """Counters for as many slots as `per_slot` [S] has, on its device."""
    size = len(per_slot), COUNTERS
    return torch.zeros(size, dtype=torch.int32, device=per_slot.device)


def commit(cursors: Cursors, accepted: Tensor) -> None:
    """Advances the cursor of each row by `accepted` [B] (int32 or int64), in place."""
    rows = cursors.slots.shape[0]
    _commit_kernel[(triton.cdiv(rows, 128),)](cursors, accepted, rows, BLOCK=128)


@triton.jit
def _commit_kernel(cursors, accepted, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(cursors.slots + row, mask=row < rows, other=-1).to(tl.int64)
    pos = tl.load(cursors.pos + slot, mask=slot >= 0, other=0)
    pos += tl.load(accepted + row, mask=slot >= 0, other=0)
    tl.store(cursors.pos + slot, pos, mask=slot >= 0)


class Ticket(NamedTuple):
    """A row that flushes, and its cursors when `list_due` saw them; scalars in a kernel."""

    row: Tensor
    slot: Tensor
    pos: Tensor
    flushes: Tensor
    sequence: Tensor
    seed: Tensor


_TICKET = tl.constexpr(8)  # int64 words of one ticket, a power of two


def list_due(
    cursors: Cursors,
    count: int,
    rows: Tensor | None = None,
    *,
    moves: bool,
    commits: bool = False,
) -> Tensor:
    """Which rows are due, for kernels: their number, then their tickets, int64 [1 + B, 8].

    Due are rows with `count` committed records, or those where `rows` [B] (bool, integers) is not
    0; never padding rows. With `moves` their cursors are moved in place, as a flush does: kernels
    that work on tickets need to read no cursor, and to wait for nobody who does. With `commits` one
    more record of every row counts, before anything else.
    """
    if rows is not None and rows.dtype == torch.bool:
        rows = rows.view(torch.uint8)
    batch = cursors.slots.shape[0]
    due = torch.empty(1 + batch, _TICKET.value, dtype=torch.int64, device=cursors.slots.device)
    block = triton.next_power_of_2(batch)
    options = {"COMMITS": commits, "MOVES": moves, "BLOCK": block}
    _due_kernel[(1,)](due, cursors, rows, count, batch, **options)
    return due


@triton.jit
def _due_kernel(
    due, cursors, rows, count, batch,
    COMMITS: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK)
    slot = tl.load(cursors.slots + row, mask=row < batch, other=-1).to(tl.int64)
    real = slot >= 0
    pos = tl.load(cursors.pos + slot, mask=real, other=-1)
    if COMMITS:
        pos += real.to(tl.int64)
    if rows is None:
        is_due = pos == count
    else:
        is_due = tl.load(rows + row, mask=real, other=0) != 0
    flushes = tl.load(cursors.flushes + slot, mask=is_due, other=0)
    sequence = tl.load(cursors.sequence + slot, mask=is_due, other=0)
    seed = tl.load(cursors.seed + slot, mask=is_due, other=0)
    ticket = due + tl.cumsum(is_due.to(tl.int32), 0) * _TICKET
    tl.store(ticket, row.to(tl.int64), mask=is_due)
    tl.store(ticket + 1, slot, mask=is_due)
    tl.store(ticket + 2, pos, mask=is_due)
    tl.store(ticket + 3, flushes, mask=is_due)
    tl.store(ticket + 4, sequence, mask=is_due)
    tl.store(ticket + 5, seed, mask=is_due)
    tl.store(due, tl.sum(is_due.to(tl.int64), 0))
    if MOVES:
        pos = tl.where(is_due, 0, pos)
    if COMMITS or MOVES:
        tl.store(cursors.pos + slot, pos, mask=real)
    if MOVES:
        tl.store(cursors.flushes + slot, flushes + 1, mask=is_due)


@triton.jit
def load_ticket(due, index):
    """Ticket number `index`; one that was not filled holds no meaning."""
    ticket = due + (1 + index) * _TICKET
    return Ticket(
        tl.load(ticket).to(tl.int32),
        tl.load(ticket + 1),
        tl.load(ticket + 2).to(tl.int32),
        tl.load(ticket + 3),
        tl.load(ticket + 4),
        tl.load(ticket + 5),
    )


@triton.constexpr_function
def _is_interpreted() -> bool:
    return triton.knobs.runtime.interpret


@triton.jit
def bound(x):
    """A scalar as a bound of `tl.range`, where Triton 3.6's interpreter takes no tensor."""
    if _is_interpreted():
        return x.handle.data.item()
    else:
        return x


def resident_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs that share work among them; few without a GPU, so that tests see them share."""
    if device.type != "cuda":
        return 2
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def no_offset(first, second):
    """0, which only these two pointers tell: no address has these bits.

    Arguments lie in constant memory, which comes by the line, and a warp waits for each. An address
    that has this 0 in it asks for the lines of both arguments. So a kernel for few rows asks for
    the slot; then comes a branch that it never takes, without which compilers ask for all arguments
    first, on the slot's address, which so is there; then the token, with this 0 in the address of
    its last load. The lines come while the slot does.
    """
    return (first.to(tl.int64) | second.to(tl.int64)) >> 62


@triton.jit
def count_arrival(cursors, slot, counts, THREADS: tl.constexpr):
    """Counts a program of a row, where `counts`: it needs the row's cursor no more.

    Its threads have that cursor for certain where a branch that depends on it came before;
    arithmetic may be moved behind the barrier. Returns how many were counted before, for
    `move_if_last`; nobody waits for it until then. All programs of a row are counted, or none.
    """
    tl.debug_barrier()
    thread = tl.arange(0, THREADS)  # addresses differ, or the compiler makes all wait for the first
    first = ((thread == 0) & counts) != 0  # Triton 3.9's interpreter wants a comparison here
    at = cursors.arrivals + slot * _COUNTERS + thread
    return tl.atomic_add(at, 1, mask=first, sem="relaxed")


@triton.jit
def move_if_last(cursors, slot, before, programs, pos, flushes, THREADS: tl.constexpr):
    """Moves a row's cursor to `pos`, `flushes` (None: stays) if `before` says that all others of
    its `programs` had been counted."""
    thread = tl.arange(0, THREADS)
    last = (thread == 0) & (before == programs - 1)
    at = slot + thread
    tl.store(cursors.arrivals + slot * _COUNTERS + thread, 0, mask=last)
    tl.store(cursors.pos + at, pos, mask=last)
    if flushes is not None:
        tl.store(cursors.flushes + at, flushes, mask=last)


@triton.jit
def tell_head(cursors, slot, head, tile, TILES: tl.constexpr, pattern):
    """Says a tile's largest `pattern` (int32, not negative) to the programs of its head, one for
    each of the head's tiles: with the sign bit set, and so both what it is and that it is said."""
    of_head = cursors.arrivals + slot * _COUNTERS + 1 + head * TILES
    tl.store(of_head + tile, pattern | -0x80000000)


@triton.jit
def hear_head(cursors, slot, head, TILES: tl.constexpr, THREADS: tl.constexpr):
    """What the programs of a head have said so far. The first time that is asked, memory has yet to
    be found: early is better."""
    other = tl.arange(0, THREADS)  # one to a thread: only as many warps as have to ask
    tl.static_assert(TILES <= THREADS)
    at = cursors.arrivals + slot * _COUNTERS + 1 + head * TILES + other
    return tl.load(at, mask=other < TILES, other=-0x80000000, volatile=True)


@triton.jit
def largest_of_head(cursors, slot, head, TILES: tl.constexpr, said, THREADS: tl.constexpr):
    """The largest pattern of a head, when all of its programs have said theirs; `said`: by
    `hear_head`. What they said is `forget_heads`'s to clear.

    The programs of a head have numbers that follow each other, and a GPU starts programs in the
    order of their numbers: those that wait for one that has not started are programs of one head
    at most, and every other program ends without them. In Triton's interpreter, where programs run
    one after the other, the first would wait for ever.
    """
    while tl.max(said) >= 0:
        said = hear_head(cursors, slot, head, TILES, THREADS)
    return tl.max(said & 0x7FFFFFFF)


@triton.jit
def forget_heads(cursors, slot, before, programs):
    """Clears what `largest_of_head` knows of a row's heads, if `before`, of `count_arrival`, says
    that all others of its `programs` had been counted."""
    if tl.max(before) == programs - 1:
        counter = tl.arange(0, _COUNTERS)
        tl.store(cursors.arrivals + slot * _COUNTERS + counter, 0, mask=counter > 0)


@triton.jit
def prefix_sums(v):
    """Sums over the first 1 ... A rows of v [A, C], FP32 [A, C].

    Every sum adds in the order of one tree over all rows, with zeros for later ones: where v never
    is positive, the sums never grow. (`tl.cumsum` fails to compile beside products on Triton 3.6.)
    """
    i = tl.arange(0, v.shape[0])
    included = i[None, :] <= i[:, None]
    return tl.sum(tl.where(included[:, :, None], v[None, :, :], 0.0), 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return triton.knobs.runtime.interpret


def precision_of(a: torch.dtype, b: torch.dtype) -> str:
    """How `exact_dot` multiplies here, given for each operand a dtype that holds its values."""
    if interpreted():
        return "ieee"
    if torch.float32 not in (a, b):
        return "bf16" if a == b == torch.bfloat16 else "tf32"
    if b == torch.bfloat16:
        return "bf16_terms"
    return "bf16_terms_of_b" if a == torch.bfloat16 else "tf32x3"


def halves_of(a: torch.dtype, b: torch.dtype) -> str:
    """`precision_of` with every FP32 operand in two TF32 terms, the first of them rounded: half the
    instructions of three BF16 terms, and off by 2^-24 per product, as an FP32 product is."""
    if interpreted() or torch.float32 not in (a, b):
        return precision_of(a, b)
    if a == b:
        return "tf32_halves"
    return "tf32_halves_of_a" if a == torch.float32 else "tf32_halves_of_b"


def readers_times(readers: torch.dtype, state: torch.dtype) -> str:
    """`precision_of` vectors [T, C] times the transpose of a state [R, C], for one warp that keeps
    the vectors: BF16 takes half the registers of TF32."""
    if not interpreted() and (readers, state) == (torch.bfloat16, torch.float16):
        return "bf16_halves_of_b"
    return precision_of(readers, state)


@triton.jit
def _leading_bits(x):
    """x cut to the eight significant bits of BF16: cheaper than rounding, and a sum of three such
    terms is as exact."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bf16_terms(x):
    """x as a sum of three BF16 numbers, the largest first."""
    high = _leading_bits(x)
    middle = _leading_bits(x - high)
    low = ((x - high) - middle).to(tl.bfloat16)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low


@triton.jit
def _tf32_bits(x):
    """x cut to the eleven significant bits of TF32."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x):
    """x as a sum of two terms for TF32 products: eleven significant bits, and a rest of at most 12
    with a sign of its own, so that the bit that a product cuts from it has no preferred sign."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def exact_dot(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a @ b of FP32 tiles, products of FP32 accuracy.

    "ieee" multiplies in FP32. The others use tensor cores: "bf16" and "tf32" one product of
    operands that must be exact in that format; "bf16_terms" a as a sum of three BF16 terms, which
    is all of it, and b in BF16, which must be exact: products are then exact, and with
    "bf16_terms_of_b" the same the other way round; "bf16_halves_of_b" that with two terms, for a b
    that is exact in FP16; "tf32x3" each operand
    as a sum of two TF32 terms, 2^-22 relative per product; "tf32_terms" the same with the product
    of the small terms, and cut instead of rounded, in half the instructions, for finite operands.
    "tf32_halves", "tf32_halves_of_a" and "tf32_halves_of_b": see `halves_of`; for finite operands,
    of which one that is no sum of terms must be exact in TF32.
    """
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), accumulator)
    elif PRECISION == "bf16_terms":
        high, middle, low = bf16_terms(a)
        b = b.to(tl.bfloat16)
        accumulator = tl.dot(low, b, accumulator)
        accumulator = tl.dot(middle, b, accumulator)
        return tl.dot(high, b, accumulator)
    elif PRECISION == "bf16_terms_of_b":
        high, middle, low = bf16_terms(b)
        a = a.to(tl.bfloat16)
        accumulator = tl.dot(a, low, accumulator)
        accumulator = tl.dot(a, middle, accumulator)
        return tl.dot(a, high, accumulator)
    elif PRECISION == "bf16_halves_of_b":
        high = _leading_bits(b)
        a, low = a.to(tl.bfloat16), (b - high).to(tl.bfloat16)
        accumulator = tl.dot(a, low, accumulator)
        return tl.dot(a, high.to(tl.bfloat16), accumulator)
    elif PRECISION == "tf32_terms":
        high, b_high = _tf32_bits(a), _tf32_bits(b)
        low, b_low = a - high, b - b_high  # 13 bits, of which TF32 holds 11 or more
        accumulator = tl.dot(low, b_low, accumulator, input_precision="tf32")
        accumulator = tl.dot(low, b_high, accumulator, input_precision="tf32")
        accumulator = tl.dot(high, b_low, accumulator, input_precision="tf32")
        return tl.dot(high, b_high, accumulator, input_precision="tf32")
    elif PRECISION == "tf32_halves_of_a":
        high, low = _halves(a)
        accumulator = tl.dot(low, b, accumulator, input_precision="tf32")
        return tl.dot(high, b, accumulator, input_precision="tf32")
    elif PRECISION == "tf32_halves_of_b":
        high, low = _halves(b)
        accumulator = tl.dot(a, low, accumulator, input_precision="tf32")
        return tl.dot(a, high, accumulator, input_precision="tf32")
    elif PRECISION == "tf32_halves":
        high, low = _halves(a)
        b_high, b_low = _halves(b)
        accumulator = tl.dot(low, b_high, accumulator, input_precision="tf32")
        accumulator = tl.dot(high, b_low, accumulator, input_precision="tf32")
        return tl.dot(high, b_high, accumulator, input_precision="tf32")
    else:
        return tl.dot(a, b, accumulator, input_precision=PRECISION)
