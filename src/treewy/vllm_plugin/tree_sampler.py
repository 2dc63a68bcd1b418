"""Acceptance of draft trees, in the place of vLLM's rejection sampler.

Drafts of a tree are chosen, not drawn, so the lossless rule is to take the target's own token after each row and to go on
as long as a child holds it: the tokens are those that the target would have given without drafts, and a tree only decides
how many come at once.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from treewy.ops import accept
from treewy.ops import tree as trees
from treewy.packed import TreeTables
from treewy.shapes import Float, Int, Tensor
from treewy.vllm_plugin.step import Step, sent
from treewy.vllm_plugin.synthetic import SYNTHETIC, Synthetic, depth_rates
from treewy.vllm_plugin.trees import Trees

# Of logits in float32 that sampling may hold at once: a tree has many rows, each as wide as the vocabulary.
MAX_CHUNK_BYTES = 2**30


class Wanted(NamedTuple):
    """Log-probabilities beside those of what was sampled, the most that any request of a batch asks for.

    Attributes:
        likeliest: Of the likeliest tokens.
        named: Of tokens that the request names.
    """

    likeliest: int
    named: int


class Walked(NamedTuple):
    """What a batch accepted.

    Attributes:
        tokens: Tokens of each request, the accepted drafts and one of the target's; -1 past their number.
        counts: How many those are.
        path: Accepted rows of each request, local to its tree, the root first.
    """

    tokens: Int[Tensor, "X P"]
    counts: Int[Tensor, "X"]
    path: Int[Tensor, "X P"]


def sampler_class(vllm: ModuleType) -> type:
    """Return vLLM's rejection sampler, for trees.

    Args:
        vllm: The compat module of the installed vLLM.
    """

    class TreeSampler(vllm.RejectionSampler):
        """Walks each request's tree along the target's own tokens.

        Args:
            sampler: vLLM's.
            speculative: Its speculative configuration.
            shared: What the plugin's layers share.
            num_ids: Token ids that there are.
        """

        def __init__(self, sampler: Any, speculative: Any, shared: Any, num_ids: int) -> None:
            device = shared.memory.lengths.device
            super().__init__(sampler, speculative, device)
            self.trees: Trees = shared.trees
            self.step: Step = shared.step
            self.alone = torch.zeros(shared.memory.sizes.num_requests, dtype=torch.bool, device=device)
            self.synthetic = None
            if speculative.rejection_sample_method == SYNTHETIC:
                rates = depth_rates(speculative.synthetic_acceptance_rates, self.trees.tree.max_depth)
                self.synthetic = Synthetic(self.trees.tree, rates, num_ids, device)

        @property
        def lasting(self) -> dict[str, Tensor]:
            """What is written once and read ever after."""
            return {"alone": self.alone} | ({} if self.synthetic is None else self.synthetic.lasting)

        def __call__(self, logits: Tensor, input_batch: Any, *_: Any) -> Any:
            """Sample; see vLLM's. What is passed beside the batch is about chains."""
            nans = vllm.get_num_nans(logits) if self.sampler.compute_nans else None
            positions = input_batch.positions[input_batch.logits_indices]
            drafts = self._drafts(input_batch)
            wanted = self._wanted(input_batch)
            processed = self.sampler.logprobs_mode in vllm.PROCESSED_LOGPROBS_MODES
            choices, kept = self._choose(logits, input_batch, drafts, positions, wanted is not None and processed)
            tables = self._tables(input_batch)
            if self.synthetic is not None:
                choices = self.synthetic.override(tables, drafts, choices)
            walked = walk(tables, drafts, choices, self.trees.max_path, _backend(logits))
            scores = None
            if wanted is not None:
                scores = self._scores(kept if processed else logits, input_batch, tables, walked, wanted)
            counts, rejected = vllm.get_num_sampled_and_rejected(
                walked.counts,
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                self.sampler.req_states.prefill_len.gpu,
            )
            self.trees.path = walked.path
            return vllm.SamplerOutput(
                sampled_token_ids=walked.tokens.long(),
                logprobs_tensors=scores,
                num_nans=nans,
                num_sampled=counts,
                num_rejected=rejected,
            )

        def _drafts(self, batch: Any) -> Int[Tensor, "N"]:
            """Return the token of each row, -1 where it may not be accepted: in a prompt, and see `alone`."""
            requests, local = batch.expanded_idx_mapping.long(), batch.expanded_local_pos
            roots = batch.positions[batch.logits_indices - local]
            in_prompt = (local > 0) & (roots < self.sampler.req_states.prefill_len.gpu[requests])
            return torch.where(in_prompt | self.alone[requests], -1, batch.input_ids[batch.logits_indices]).to(
                torch.int32
            )

        def _choose(
            self, logits: Tensor, batch: Any, drafts: Tensor, positions: Tensor, keeps: bool
        ) -> tuple[Int[Tensor, "N"], Tensor | None]:
            """Return the target's token after each row, and the processed logits if they are to be kept."""
            chosen, kept = [], []
            bounds = np.asarray(batch.cu_num_logits_np)
            for start, end in chunks(bounds, max(1, MAX_CHUNK_BYTES // (4 * logits.shape[1]))):
                part = slice(int(bounds[start]), int(bounds[end]))
                processed = vllm.processed_logits(
                    self.sampler, logits[part], batch, slice(start, end), part, positions[part], drafts[part]
                )
                states = self.sampler.sampling_states
                sampled = vllm.sample(
                    processed,
                    batch.expanded_idx_mapping[part],
                    states.temperature.gpu,
                    states.seeds.gpu,
                    positions[part],
                    self.sampler.use_fp64_gumbel,
                )
                chosen.append(sampled.to(torch.int32))
                if keeps:
                    kept.append(processed)
            return torch.cat(chosen), torch.cat(kept) if keeps else None

        def _tables(self, batch: Any) -> TreeTables:
            """Return the trees of the rows that have logits: a prompt's are one root each."""
            sizes = np.diff(batch.cu_num_logits_np)
            running = self.step.tables
            if running is not None and np.array_equal(self.step.drafted.sizes, sizes):
                return running.tree.first(len(sizes), int(sizes.sum()))
            shape = np.asarray(self.trees.tree.parents, dtype=np.int32)
            parents = np.concatenate([shape[:size] for size in sizes])
            device = batch.cu_num_logits.device
            return trees.tables(
                sent(parents, device),
                batch.cu_num_logits.to(torch.int32),
                max_rows=len(shape),
                backend=_backend(batch.cu_num_logits),
            )

        def _wanted(self, batch: Any) -> Wanted | None:
            """Return the log-probabilities that requests of the batch ask for, None if no request does."""
            likeliest = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
            named = self.sampler.logprob_token_ids_state.max_num_token_ids(batch.idx_mapping_np)
            if likeliest == vllm.NO_LOGPROBS and named == 0:
                return None
            return Wanted(0 if likeliest == vllm.NO_LOGPROBS else likeliest, named)

        def _scores(self, logits: Tensor | None, batch: Any, tables: TreeTables, walked: Walked, wanted: Wanted) -> Any:
            """Return log-probabilities of what was sampled: those of the rows along each path."""
            assert logits is not None
            rows = (tables.cu_rows[:-1, None] + walked.path).long()
            width = rows.shape[1]
            bounds = list(range(0, rows.numel() + 1, width))
            modes = ("raw_logits", "processed_logits")
            return vllm.compute_topk_scores(
                logits[rows.flatten()],
                wanted.likeliest,
                walked.tokens.clamp(min=0).long().flatten(),
                bounds,
                logprob_token_ids_state=self.sampler.logprob_token_ids_state,
                expanded_idx_mapping=batch.idx_mapping.repeat_interleave(width),
                max_per_req_token_ids=wanted.named,
                logits_mode=self.sampler.logprobs_mode in modes,
            )

    return TreeSampler


def walk(tables: TreeTables, drafts: Tensor, choices: Tensor, max_path: int, backend: str) -> Walked:
    """Follow each tree along the target's tokens; see `accept.walk_choices`."""
    out = accept.walk_choices(tables, drafts, choices, max_path=max_path, backend=backend)
    path = torch.where(out.tokens >= 0, out.path.rows - tables.cu_rows[:-1, None], 0)
    return Walked(out.tokens, out.path.lengths.clone(), path)


def chunks(bounds: Int[np.ndarray, "X"], most: int) -> list[tuple[int, int]]:
    """Return ranges of requests whose rows are at most `most` together, or those of one request."""
    ranges, start = [], 0
    while start < len(bounds) - 1:
        end = int(np.searchsorted(bounds, bounds[start] + most, side="right")) - 1
        ranges.append((start, max(end, start + 1)))
        start = ranges[-1][1]
    return ranges


def needs_root_alone(sampling: Any) -> bool:
    """Return whether a request's drafts may not be accepted, because what it samples depends on more than logits and position.

    vLLM counts the drafts before a row as its history, which for trees they are not. The root's row is right.

    Args:
        sampling: vLLM's parameters of the request.
    """
    history = (
        sampling.presence_penalty != 0,
        sampling.frequency_penalty != 0,
        sampling.repetition_penalty != 1,
        bool(sampling.bad_words),
        sampling.structured_outputs is not None,
        getattr(sampling, "thinking_token_budget", None) is not None,
    )
    return any(history)


def _backend(tensor: Float[Tensor, "..."] | Int[Tensor, "..."]) -> str:
    return "triton" if tensor.is_cuda else "eager"
