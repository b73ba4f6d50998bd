"""Parameters of a stage as FSDP2 and tensor parallelism cut them: what is gathered together, which rows a rank has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from titan_like.models.flavors import ModelConfig


@dataclass(frozen=True)
class Table:
    """One parameter: dim 0 is cut by FSDP2 after `tp` ranks have cut dim 0 (or, by `columns`, dim 1)."""

    name: str
    rows: int
    columns: int = 1
    cut: int = 1  # tensor-parallel ranks that share dim 0
    float8: bool = False  # cast before it is gathered, a byte per number

    def rows_of(self, tp_rank: int) -> int:
        """Rows of a tensor-parallel rank."""
        return local_rows(self.rows, self.cut, tp_rank)


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers and reduces together, as the first tensor-parallel rank has them."""

    name: str
    tables: tuple[Table, ...]

    @property
    def numel(self) -> int:
        return sum(numbers for _, numbers in self.numbers)

    @cached_property
    def numbers(self) -> list[tuple[str, int]]:
        """Name and numbers of every table."""
        return [(table.name, table.rows_of(0) * table.columns) for table in self.tables]

    def padded(self, ranks: int) -> int:
        """Numbers in the flat buffers of all ranks together: every part is as long as the longest."""
        if ranks not in self._padded:
            self._padded[ranks] = sum(-(-table.rows_of(0) // ranks) * ranks * table.columns for table in self.tables)
        return self._padded[ranks]

    @cached_property
    def _padded(self) -> dict[int, int]:
        return {}

    def gathered(self, ranks: int, number: int) -> int:
        """Bytes of the gathered weights, those that are not float8 with `number` bytes each."""
        narrow = sum(-(-table.rows_of(0) // ranks) * ranks * table.columns for table in self._float8)
        return self.padded(ranks) * number - narrow * (number - 1)

    @cached_property
    def _float8(self) -> list[Table]:
        return [table for table in self.tables if table.float8]


def local_rows(rows: int, ranks: int, rank: int) -> int:
    """torch.chunk's rule: equal parts, the last ones short or empty."""
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - chunk * rank))


def block_group(model: ModelConfig, tp: int, float8: Iterable[str] = ()) -> Group:
    """One transformer block: products by columns are cut in dim 0, products by rows in dim 1, norms not.

    Args:
        float8: those that are gathered in float8.
    """
    d, h = model.dim, model.head_dim
    q, k, f = model.n_heads * h, model.n_kv_heads * h, model.ffn_dim
    tables = [Table("n1", d), Table("wq", q, d, tp), Table("wk", k, d, tp), Table("wv", k, d, tp)]
    if model.qkv_bias:
        tables += [Table("wq.bias", q, 1, tp), Table("wk.bias", k, 1, tp), Table("wv.bias", k, 1, tp)]
    if model.qk_norm:
        tables += [Table("q norm", h), Table("k norm", h)]
    tables += [
        Table("wo", d, q // tp),
        Table("n2", d),
        Table("w1", f, d, tp),
        Table("w2", d, f // tp),
        Table("w3", f, d, tp),
    ]
    return Group("block", tuple(replace(table, float8=True) if table.name in float8 else table for table in tables))


def groups_of(
    model: ModelConfig, tp: int, *, blocks: Mapping[str, tuple[Group, int]], first: bool, last: bool, together: bool
) -> dict[str, tuple[Group, int]]:
    """Every kind of group of a stage, those of `blocks` among them, and how often the stage has it.

    `together`: embedding, last norm and head are one group, the root's. A table tied in the stage always is.
    """
    table, norm = Table("tok_embeddings", model.vocab_size, model.dim, tp), Table("norm", model.dim)
    head = Table("output", model.vocab_size, model.dim, tp)
    found: dict[str, tuple[Group, int]] = {}
    is_tied = first and last and model.tie_embeddings
    if is_tied or (together and (first or last)):
        tables = [table] if first else []
        tables += [norm] if last else []
        tables += [head] if last and not is_tied else []
        found["root"] = (Group("root", tuple(tables)), 1)
    elif first:
        found["embedding"] = (Group("embedding", (table,)), 1)
    found |= blocks
    if last and "root" not in found:
        found["head"] = (Group("head", (norm, head)), 1)
    return found
