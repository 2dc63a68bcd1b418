"""Tree attention beside FlashAttention-3 on as many causal rows, on one GPU: CUDA-graph replays, cold L2.

python benchmarks/attention.py [--lengths 4096,32768] [--batches 1,32] [--rows 4,16,64] [--sweep] [--json FILE]

The peer is the build that vLLM ships, `vllm.vllm_flash_attn`, with its schedule computed outside what is timed, as vLLM
does; without vLLM only our side runs. It is asked with its own choice of splits and with vLLM's bound for captured graphs,
and the faster counts. Its rows lie in the pages; ours lie beside them, under a random tree.

`--sweep` times every candidate of `SWEEP` instead of the table in `kernels/geometry.py`, and prints the best of each shape.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from treewy.bench.environment import environment
from treewy.bench.ops import require_gpu
from treewy.errors import BackendError
from treewy.ops import attention, launch
from treewy.ops.attention import Paged, kernels
from treewy.ops.attention.kernels.geometry import CHUNKING, Chunking, Geometry
from treewy.packed import pack
from treewy.tree import DraftTree

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE, DTYPE = 16, 2, 256, 16, torch.bfloat16
SCALE = HEAD_DIM**-0.5

# Bytes of keys and values that calls go through before they meet the first again; no GPU's L2 holds them.
COLD = 300 * 2**20

# pairs, places, columns, num_warps, num_stages
BLOCKS = [
    Geometry(64, 32, 256, 4, 3),
    Geometry(64, 32, 256, 4, 5),
    Geometry(64, 32, 256, 4, 7),
    Geometry(64, 32, 128, 4, 7),
    Geometry(64, 32, 64, 4, 7),
    Geometry(128, 32, 256, 8, 5),
    Geometry(128, 32, 256, 8, 7),
    Geometry(128, 32, 128, 8, 7),
]
CHUNKINGS = [
    CHUNKING,
    CHUNKING._replace(least=256),
    CHUNKING._replace(least=512, per_pair=8),
    CHUNKING._replace(most=2048, per_pair=8, fewest=8, share=2048),
]
SWEEP = list(itertools.product(BLOCKS, CHUNKINGS))


class Case(NamedTuple):
    """One shape of the table."""

    length: int
    batch: int
    rows: int

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        return 2 * self.batch * (self.length + self.rows) * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize


class Operands(NamedTuple):
    """What the calls of one case share, and the tables of each: every call reads pages of its own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: list[torch.Tensor]
    lengths: torch.Tensor

    def committed(self, call: int) -> Paged:
        return Paged(self.keys, self.values, self.tables[call], self.lengths)


def build(case: Case) -> Operands:
    """Make the operands; the tree's rows lie in the pages as well, behind the committed places, for the peer."""
    columns = -(-(case.length + case.rows) // PAGE)
    sets = max(2, -(-COLD // case.bytes))
    keys, values = (
        torch.randn(sets * case.batch * columns, PAGE, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        for _ in range(2)
    )
    tables = list(torch.randperm(len(keys), device="cuda").int().view(sets, case.batch, columns))
    q = torch.randn(case.batch * case.rows, NUM_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, case.batch * case.rows, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    places = case.length + torch.arange(case.rows, device="cuda")
    for table in tables:
        at = table[:, places // PAGE].long(), (places % PAGE).expand(case.batch, -1)
        keys[at], values[at] = (x.view(case.batch, case.rows, NUM_KV_HEADS, HEAD_DIM) for x in (k, v))
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
    return Operands(q, k, v, keys, values, tables, lengths)


def ours(case: Case, x: Operands, tree: DraftTree) -> Callable[[int], torch.Tensor]:
    """Return our call, with buffers made once."""
    tables = pack([tree] * case.batch, device="cuda").tables
    out = torch.empty_like(x.q)
    scratch = attention.workspace(*x.q.shape, x.committed(0).max_places, device="cuda")

    def call(i: int) -> torch.Tensor:
        return attention.verify_paged(
            x.q, x.k, x.v, x.committed(i), tables, scale=SCALE, out=out, scratch=scratch, backend="triton"
        )

    return call


def peer(case: Case, x: Operands, num_splits: int) -> Callable[[int], torch.Tensor]:
    """Return FlashAttention-3's call on the same rows as a causal chain."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    cu_rows = torch.arange(0, len(x.q) + 1, case.rows, device="cuda", dtype=torch.int32)
    used = x.lengths + case.rows
    schedule = get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=case.rows,
        max_seqlen_k=case.length + case.rows,
        num_heads_q=NUM_HEADS,
        num_heads_kv=NUM_KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=used,
        qkv_dtype=DTYPE,
        cu_seqlens_q=cu_rows,
        page_size=PAGE,
        causal=True,
        num_splits=num_splits,
    )
    out = torch.empty_like(x.q)

    def call(i: int) -> torch.Tensor:
        return flash_attn_varlen_func(
            q=x.q,
            k=x.keys,
            v=x.values,
            out=out,
            cu_seqlens_q=cu_rows,
            max_seqlen_q=case.rows,
            seqused_k=used,
            max_seqlen_k=case.length + case.rows,
            softmax_scale=SCALE,
            causal=True,
            block_table=x.tables[i],
            scheduler_metadata=schedule,
            num_splits=num_splits,
            fa_version=3,
        )

    return call


def captured(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """Capture one call on each set of pages."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def median_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, reps: int) -> list[float]:
    """Return the median time of a call of each graph; rounds take turns."""
    samples: list[list[float]] = [[] for _ in graphs]
    for round_ in range(reps + 3):
        for graph, times in zip(graphs, samples, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if round_ >= 3:
                times.append(start.elapsed_time(stop) * 1e3 / calls)
    return [statistics.median(times) for times in samples]


@contextmanager
def chosen(blocks: Geometry | None = None, chunking: Chunking | None = None, *, merge: bool = True) -> Iterator[None]:
    """Run our kernels with other blocks or chunks than the table's, or without the merge."""
    module = kernels.shapes
    old = module.geometry, module.CHUNKING, kernels.launch

    def without_merge(kernel: Any, *args: Any, **options: Any) -> None:
        if launch.name_of(kernel) != "merge_parts_kernel":
            launch.launch(kernel, *args, **options)

    if blocks is not None:
        module.geometry = lambda *_: blocks
    module.CHUNKING = chunking or old[1]
    kernels.launch = launch.launch if merge else without_merge
    try:
        yield
    finally:
        module.geometry, module.CHUNKING, kernels.launch = old


def random_tree(rows: int) -> DraftTree:
    """Return a tree whose rows have their parents anywhere before them."""
    rng = np.random.default_rng(rows)
    return DraftTree([-1, *(int(rng.integers(0, row)) for row in range(1, rows))])


def peers(case: Case, x: Operands) -> dict[str, Callable[[int], torch.Tensor]]:
    try:
        import vllm.vllm_flash_attn  # noqa: F401
    except ImportError:
        return {}
    return {"fa3": peer(case, x, 0), "fa3, 32 splits": peer(case, x, 32)}


def measure(case: Case, reps: int) -> dict[str, Any]:
    """Time one shape, with the largest difference to the peer on a chain."""
    x = build(case)
    calls = {"ours": ours(case, x, random_tree(case.rows)), **peers(case, x)}
    graphs = [captured(call, len(x.tables)) for call in calls.values()]
    with chosen(merge=False):
        graphs.append(captured(calls["ours"], len(x.tables)))
    times = dict(zip([*calls, "parts"], median_us(graphs, len(x.tables), reps), strict=True))
    row = case._asdict() | {"us": {name: round(us, 2) for name, us in times.items()}}
    row["bytes"], row["gb_per_s"] = case.bytes, round(case.bytes / times["ours"] / 1e3)
    fastest = min((us for name, us in times.items() if name.startswith("fa3")), default=None)
    if fastest is not None:
        chain = ours(case, x, DraftTree.chain(case.rows - 1))(0).float()
        row["ratio"] = round(times["ours"] / fastest, 3)
        row["difference"] = (chain - calls["fa3"](0).float()).abs().max().item()
    return row


def sweep(case: Case, reps: int) -> list[dict[str, Any]]:
    """Time every candidate on one shape, fastest first; what does not compile or fit is left out, with its reason."""
    x, rows = build(case), []
    for blocks, chunking in SWEEP:
        with chosen(blocks, chunking):
            call = ours(case, x, random_tree(case.rows))
            try:
                graph = captured(call, len(x.tables))
            except Exception as error:  # any compiler's refusal ends one candidate, not the sweep
                torch.cuda.synchronize()
                rows.append({"blocks": blocks, "chunking": chunking, "error": repr(error)[:120]})
                continue
            rows.append({"blocks": blocks, "chunking": chunking, "us": median_us([graph], len(x.tables), reps)[0]})
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    """Run the table, or the sweep."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[4096, 32768])
    parser.add_argument("--batches", type=numbers, default=[1, 32])
    parser.add_argument("--rows", type=numbers, default=[4, 16, 64])
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--top", type=int, default=6, help="candidates of a sweep to print per shape")
    parser.add_argument("--json", help="write every row here, as JSON lines")
    given = parser.parse_args()
    try:
        require_gpu()
    except BackendError as error:
        parser.error(str(error))
    lines = []
    for case in itertools.starmap(Case, itertools.product(given.lengths, given.batches, given.rows)):
        torch.manual_seed(0)
        if given.sweep:
            found = sweep(case, given.reps)
            lines += [case._asdict() | row for row in found]
            for row in found[: given.top]:
                print(case, tuple(row["blocks"]), tuple(row["chunking"]), row.get("us", row.get("error")), flush=True)
        else:
            lines.append(measure(case, given.reps))
            print(json.dumps(lines[-1]), flush=True)
        torch.cuda.empty_cache()
    if given.json:
        header = {"benchmark": "attention", "environment": environment(torch.device("cuda"), seed=0, also=("vllm",))}
        with open(given.json, "w") as file:
            file.write(json.dumps(header) + "\n")
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
