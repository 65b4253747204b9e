"""The records of a run: names, types and meaning of every column, as tables and as dense arrays.

Owns what one record holds and how it is read back. Knows no folders and no statistics; imports
neither torch nor transformers. Positions count tokens since the prefill ended, from 0.

    file                 one row per                            there when the study asks for
    positions.parquet    prompt x position x arm                always; thinned by `positions`
    segments.parquet     prompt x segment x arm (x phase)       always kept beside thinned positions
    states.parquet       prompt x arm x layer x head x position `states`
    generations.parquet  prompt x arm, the reference included   `free_running`

summary.json holds every number that tables and figures show, computed from *all* positions before
they are thinned, so a run can be reported from it alone. Beside the statistics of `stats.summarise`
it has these keys, each absent unless measured:

    files         {name: sha256} of the segment, state and generation records: ties them to it
    arms[i].refresh  {"policy", "every"} of an arm with control "refresh": the policy's state is
                  replaced by the exact one (rounded once) every `every` tokens
    refresh       a row per refresh arm: policy, every, kl_mean (last quarter), kl_policy_mean (the
                  same policy without refresh), ratio = kl_policy_mean / kl_mean, ratio_low,
                  ratio_high (paired); near 1: what is measured is text, not accumulation
    states        see `state_summary.summarise_states`
    generations   see `generations.summarise_generations`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# One row per prompt x position x arm. Values of the reference are repeated in every arm's row, so
# that a row can be read alone; the encoding makes the repeats nearly free.
SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # tokens since the prefill ended, from 0
        pa.field("phase", pa.int32(), nullable=False),  # position mod the arm's ring length
        pa.field("arm", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("token", pa.int32(), nullable=False),  # the forced next token the row is about
        pa.field(
            "kl", pa.float32()
        ),  # KL(reference || arm), nats; null where logits are not finite
        pa.field("kl_reverse", pa.float32()),  # KL(arm || reference), nats
        pa.field("delta_logp", pa.float32()),  # log p_arm(token) - log p_reference(token), nats
        pa.field("ref_entropy", pa.float32()),  # nats
        pa.field("ref_top1_prob", pa.float32()),
        pa.field(
            "top1_match", pa.bool_()
        ),  # the reference's best token is the arm's best token too
        pa.field(
            "top2_margin", pa.float32()
        ),  # reference: log-probability of best minus second best
        pa.field("nonfinite", pa.bool_(), nullable=False),
        # State elements that saturated when written, since the text began, over all layers.
        pa.field("saturated", pa.int64(), nullable=False),
    ]
)

# One row per prompt, segment [start, stop) of positions and arm: exact sums over all positions of
# the segment. `phase` null: all ring phases; rows with a phase cover the whole run.
SEGMENT_SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("phase", pa.int32()),
        pa.field("arm", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("count", pa.int32(), nullable=False),  # positions with a finite KL: of the sums
        pa.field("nonfinite", pa.int32(), nullable=False),  # left out of every sum
        pa.field("infinite", pa.int32(), nullable=False),  # KL = +inf, left out of every sum
        pa.field("kl_sum", pa.float64(), nullable=False),
        pa.field("kl_square_sum", pa.float64(), nullable=False),
        pa.field("kl_reverse_sum", pa.float64(), nullable=False),
        pa.field("excess_nll_sum", pa.float64(), nullable=False),
        pa.field("ref_entropy_sum", pa.float64(), nullable=False),
        pa.field("top1_matches", pa.int32(), nullable=False),
        # Quantiles are null where there are fewer than 10 / (1 - q) values.
        pa.field("kl_p50", pa.float32()),
        pa.field("kl_p90", pa.float32()),
        pa.field("kl_p99", pa.float32()),
        pa.field("kl_p999", pa.float32()),
        pa.field("kl_max", pa.float32()),
        pa.field("saturated", pa.int64(), nullable=False),  # elements, in this segment; phase: 0
    ]
)

# One row per prompt, arm, recurrent layer, head and position, taken when every arm has just
# flushed. Errors are ||arm - reference|| / ||reference|| of one head, against the reference row's
# FP32 state; values are kept to 9 significant bits (.1 %).
STATE_SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # tokens read when this was measured
        pa.field("arm", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("layer", pa.int32(), nullable=False),  # index in the model
        pa.field("head", pa.int32(), nullable=False),
        pa.field("checkpoint_error", pa.float32()),  # of the checkpoint as stored
        pa.field("read_error", pa.float32()),  # of the read copy; null without one
        pa.field("output_error", pa.float32()),  # of the layer's outputs in the last window
        pa.field("state_norm", pa.float32()),  # ||checkpoint||, Frobenius
        pa.field("underflowed", pa.float32()),  # share of elements read as 0 that are not 0 exactly
        # Elements of the layer (all heads) that saturated when written, since the text began.
        pa.field("layer_saturated", pa.int64(), nullable=False),
        pa.field("log_decay", pa.float32()),  # mean per token so far, reference row's inputs
        # Sum over the writes so far of the squared decay since each, at this arm's ring length: the
        # theory's error is rho * u * sqrt(writes) (`theory.predicted_error`).
        pa.field("writes", pa.float32()),
    ]
)

# One row per prompt and arm (arm "reference" first): what it wrote by itself, `free_running`.
GENERATION_SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int32(), nullable=False),
        pa.field("arm", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("length", pa.int32(), nullable=False),  # tokens before the stop token or the cap
        pa.field("stopped", pa.bool_(), nullable=False),
        # Index of the first token that is not the reference's, its end included; null: equal texts.
        pa.field("first_divergence", pa.int32()),
        pa.field("repeated_share", pa.float32()),  # of 8-grams that occurred before in the text
        pa.field("loop", pa.bool_(), nullable=False),  # ends going round in circles
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
    ]
)


def typed_table(schema: pa.Schema, columns: Mapping[str, Sequence], arms: list[str]) -> pa.Table:
    """Build a table with `schema` from flat columns of equal length; `columns["arm"]` indexes
    `arms`.

    NaN becomes null (a missing value stays missing), as does None; infinities are kept.
    """
    arrays = []
    for field in schema:
        values = columns[field.name]
        if field.name == "arm":
            indices = pa.array(np.asarray(values, dtype=np.int32), pa.int32())
            arrays.append(pa.DictionaryArray.from_arrays(indices, pa.array(arms, pa.string())))
            continue
        array = pa.array(values)
        array = array if array.type == field.type else array.cast(field.type)
        if pa.types.is_floating(field.type):
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, field.type), array)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def records_table(columns: Mapping[str, np.ndarray], arms: list[str]) -> pa.Table:
    """A table with SCHEMA, see `typed_table`."""
    return typed_table(SCHEMA, columns, arms)


def load_columns(path: Path, schema: pa.Schema) -> dict[str, np.ndarray]:
    """Columns of a record file as flat arrays; labels for `arm`, NaN where a value is missing."""
    table = pq.read_table(path)
    columns = {}
    for field in schema:
        column = table.column(field.name)
        if field.name == "arm":
            columns[field.name] = np.array(column.cast(pa.string()).to_pylist())
        elif not pa.types.is_list(field.type):
            columns[field.name] = column.to_numpy()
    return columns


@dataclass(frozen=True, kw_only=True)
class Positions:
    """positions.parquet as dense arrays. Legend: A arms, P prompts, T scored positions.

    `kl`, `kl_reverse`, `delta_logp` [A, P, T] float32, NaN where logits were not finite, +inf kept;
    `top1_match`, `nonfinite` [A, P, T] bool; `saturated` [A, P, T] int64, counted since the text
    began; `token` [P, T]; `position` [T]; `ref_entropy` [P, T].
    """

    arms: tuple[str, ...]
    position: np.ndarray
    token: np.ndarray
    ref_entropy: np.ndarray
    kl: np.ndarray
    kl_reverse: np.ndarray
    delta_logp: np.ndarray
    top1_match: np.ndarray
    nonfinite: np.ndarray
    saturated: np.ndarray

    def first_nonfinite(self) -> list[dict]:
        """For each arm with non-finite logits: {"arm", "prompt", "position", "count", "of"} of the
        first.
        """
        found = []
        for label, bad in zip(self.arms, self.nonfinite, strict=True):
            if bad.any():
                prompt, index = np.unravel_index(bad.argmax(), bad.shape)
                where = {"prompt": int(prompt), "position": int(self.position[index])}
                found.append({"arm": label, **where, "count": int(bad.sum()), "of": bad.size})
        return found


def load_positions(path: Path | pa.Table, arms: list[str], *, prompts: int) -> Positions:
    """Read positions.parquet, or a table like it; ValueError unless all arms scored the same tokens
    of each prompt.
    """
    table = path if isinstance(path, pa.Table) else pq.read_table(path).cast(SCHEMA)
    path = "the table" if isinstance(path, pa.Table) else path
    per_prompt, remainder = divmod(table.num_rows, max(1, prompts * len(arms)))
    if remainder or not per_prompt:
        raise ValueError(
            f"{path} has {table.num_rows} rows, not {prompts} prompts x {len(arms)} arms"
        )
    shape = (prompts, per_prompt, len(arms))

    def cube(name: str) -> np.ndarray:
        column = table.column(name)
        if name in ("kl", "kl_reverse", "delta_logp", "ref_entropy"):
            values = column.to_numpy().astype(np.float32)  # null reads as NaN
        else:
            fill = column.fill_null(False) if name == "top1_match" else column
            values = fill.to_numpy()
        return np.ascontiguousarray(values.reshape(shape).transpose(2, 0, 1))

    codes = pc.index_in(table.column("arm").cast(pa.string()), value_set=pa.array(arms))
    token, position = cube("token"), cube("position")
    if codes.null_count or (codes.to_numpy().reshape(shape) != np.arange(len(arms))).any():
        raise ValueError(f"{path} does not hold the arms {arms} in that order")
    if (token != token[:1]).any() or (position != position[:1, :1]).any():
        raise ValueError(f"{path}: arms were scored on different tokens and cannot be compared")
    return Positions(
        arms=tuple(arms),
        position=position[0, 0],
        token=token[0],
        ref_entropy=cube("ref_entropy")[0],
        kl=cube("kl"),
        kl_reverse=cube("kl_reverse"),
        delta_logp=cube("delta_logp"),
        top1_match=cube("top1_match"),
        nonfinite=cube("nonfinite"),
        saturated=cube("saturated"),
    )
