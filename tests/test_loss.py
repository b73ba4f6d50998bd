"""The chunked loss against torch's own cross entropy of whole logits, in fp64."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.estimation.cpu_memory import CpuMemory
from titan_like.config.schema import Training
from titan_like.loss import IGNORED, LinearCrossEntropy, Vocabulary, chunk_loss

ROWS, COLUMNS, DIM, VOCAB = 3, 5, 4, 11


def in_chunks(count: int, **settings: float) -> LinearCrossEntropy:
    return LinearCrossEntropy(chunks=Training(loss_chunks=count).chunks_of, **settings)


def a_case(valid: str = "some") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, table, labels and a factor per row, in fp64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, COLUMNS, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (ROWS, COLUMNS), generator=generator)
    if valid == "none":
        labels[:] = IGNORED
    if valid == "some":
        labels[0] = labels[1, ::2] = IGNORED
    return hidden, table, labels, torch.tensor([[0.5], [2.0], [-1.0]], dtype=torch.float64)


def plain(hidden: Tensor, table: Tensor, labels: Tensor, factors: Tensor, z_loss: float) -> Tensor:
    logits = F.linear(hidden, table)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    each = each.view_as(labels) + torch.where(labels != IGNORED, z_loss * torch.logsumexp(logits, 2) ** 2, 0.0)
    return (factors * each).sum()


@pytest.fixture(params=["a CPU", "a device that nobody waits for"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A CPU leaves ignored labels out; elsewhere they are computed, and count nothing."""
    if request.param != "a CPU":
        monkeypatch.setattr("titan_like.loss._valid_rows", lambda labels: None)
    yield request.param


@pytest.mark.parametrize("valid", ["all", "some", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunks", [1, 2, 4, 7, 15, 99])  # of 15 tokens
def test_equals_the_plain_loss(chunks: int, z_loss: float, valid: str, where: str) -> None:
    found, expected = [], []
    for loss, into in ((in_chunks(chunks, z_loss=z_loss), found), (partial(plain, z_loss=z_loss), expected)):
        hidden, table, labels, factors = a_case(valid)
        value = loss(hidden, table, labels, factors)
        (value * 3).backward()
        into += [value.detach(), hidden.grad, table.grad]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_are_those_of_the_value(chunks: int) -> None:
    hidden, table, labels, factors = a_case()
    assert torch.autograd.gradcheck(lambda h, t: in_chunks(chunks, z_loss=0.2)(h, t, labels, factors), (hidden, table))


def test_by_hand() -> None:
    """Logits (0, log 3), (0, 0): losses -log(1/4) and -log(1/2), and their gradients softmax - one-hot."""
    hidden = torch.tensor([[[1.0], [0.0], [7.0]]], requires_grad=True)
    table = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    loss = in_chunks(2)(hidden, table, torch.tensor([[0, 1, IGNORED]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4) + math.log(2))
    assert table.grad is not None and hidden.grad is not None
    assert table.grad.flatten().tolist() == pytest.approx([-0.75, 0.75])
    assert hidden.grad.flatten().tolist() == pytest.approx([0.75 * math.log(3), -0.5 * math.log(3), 0.0])


def test_z_loss_is_for_training() -> None:
    """Two equal logits of 0: log Z is log 2."""
    hidden, table, labels = torch.zeros(1, 1, 1), torch.ones(2, 1), torch.tensor([[0]])
    loss = in_chunks(1, z_loss=0.1)
    assert loss(hidden, table, labels).item() == pytest.approx(math.log(2) + 0.1 * math.log(2) ** 2)
    with torch.no_grad():
        assert loss(hidden, table, labels).item() == pytest.approx(math.log(2))


def test_large_logits() -> None:
    """exp(1000) is beyond every dtype; the losses are 0 and 2000."""
    hidden, table = torch.tensor([[[1000.0], [1000.0]]]), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = in_chunks(1)(hidden, table, torch.tensor([[0, 1]]))
    loss.backward()
    assert loss.item() == pytest.approx(2000)
    assert table.grad is not None and table.grad.flatten().tolist() == pytest.approx([1000, -1000])


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_a_label_outside_the_vocabulary_is_no_label(label: int) -> None:
    hidden, table, labels, factors = a_case("all")
    labels[1, 2] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        in_chunks(4)(hidden, table, labels, factors)


@pytest.mark.parametrize("frozen", ["hidden", "table"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, table, labels, factors = a_case()
    inputs = {"hidden": hidden, "table": table}
    inputs[frozen].requires_grad_(False)
    in_chunks(4)(hidden, table, labels, factors).backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is None] == [frozen]


def test_bf16_is_computed_in_fp32() -> None:
    """The logits are 0 but for one 10, exact in bf16; a sum of 1000 exponentials in bf16 would be off by percents."""
    hidden = torch.tensor([[[1.0]]], dtype=torch.bfloat16)
    table = torch.zeros(1000, 1, dtype=torch.bfloat16)
    table[7] = 10.0
    loss = in_chunks(1)(hidden, table, torch.tensor([[3]]))
    assert loss.item() == pytest.approx(math.log(999 + math.exp(10)), rel=1e-6)


def test_the_table_gradient_is_added_up_in_fp32() -> None:
    """One chunk gives -256 for the row of its label, 255 give -1/2 each: added to 256 in bf16, each would be lost."""
    hidden = torch.full((1, 256, 1), 1.0, dtype=torch.bfloat16)
    hidden[0, 0] = 512.0
    table = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    in_chunks(256)(hidden, table, torch.zeros(1, 256, dtype=torch.int64)).backward()
    assert table.grad is not None
    assert table.grad.flatten().tolist() == [-384.0, 384.0]  # -256 - 127.5 = -383.5, rounded to bf16


def test_auto_makes_chunks_as_long_as_the_model_is_wide() -> None:
    """8192 tokens: 8 chunks of 1024, the shortest; 2 of a width of 4096; 5 of 1639 for one of 2000."""
    auto = Training().chunks_of
    assert [auto(8192, 256), auto(8192, 4096), auto(8192, 2000), auto(100, 256)] == [8, 2, 5, 1]


def test_ignored_labels_cost_nothing_on_a_cpu() -> None:
    """Of 64 tokens 5 count: one chunk of 8 instead of 8 chunks."""
    seen = []

    def counting(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor | None]:
        seen.append(len(hidden))
        return chunk_loss(hidden, *rest)  # type: ignore[arg-type]

    labels = torch.full((2, 32), IGNORED)
    labels[1, 3:8] = 1
    loss = LinearCrossEntropy(chunks=Training(loss_chunks=8).chunks_of, chunk_loss=counting)
    loss(torch.randn(2, 32, 4, requires_grad=True), torch.randn(9, 4), labels)
    assert seen == [5]
    loss(torch.randn(2, 32, 4, requires_grad=True), torch.randn(9, 4), labels.fill_(IGNORED))
    assert seen == [5]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch's bf16 products take scratch for each further thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_logits_never_exist(dtype: torch.dtype) -> None:
    """256 tokens, 4096 words, width 16: the logits of a chunk of 16 tokens are the largest but for the table's own."""
    tokens, vocab, dim, chunks = 256, 4096, 16, 16
    hidden = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)
    table = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (1, tokens))
    in_chunks(chunks)(hidden, table, labels).backward()  # what torch allocates once
    with CpuMemory() as memory:
        in_chunks(chunks)(hidden, table, labels).backward()
    piece, weights = tokens // chunks * vocab, vocab * dim
    assert max(memory.changes) <= 4 * max(piece, weights)
    assert memory.peak < 4 * (2.5 * piece + 2 * weights) < dtype.itemsize * tokens * vocab


def test_without_gradients_only_a_chunk_of_logits_is_made() -> None:
    hidden, table, labels = torch.randn(1, 256, 4), torch.randn(4096, 4), torch.randint(0, 4096, (1, 256))
    with torch.no_grad(), CpuMemory() as memory:
        in_chunks(16)(hidden, table.requires_grad_(), labels)
    assert memory.peak < 4 * 2.1 * 16 * 4096


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_the_vocabulary_add_up(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every rank finds from its rows of the table, given the messages of the others."""
    hidden, table, labels, factors = a_case()
    plain(hidden, table, labels, factors, 0.3).backward()
    parts = [part.detach() for part in table.chunk(ranks)]
    starts = [sum(len(part) for part in parts[:rank]) for rank in range(ranks)]
    sent: list[Tensor] = []

    def exchange(message: Tensor, dim: int, group: str) -> Tensor:
        sent.append(message)
        return torch.cat(everybody) if everybody else message

    monkeypatch.setattr("titan_like.loss._all_gather", exchange)
    everybody: list[Tensor] = []
    for _ in range(2):  # in the first one the messages are collected
        sent.clear()
        found = []
        for part, start in zip(parts, starts, strict=True):
            own = part.clone().requires_grad_()
            loss = in_chunks(1, z_loss=0.3, part=Vocabulary(start, "tp"))  # type: ignore[arg-type]
            copy = hidden.detach().clone().requires_grad_()
            value = loss(copy, own, labels, factors)
            value.backward()
            found.append((value.detach(), copy.grad, own.grad))
        everybody = list(sent)
    values, of_hidden, of_table = zip(*found, strict=True)
    for value in values:
        torch.testing.assert_close(value, plain(hidden, table, labels, factors, 0.3).detach())
    torch.testing.assert_close(sum(of_hidden), hidden.grad)
    torch.testing.assert_close(torch.cat(of_table), table.grad)


def test_one_collective_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 tokens in chunks of 4."""
    sizes = []
    monkeypatch.setattr("titan_like.loss._all_gather", lambda message, *_: (sizes.append(message.numel()), message)[1])
    monkeypatch.setattr("titan_like.loss._valid_rows", lambda labels: None)
    hidden, table, labels, _ = a_case("all")
    in_chunks(4, part=Vocabulary(0, "tp"))(hidden, table, labels).backward()  # type: ignore[arg-type]
    assert sizes == [8, 8, 8, 6]  # two numbers per token


def test_a_compiled_chunk_is_the_same() -> None:
    """Two graphs, whatever the number of chunks: the second takes any number of tokens."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = LinearCrossEntropy(
        chunks=Training(loss_chunks=4).chunks_of, chunk_loss=torch.compile(chunk_loss, backend=backend, fullgraph=True)
    )
    for valid in ("all", "some", "all", "some"):
        hidden, table, labels, factors = a_case(valid)
        loss, expected = compiled(hidden, table, labels, factors), in_chunks(4)(hidden, table, labels, factors)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, [hidden, table]), torch.autograd.grad(expected, [hidden, table])
        )
    assert len(graphs) == 2
